"""The parts of a target that training needs besides its states: tokenizer, embedding, head, last norm, fingerprint.

States may come from a server or a disk, so a drafter can be trained for a target that does not fit on the trainer.
These tensors are read from the checkpoint's safetensors by name (`stored_tensors.py`), quantised or not. A model of
transformers without memory says which module has which name, so there is no code per architecture.

Invariant: parts that were read from files equal those of the loaded target.

Shapes: T tokens, V vocabulary, D hidden size, C chosen tokens of the vocabulary.
"""

import hashlib
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from eyas.errors import UserError
from eyas.target.capture import last_norm
from eyas.target.chat_template import ChatFormat
from eyas.target.device import choose_device
from eyas.target.facts import TargetFacts, facts_of, read_config
from eyas.target.locate import explain_failures, locate, options_of
from eyas.target.model import DTYPES, Target, dtype_of
from eyas.target.quantised_checkpoint import scheme_of
from eyas.target.stored_tensors import StoredTensors
from eyas.target.text import load_tokenizer

SMALLEST = 2.0**-12
"""Norm weights below it count as 0 in a fingerprint: formats that keep 1 + w, or w in float16, lose digits of them."""
_FINGERPRINT_DIGITS = 16


@dataclass(frozen=True, kw_only=True)
class TargetHead:
    """The language-model head: final states (after the last norm) to logits.

    It makes logits for the rows and tokens that are needed, because all logits of a training batch do not fit into
    memory. Some architectures scale or cap logits: Gemma, Granite, Cohere.
    """

    weight_VD: Tensor
    bias_V: Tensor | None
    scale: float
    cap: float | None

    def scores(self, hidden_TD: Tensor) -> Tensor:
        """Logits [T, V], in the dtype of the states."""
        scores_TV = functional.linear(hidden_TD, self.weight_VD, self.bias_V)
        if self.scale != 1.0:
            scores_TV = scores_TV * self.scale
        return scores_TV if self.cap is None else torch.tanh(scores_TV / self.cap) * self.cap

    def only(self, ids_C: Tensor) -> "TargetHead":
        ids_C = ids_C.to(self.weight_VD.device)
        bias_C = None if self.bias_V is None else self.bias_V[ids_C]
        return replace(self, weight_VD=self.weight_VD[ids_C], bias_V=bias_C)


def score_scale(config: PretrainedConfig) -> float:
    """Factor of a text model's logits: Cohere's logit_scale, or one over Granite's logits_scaling."""
    scale = float(getattr(config, "logit_scale", None) or 1.0)
    return scale / float(getattr(config, "logits_scaling", None) or 1.0)


def _head(config: PretrainedConfig, weight_VD: Tensor, bias_V: Tensor | None) -> TargetHead:
    text = config.get_text_config()
    cap = getattr(text, "final_logit_softcapping", None)
    return TargetHead(weight_VD=weight_VD, bias_V=bias_V, scale=score_scale(text), cap=cap)


def _head_of(target: Target) -> TargetHead:
    bias = getattr(target.model.get_output_embeddings(), "bias", None)  # type: ignore[no-untyped-call]
    bias_V = None if bias is None else bias.detach().to(target.device)
    return _head(target.model.config, target.head().to(target.device), bias_V)


@torch.no_grad()
def read_head(target: Target) -> TargetHead:
    """Return the head of a target, after comparing it with the target's own logits on a few tokens.

    An architecture that does something else to its logits is refused here, instead of training on wrong ones.
    """
    head = _head_of(target)
    ids_BT = torch.arange(8, device=target.device)[None] % target.facts.vocab_size
    theirs = target.model(input_ids=ids_BT, use_cache=False).logits[0].float().to(target.device)
    decoder = target.model.get_decoder()  # type: ignore[no-untyped-call]
    state_TD = decoder(input_ids=ids_BT, use_cache=False).last_hidden_state[0].to(target.device)
    ours = head.scores(state_TD).float()
    error, size = float((ours - theirs).abs().max()), float(theirs.abs().max())
    if not error <= 0.02 * size:
        raise UserError(
            f"the scores of {target.facts.source} ({target.facts.model_type}) are not its head times its last state: "
            f"they differ by {error:.3g} where the largest is {size:.3g}; such a target is not supported for training"
        )
    return head


