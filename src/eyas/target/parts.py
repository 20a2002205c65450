"""What training needs of a target besides its states: sizes, tokenizer, embedding, head and last norm.

States may come from elsewhere (a server, a disk), so a drafter can be trained for a target that no trainer could hold.
These few tensors are read from the checkpoint's safetensors by name (`stored_tensors.py`), quantised or not. What
module each of them belongs to is asked of transformers' own model, made without memory: there is no code per
architecture here either.

Invariant: parts that were read from files equal those of the loaded target.

Shapes: V vocabulary, D hidden size.
"""

from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from eyas.errors import UserError
from eyas.target.capture import last_norm
from eyas.target.chat_template import ChatFormat
from eyas.target.config import read_config
from eyas.target.device import choose_device
from eyas.target.facts import TargetFacts, facts_of
from eyas.target.fingerprint import fingerprint, fingerprint_norms, norms_of
from eyas.target.head import TargetHead, head_of, score_scale
from eyas.target.locate import explain_failures, locate, options_of
from eyas.target.model import DTYPES, Target, dtype_of
from eyas.target.quantised_checkpoint import scheme_of
from eyas.target.stored_tensors import StoredTensors
from eyas.target.tokenizer import load_tokenizer


@dataclass(frozen=True, kw_only=True, eq=False)
class TargetParts:
    """A target without its layers."""

    facts: TargetFacts
    config: PretrainedConfig
    """Of the text model."""
    tokenizer: PreTrainedTokenizerBase
    stop_ids: frozenset[int]
    """Tokens that end an answer."""
    embedding_VD: Tensor
    """As `Target.embedding`."""
    head: TargetHead
    norm: nn.Module | None
    """Between the last layer and the head; None where the architecture keeps it in an unusual place."""
    fingerprint: str | None
    """Who the target is (`fingerprint.py`); None where the norms of its layers are not on this machine."""
    device: torch.device
    """Where inputs go."""

    @property
    def dtype(self) -> torch.dtype:
        """The type of embedding, head and norm."""
        return self.embedding_VD.dtype

    @classmethod
    def of(cls, target: Target) -> "TargetParts":
        """The parts of a loaded target; they share its memory."""
        decoder: nn.Module = target.model.get_decoder()  # type: ignore[no-untyped-call]
        return cls(
            facts=target.facts,
            config=target.model.config.get_text_config(),
            tokenizer=target.tokenizer,
            stop_ids=target.stop_ids(),
            # Layers of a large target may lie on several devices.
            embedding_VD=target.embedding().to(target.device),
            head=head_of(target),
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
        """Read the parts of `source` (see `locate`); of a hub id, only the files that hold them are fetched."""
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
            # Checkpoints of models with a vision tower, and of bare decoders, have the decoder under other names.
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
            found = {name: stored.tensor_or_none(f"{prefix}{name}.weight") for name, _ in norms_of(decoder)}
        whole = [tensor for _, tensor in sorted(found.items()) if tensor is not None]
        return cls(
            facts=facts,
            config=text,
            tokenizer=tokenizer,
            stop_ids=stops,
            embedding_VD=embedding_VD,
            head=TargetHead(
                weight_VD=weight_VD,
                bias_V=None if bias_V is None else bias_V.to(where, kind),
                scale=score_scale(text),
                cap=getattr(text, "final_logit_softcapping", None),
            ),
            norm=norm,
            fingerprint=fingerprint_norms(text, whole) if len(whole) == len(found) else None,
            device=where,
        )


def _without_memory(config: PretrainedConfig) -> PreTrainedModel:
    """Transformers' model of this configuration: its modules and their names, none of its weights."""
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
    """Weight and bias of the head; no weight where it is the embedding."""
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
    """The norm with its weights, of which some have none."""
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
