"""A loaded target: model, tokenizer, forward pass with auxiliary states, embedding and head.

Every decoder that transformers knows can be a target; there is no code per architecture here.
Invariant: a loaded target is complete (no weight is left at its random initial value), in eval mode, and never trained:
its outputs carry no gradient.

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
from transformers import AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from eyas.errors import UserError
from eyas.kernels.linear.embedding_table import EmbeddingTable, QuantisedEmbedding
from eyas.kernels.linear.served_linear import ServedLinear, packed_tensors
from eyas.target.capture import capture, last_norm
from eyas.target.chat_template import ChatFormat
from eyas.target.device import choose_device, device_words
from eyas.target.facts import facts_of, read_config
from eyas.target.locate import explain_failures, locate, options_of
from eyas.target.quantise import ON_THE_FLY, quantise_on_gpu
from eyas.target.quantised_checkpoint import quantised_model, scheme_of
from eyas.target.text import TargetText, read_tokenizer

logger = logging.getLogger(__name__)

DTYPES: Mapping[str, torch.dtype | str] = {
    "auto": "auto",
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


ModelBuilder = Callable[[str, PretrainedConfig, str | None], PreTrainedModel]
"""Builds a model from a folder, its configuration, and transformers' name of the attention (None for the default)."""


@dataclass(frozen=True, kw_only=True)
class ForwardOutput:
    """Logits and auxiliary states of a forward pass."""

    logits_BTV: torch.Tensor
    aux_hidden_BTX: torch.Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Target(TargetText):
    """A causal language model ready to run, with its tokenizer."""

    model: PreTrainedModel
    quantization: str = "none"
    """How its matrices are multiplied: the kind of a quantised checkpoint, or of what `loading.py` made."""

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
        """Load `source` (see `locate`).

        dtype           `auto` is the checkpoint's, or float32 on a processor without arithmetic for that: torch would
                        be some fifty times slower
        device          `auto` is the first GPU, if there is one
        spread          distribute the layers over all GPUs, by transformers
        build           builds the model instead of transformers, on the CPU, from the same files
        quantization    `fp8` and `int4` quantise a dense model on a GPU; a quantised checkpoint of a kind that
                        `quantization_config.py` knows stays packed on a GPU, unless this is `none`
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
        tokenizer = read_tokenizer(source, place, hub, chat_format)
        model: Any
        kind = "none"
        if build is None and scheme is None:
            model = _dense_model(source, place, hub, config, where, dtype, spread=spread)
            if quantization in ON_THE_FLY:
                quantise_on_gpu(model, quantization, source)
                kind = quantization
        with explain_failures(source, place), _no_progress_bar():
            if build is not None:
                model = build(place, config, _attention_of(config))
            elif scheme is not None:
                if spread:
                    raise UserError(f"{source} is quantised ({scheme.words}) and cannot be spread; put it on one GPU")
                model = quantised_model(
                    *(scheme, place, hub, config, _attention_of(config)),
                    source=source,
                    device=where,
                    dtype=dtype_of(dtype, config, where),
                    dequantise=quantization == "none",
                )
                kind = scheme.kind if packed_tensors(model) else "none"
        return cls(
            facts=facts,
            model=model.eval().requires_grad_(False),
            tokenizer=tokenizer,
            template_variables=dict(chat_format.variables),
            quantization=kind,
        )

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights that are not quantised, and of captured states."""
        return self.model.dtype

    # no_grad, not inference_mode: drafters are trained on these states and inference tensors refuse backward.
    @torch.no_grad()
    def forward(self, ids_BT: torch.Tensor, aux_layer_ids: Sequence[int]) -> ForwardOutput:
        """Run whole, equally long sequences (no padding) and return logits and the states `aux_layer_ids`."""
        with capture(self.model, aux_layer_ids) as captured:
            logits_BTV = self.model(input_ids=ids_BT.to(self.device), use_cache=False).logits
        return ForwardOutput(logits_BTV=logits_BTV, aux_hidden_BTX=captured.aux_hidden())

    def embedding(self) -> torch.Tensor:
        """Return the table of input embeddings, [V, D], as vLLM shares it with a drafter.

        Gemma multiplies by sqrt(D) after the lookup: captured state 0 has that factor, this table does not.
        """
        return _weight(self.model.get_input_embeddings())

    def head(self) -> torch.Tensor:
        """Return the weight of the language-model head, [V, D]; the embedding table when they are tied."""
        head = self.model.get_output_embeddings()  # type: ignore[no-untyped-call]
        if head is None:
            raise UserError(f"{self.facts.source} has no language-model head; choose a causal language model")
        return _weight(head)

    def tables(self) -> tuple[EmbeddingTable, torch.Tensor | ServedLinear]:
        """Return embedding and head for a drafter to share: packed where the target's are."""
        embedding, head = self.model.get_input_embeddings(), self.model.get_output_embeddings()  # type: ignore[no-untyped-call]
        return (
            QuantisedEmbedding(embedding.table) if isinstance(embedding, QuantisedEmbedding) else self.embedding(),
            head if isinstance(head, ServedLinear) and head.shared_packed else self.head(),
        )

    def last_norm(self) -> nn.Module | None:
        decoder: nn.Module = self.model.get_decoder()  # type: ignore[no-untyped-call]
        return last_norm(decoder)

    @property
    def generation_config(self) -> GenerationConfig | None:
        return self.model.generation_config