def fingerprint(model: PreTrainedModel) -> str:
    """Identify a target by sizes and norm weights: equal for a folder, a hub id and a GGUF file of one model.

    Every format keeps norms as they are when it quantises matrices, and models trained apart differ in them. A model
    that differs from its base in matrices only (a merged LoRA, a quantised variant) has the fingerprint of its base.
    """
    decoder: nn.Module = model.get_decoder()  # type: ignore[no-untyped-call]
    weights = [weight for _, weight in _norms_of(decoder) if not weight.is_meta]
    return _fingerprint_norms(model.config.get_text_config(), weights)


def _norms_of(decoder: nn.Module) -> list[tuple[str, Tensor]]:
    """Norms of a decoder by name, in order, and their weights."""
    return [
        (name, module.weight)
        for name, module in sorted(decoder.named_modules(), key=lambda named: named[0])
        if "norm" in type(module).__name__.lower() and isinstance(getattr(module, "weight", None), Tensor)
    ]


def _fingerprint_norms(config: PretrainedConfig, weights: Sequence[Tensor]) -> str:
    digest = hashlib.sha256(f"{config.num_hidden_layers} {config.hidden_size} {config.vocab_size}".encode())
    for weight in weights:
        # Rounded to the coarsest common precision, since the target may be loaded in any.
        rounded = weight.detach().to(device="cpu", dtype=torch.bfloat16).float()
        rounded[rounded.abs() < SMALLEST] = 0
        digest.update(rounded.numpy().tobytes())
    return digest.hexdigest()[:_FINGERPRINT_DIGITS]


@dataclass(frozen=True, kw_only=True, eq=False)
class TargetParts:
    """A target without its decoder layers."""

    facts: TargetFacts
    config: PretrainedConfig
    tokenizer: PreTrainedTokenizerBase
    stop_ids: frozenset[int]
    embedding_VD: Tensor
    """See `Target.embedding`."""
    head: TargetHead
    norm: nn.Module | None
    """The norm between the last layer and the head; None if it has an unusual name."""
    fingerprint: str | None
    """See `fingerprint`; None if the norms of the layers are not on this machine."""
    device: torch.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding_VD.dtype

    @classmethod
    def of(cls, target: Target) -> "TargetParts":
        """Return the parts of a loaded target; they share its memory."""
        decoder: nn.Module = target.model.get_decoder()  # type: ignore[no-untyped-call]
        return cls(
            facts=target.facts,
            config=target.model.config.get_text_config(),
            tokenizer=target.tokenizer,
            stop_ids=target.stop_ids(),
            # Layers of a large target may be on several devices.
            embedding_VD=target.embedding().to(target.device),
            head=_head_of(target),
            norm=last_norm(decoder),
            fingerprint=fingerprint(target.model),
            device=target.device,
        )

    @classmethod
    @torch.no_grad()
    def load(
        cls,
        source: str,
        *,
        dtype: str = "auto",
        device: str = "cpu",
        cache: Path | None = None,
        chat_format: ChatFormat | None = None,
    ) -> "TargetParts":
        """Read the parts of `source` (see `locate`); of a hub id, only the files with these tensors are fetched."""
        if dtype not in DTYPES:
            raise UserError(f"unknown dtype {dtype!r}; use one of {', '.join(DTYPES)}")
        where, place = choose_device(device), locate(source, cache=cache)
        hub = options_of(source, place)
        config = read_config(source, place, hub)
        facts, scheme = facts_of(config, source), scheme_of(config, source)
        model = _without_memory(config)
        text = config.get_text_config()
        tokenizer, stops = load_tokenizer(source, cache=cache, chat_format=chat_format)
        names = {module: name for name, module in model.named_modules()}
        decoder: nn.Module = model.get_decoder()  # type: ignore[no-untyped-call]
        embedding = model.get_input_embeddings()
        with explain_failures(source, place), StoredTensors.open(place, hub, source) as stored:
            # Checkpoints with a vision tower, and bare decoders, name the decoder differently.
            inside = names[embedding].removeprefix(f"{names[decoder]}.") if names[decoder] else names[embedding]
            prefix = stored.owner_of(names[embedding], f"the embedding of {source}").removesuffix(inside)
            embedding_VD = stored.matrix(prefix + inside, scheme)
            kind = dtype_of(dtype, config, where, torch.bfloat16 if scheme else embedding_VD.dtype)
            embedding_VD = embedding_VD.to(where, kind)
            _require_shape(embedding_VD, (facts.vocab_size, facts.hidden_size), "embedding", source)
            head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
            weight_VD, bias_V = _head_tensors(stored, names, head, scheme, config, source)
            weight_VD = embedding_VD if weight_VD is None else weight_VD.to(where, kind)
            _require_shape(weight_VD, (facts.vocab_size, facts.hidden_size), "head", source)
            norm = last_norm(decoder)
            if norm is not None:
                own = prefix + names[norm].removeprefix(f"{names[decoder]}.")
                norm = _filled(norm, stored, own, where, kind)
            found = {name: stored.tensor_or_none(f"{prefix}{name}.weight") for name, _ in _norms_of(decoder)}
        whole = [tensor for _, tensor in sorted(found.items()) if tensor is not None]
        return cls(
            facts=facts,
            config=text,
            tokenizer=tokenizer,
            stop_ids=stops,
            embedding_VD=embedding_VD,
            head=_head(config, weight_VD, None if bias_V is None else bias_V.to(where, kind)),
            norm=norm,
            fingerprint=_fingerprint_norms(text, whole) if len(whole) == len(found) else None,
            device=where,
        )


