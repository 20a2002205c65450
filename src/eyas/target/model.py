"""A loaded target: weights, tokenizer and the few questions the rest of eyas asks of them.

Every decoder that transformers knows is a target; there is no code per architecture here.
Invariant: a loaded target is complete (no weight was left at its random initial value), in eval mode, and is
never trained: its outputs carry no gradient.

Shapes: B batch, T tokens, D hidden size, A auxiliary states, X = A * D, V vocabulary.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging as transformers_logging

from eyas.errors import UserError
from eyas.kernels.linear.quantised_linear import QuantisedEmbedding, QuantisedLinear
from eyas.kernels.linear.w4a16_linear import W4A16Linear
from eyas.kernels.linear.w8a8_linear import W8A8Linear
from eyas.kernels.llama.mxfp4_experts import Mxfp4Experts
from eyas.target.capture import capture, last_norm
from eyas.target.chat_template import ChatFormat
from eyas.target.config import read_config
from eyas.target.device import choose_device, device_words
from eyas.target.facts import facts_of
from eyas.target.locate import explain_failures, locate, options_of
from eyas.target.quantise import ON_THE_FLY, quantise_on_gpu
from eyas.target.quantised_checkpoint import quantised_model, scheme_of
from eyas.target.template_override import apply_format
from eyas.target.text import TargetText

logger = logging.getLogger(__name__)

DTYPES: Mapping[str, torch.dtype | str] = {
    "auto": "auto",
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


ModelBuilder = Callable[[str, PretrainedConfig, str | None], PreTrainedModel]
"""Makes a model of a folder with this configuration; the last is transformers' name of the attention, or None."""