def _dense_model(
    source: str,
    place: str,
    hub: dict[str, Any],
    config: PretrainedConfig,
    device: torch.device,
    dtype: str,
    *,
    spread: bool,
) -> PreTrainedModel:
    """Load a model by transformers; refuses a checkpoint that lacks weights."""
    # transformers packs a quantised checkpoint for its device while loading; it cannot be moved afterwards.
    # Others go straight to a GPU where possible: else every process would need their size in host memory.
    straight = device.type == "cuda" and loads_onto_device()
    quantised = hasattr(config, "quantization_config")
    placement: dict[str, Any] = {"device_map": {"": device}} if straight or quantised else {}
    if spread:
        placement = {"device_map": "auto"}
    with explain_failures(source, place), _no_progress_bar():
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
    model, info = loaded
    if dtype == "auto" and not placement and not _computes(model.dtype, device):
        logger.info(f"this processor has no {str(model.dtype).removeprefix('torch.')} arithmetic: using float32")
        model = model.float()
    if not placement:
        model.to(device)
    missing = sorted(info["missing_keys"])
    if missing:
        raise UserError(
            f"{source} lacks {len(missing)} weights of its architecture, the first is {missing[0]}; "
            "transformers would fill them with random numbers, use a complete checkpoint"
        )
    return cast(PreTrainedModel, model)


def loads_onto_device() -> bool:
    """Whether weights can be read straight onto a GPU: transformers needs accelerate for it."""
    return find_spec("accelerate") is not None


def _weight(module: nn.Module) -> torch.Tensor:
    return cast(torch.Tensor, module.weight).detach()


def _computes(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the device multiplies matrices of this dtype in hardware; torch can tell for processors only."""
    if device.type != "cpu" or dtype not in (torch.bfloat16, torch.float16):
        return True
    kind = "bf16" if dtype == torch.bfloat16 else "fp16"
    probe = getattr(torch.ops.mkldnn, f"_is_mkldnn_{kind}_supported", None)
    return probe is not None and bool(probe())


def dtype_of(dtype: str, config: Any, device: torch.device, unnamed: torch.dtype = torch.bfloat16) -> torch.dtype:
    """Resolve `auto`: the config's dtype (`unnamed` if it has none) where the device computes in it, else float32."""
    asked = DTYPES[dtype]
    if isinstance(asked, torch.dtype):
        return asked
    named = getattr(config.get_text_config(), "dtype", None) or unnamed
    named = named if isinstance(named, torch.dtype) else getattr(torch, str(named))
    return named if _computes(named, device) else torch.float32


def _attention_of(config: Any) -> str | None:
    """transformers' name of the attention to use, None for its default.

    Some versions choose torch's fused attention for models that cap their scores, and leave the cap out.
    """
    return "eager" if getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None else None


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """Hide transformers' progress bar: the terminal belongs to the command line."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]