def _without_memory(config: PretrainedConfig) -> PreTrainedModel:
    """Return transformers' model of this configuration on the meta device."""
    plain = deepcopy(config)
    for name in ("quantization_config", "compression_config"):
        if hasattr(plain, name):
            delattr(plain, name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(plain)  # type: ignore[no-untyped-call]
    return cast(PreTrainedModel, model)


def _head_tensors(
    stored: StoredTensors,
    names: dict[nn.Module, str],
    head: nn.Module | None,
    scheme: Any,
    config: PretrainedConfig,
    source: str,
) -> tuple[Tensor | None, Tensor | None]:
    """Return weight and bias of the head; the weight is None if it is the embedding."""
    if head is None:
        raise UserError(f"{source} has no language-model head; choose a causal language model")
    owner = stored.find(names[head])
    if owner is None:
        tied = getattr(config, "tie_word_embeddings", False) or config.get_text_config().tie_word_embeddings
        if not tied:
            raise UserError(
                f"{source} has no weights of its head ({names[head]}), and its config.json does not say that it is the "
                "embedding; use a complete checkpoint"
            )
        return None, None
    bias = stored.tensor_or_none(f"{owner}.bias") if getattr(head, "bias", None) is not None else None
    return stored.matrix(owner, scheme), bias


def _filled(norm: nn.Module, stored: StoredTensors, owner: str, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Return the norm with its weights; some norms have none."""
    norm = norm.to_empty(device=device)
    for name in list(norm._parameters):
        if norm._parameters[name] is not None:
            value = stored.tensor(f"{owner}.{name}").to(device, dtype)
            norm._parameters[name] = nn.Parameter(value, requires_grad=False)
    return norm.eval()


def _require_shape(found: Tensor, expected: tuple[int, int], what: str, source: str) -> None:
    if tuple(found.shape) != expected:
        raise UserError(
            f"the {what} of {source} has the shape {tuple(found.shape)} in the file, and config.json makes it "
            f"{expected}; they do not belong together"
        )