@dataclass(frozen=True, kw_only=True)
class ForwardOutput:
    """What one forward pass gives."""

    logits_BTV: torch.Tensor
    aux_hidden_BTX: torch.Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Target(TargetText):
    """A causal language model ready to run, with its tokenizer."""

    model: PreTrainedModel
    quantization: str = "none"
    """What its matrices are multiplied as: of a checkpoint that is quantised, or made by `loading.py`."""

    @classmethod
    def load(
        cls,
        source: str,
        *,
        dtype: str = "auto",
        device: str = "cpu",
        spread: bool = False,
        cache: Path | None = None,
        revision: str | None = None,
        chat_format: ChatFormat | None = None,
        build: ModelBuilder | None = None,
        quantization: str = "auto",
    ) -> "Target":
        """Load `source` (see `locate`); `spread` lays its layers over all GPUs by transformers' own means.

        `auto` keeps the precision the checkpoint names, except on a processor without arithmetic for it: there
        torch is some fifty times slower than in float32, so float32 it is. A device of `auto` is the first GPU, if
        there is one. `revision` is the hub's; `chat_format` takes the place of the tokenizer's own. `build` makes the
        model instead of transformers, on the processor, from the same files. A quantised checkpoint of a kind that
        `quantization_config.py` knows is read here, and stays packed on a GPU unless `quantization` is `none`; `fp8`
        and `int4` quantise another one, on a GPU, once it is there.
        """
        if dtype not in DTYPES:
            raise UserError(f"unknown dtype {dtype!r}; use one of {', '.join(DTYPES)}")
        where = choose_device(device)
        if spread and not loads_onto_device():
            raise UserError("spreading a target over several GPUs needs accelerate; `pip install accelerate`")
        place = locate(source, cache=cache)
        hub = options_of(source, place, revision)
        logger.info(f"loading {source} on {device_words(where, asked=device)}")
        config = read_config(source, place, hub)
        facts = facts_of(config, source)
        chat_format = chat_format or ChatFormat()
        scheme = None if build is not None else scheme_of(config, source)
        if scheme is not None and quantization in ON_THE_FLY:
            raise UserError(
                f"{source} is quantised already ({scheme.words}), and --quantization {quantization} asks for more; "
                "leave it out, or use a checkpoint in bfloat16"
            )
        model: Any
        with explain_failures(source, place), _no_progress_bar():
            tokenizer = AutoTokenizer.from_pretrained(place, **hub)
            apply_format(tokenizer, chat_format)
            variables = dict(chat_format.variables)
            if build is not None:
                built: Any = build(place, config, _attention_of(config))
                built.eval().requires_grad_(False)
                return cls(facts=facts, model=built, tokenizer=tokenizer, template_variables=variables)
            if scheme is not None:
                if spread:
                    raise UserError(f"{source} is quantised ({scheme.words}) and cannot be spread; put it on one GPU")
                model = quantised_model(
                    *(scheme, place, hub, config, _attention_of(config)),
                    source=source,
                    device=where,
                    dtype=dtype_of(dtype, config, where),
                    dequantise=quantization == "none",
                )
                model.eval().requires_grad_(False)
                packed = any(isinstance(part, W8A8Linear | W4A16Linear | Mxfp4Experts) for part in model.modules())
                return cls(
                    facts=facts,
                    model=model,
                    tokenizer=tokenizer,
                    template_variables=variables,
                    quantization=scheme.kind if packed else "none",
                )
            # A quantised checkpoint is packed for its device while loading and cannot be moved afterwards. Others go
            # straight to a GPU where they can: through the host, every process would need their size in its memory.
            straight = where.type == "cuda" and loads_onto_device()
            quantised = hasattr(config, "quantization_config")
            placement: dict[str, Any] = {"device_map": {"": where}} if straight or quantised else {}
            if spread:
                placement = {"device_map": "auto"}
            try:
                loaded: Any = AutoModelForCausalLM.from_pretrained(
                    place,
                    config=config,
                    dtype=DTYPES[dtype],
                    output_loading_info=True,
                    attn_implementation=_attention_of(config),
                    **hub,
                    **placement,
                )
            except SafetensorError as error:
                raise ValueError(f"its weights are damaged ({error})") from error
        model = loaded[0]
        if dtype == "auto" and not placement and not _computes(model.dtype, where):
            logger.info(f"this processor has no {str(model.dtype).removeprefix('torch.')} arithmetic: using float32")
            model = model.float()
        if not placement:
            model.to(where)
        missing = sorted(loaded[1]["missing_keys"])
        if missing:
            raise UserError(
                f"{source} lacks {len(missing)} weights of its architecture, the first is {missing[0]}; "
                "transformers would fill them with random numbers, use a complete checkpoint"
            )
        if quantization in ON_THE_FLY:
            quantise_on_gpu(model, quantization, source)
        return cls(
            facts=facts,
            model=model.eval().requires_grad_(False),
            tokenizer=tokenizer,
            template_variables=variables,
            quantization=quantization if quantization in ON_THE_FLY else "none",
        )

    @property
    def device(self) -> torch.device:
        """Where inputs go."""
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        """The type of the weights that are not quantised, and of the captured states."""
        return self.model.dtype

    # no_grad, not inference_mode: drafters are trained on these states and inference tensors refuse backward.
    @torch.no_grad()
    def forward(self, ids_BT: torch.Tensor, aux_layer_ids: Sequence[int]) -> ForwardOutput:
        """Run whole, equally long sequences (no padding) and return logits and the states `aux_layer_ids`."""
        with capture(self.model, aux_layer_ids) as captured:
            logits_BTV = self.model(input_ids=ids_BT.to(self.device), use_cache=False).logits
        return ForwardOutput(logits_BTV=logits_BTV, aux_hidden_BTX=captured.aux_hidden())

    def embedding(self) -> torch.Tensor:
        """Return the table of input embeddings, [V, D].

        It is the raw table, as vLLM shares it with a drafter: Gemma multiplies by sqrt(D) after the lookup, and
        that factor is part of the captured state 0 and not of this table.
        """
        return _weight(self.model.get_input_embeddings())

    def head(self) -> torch.Tensor:
        """Return the weight of the language-model head, [V, D]; the embedding table when they are tied."""
        head = self.model.get_output_embeddings()  # type: ignore[no-untyped-call]
        if head is None:
            raise UserError(f"{self.facts.source} has no language-model head; choose a causal language model")
        return _weight(head)

    def tables(self) -> tuple[torch.Tensor | QuantisedEmbedding, torch.Tensor | QuantisedLinear]:
        """Return `embedding()` and `head()` as a drafter shares them: packed where the target's are."""
        embedding, head = self.model.get_input_embeddings(), self.model.get_output_embeddings()  # type: ignore[no-untyped-call]
        return (
            QuantisedEmbedding(embedding.table) if isinstance(embedding, QuantisedEmbedding) else self.embedding(),
            head if isinstance(head, QuantisedLinear) else self.head(),
        )

    def last_norm(self) -> nn.Module | None:
        """The norm between the last layer and the head, if it is where it usually is."""
        decoder: nn.Module = self.model.get_decoder()  # type: ignore[no-untyped-call]
        return last_norm(decoder)

    @property
    def generation_config(self) -> GenerationConfig | None:
        """What its makers recommend, as the model holds it."""
        return self.model.generation_config


def loads_onto_device() -> bool:
    """Whether weights can be read straight onto a GPU: transformers needs accelerate for it."""
    return find_spec("accelerate") is not None


def _weight(module: nn.Module) -> torch.Tensor:
    return cast(torch.Tensor, module.weight).detach()


def _computes(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the device multiplies matrices of this type in hardware; torch tells for processors only."""
    if device.type != "cpu" or dtype not in (torch.bfloat16, torch.float16):
        return True
    kind = "bf16" if dtype == torch.bfloat16 else "fp16"
    probe = getattr(torch.ops.mkldnn, f"_is_mkldnn_{kind}_supported", None)
    return probe is not None and bool(probe())


def dtype_of(dtype: str, config: Any, device: torch.device, unnamed: torch.dtype = torch.bfloat16) -> torch.dtype:
    """What is asked for, or what the config names (`unnamed` where it does not) if the device computes with it."""
    asked = DTYPES[dtype]
    if isinstance(asked, torch.dtype):
        return asked
    named = getattr(config.get_text_config(), "dtype", None) or unnamed
    named = named if isinstance(named, torch.dtype) else getattr(torch, str(named))
    return named if _computes(named, device) else torch.float32


def _attention_of(config: Any) -> str | None:
    """Attention that does what the config says, None for transformers' choice.

    Some versions choose torch's fused attention for models that cap their scores, and then leave the cap out.
    """
    return "eager" if getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None else None


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """Keep transformers from drawing on the terminal, which belongs to the command line."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]
