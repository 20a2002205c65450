"""Replaces the attention of a transformers model, and fixes rotary embeddings that depend on the sequence's length.

Through transformers' attention interface, every layer calls `attend_for_transformers`, which calls the `AttendFor` that
was passed to the model as `eyas_attend`: transformers passes unknown keyword arguments down to every layer. For layers
that drop them (StableLM, Nemotron) a context variable holds it too. transformers builds no masks for it, so the
`AttendFor` decides which keys a query sees. Anything beyond causal attention that it would not know of is refused.

`longrope` and `dynamic` use other frequencies for long sequences than for short ones, and transformers decides by the
largest position of a pass. With many requests in a pass, an answer would depend on the other requests. `settle_rope`
fixes the frequencies to those of the longest context, as vLLM and llama.cpp do.

Shapes: N tokens of a pass, H query heads, G key heads, K head dim, F frequencies.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from eyas.errors import UserError

IMPLEMENTATION = "eyas"
_ROPE_BY_LENGTH = "rope_type_by_length"
"""Attribute of a rotary module that keeps its original `rope_type`."""


class AttendFor(Protocol):
    """Attention of a target's layers, by the engine or by training."""

    def __call__(
        self,
        module: nn.Module,
        q_NHK: Tensor,
        k_NGK: Tensor,
        v_NGK: Tensor,
        scale: float | None,
        softcap: float | None,
        window: int | None,
        sink_logit_H: Tensor | None,
    ) -> Tensor:
        """Return the outputs [N, H, K] for queries and new keys and values of one layer's attention module."""
        ...


_ATTEND: ContextVar[AttendFor | None] = ContextVar("eyas_attend", default=None)


@contextmanager
def attending_by(attend: AttendFor | None) -> Iterator[None]:
    """Use `attend` in layers that drop `eyas_attend`."""
    token = _ATTEND.set(attend)
    try:
        yield
    finally:
        _ATTEND.reset(token)


@contextmanager
def attending_through(model: PreTrainedModel, attend: AttendFor | None = None) -> Iterator[None]:
    """Run the model with `eyas_attend`, or with `attend` where layers drop that; its attention is restored at the end.

    Called in every step, so it sets what `set_attn_implementation` sets without the checks that visit all modules.
    """
    config = model.config
    if not model._can_set_attn_implementation():
        raise UserError(
            f"the attention of {type(model).__name__} cannot be replaced, since its code does not go through "
            "transformers' attention interface; choose another target"
        )
    parts = {part: getattr(config, part) for part in config.sub_configs}
    before = {"": config._attn_implementation}
    before |= {part: found._attn_implementation for part, found in parts.items() if found is not None}
    try:
        config._attn_implementation = IMPLEMENTATION
        with attending_by(attend):
            yield
    finally:
        config._attn_implementation = before


def attend_for_transformers(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    eyas_attend: AttendFor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Map q [1, H, N, K] and new k, v [1, G, N, K] to [1, N, H, K]; registered with transformers."""
    if eyas_attend is None:
        eyas_attend = _ATTEND.get()
    if eyas_attend is None:
        name = type(module).__name__
        raise UserError(f"{name} does not hand its attention what the caller passed; choose another target")
    for feature, asked in (
        ("sinks (s_aux) that are no score for each head", s_aux is not None and s_aux.shape != query.shape[1:2]),
        ("a bias of positions", position_bias is not None),
        ("a mask of its own", attention_mask is not None),
        ("tokens that see later ones", not getattr(module, "is_causal", True)),
    ):
        if asked:
            raise UserError(f"{type(module).__name__} attends with {feature}; only causal attention without is served")
    q, k, v = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    return eyas_attend(module, q, k, v, scaling, softcap, sliding_window, s_aux).contiguous()[None], None


AttentionInterface.register(IMPLEMENTATION, attend_for_transformers)


def settle_rope(model: nn.Module, max_model_len: int) -> None:
    """Fix the frequencies to those of contexts of `max_model_len` tokens; may be called again."""
    for module in model.modules():
        if not hasattr(module, _ROPE_BY_LENGTH) and not _by_length(getattr(module, "rope_type", None)):
            continue
        rotary: Any = module
        if not hasattr(rotary, _ROPE_BY_LENGTH):
            setattr(rotary, _ROPE_BY_LENGTH, rotary.rope_type)
        original = getattr(rotary, _ROPE_BY_LENGTH)
        rotary.rope_type = original
        if isinstance(original, dict):
            for layer_type, rope_type in original.items():
                if _by_length(rope_type):
                    _settle(rotary, f"{layer_type}_", max_model_len, {"layer_type": layer_type})
            rotary.rope_type = {layer_type: _static(rope_type) for layer_type, rope_type in original.items()}
        else:
            _settle(rotary, "", max_model_len, {})
            rotary.rope_type = _static(original)


def _settle(rotary: Any, prefix: str, max_model_len: int, layer_type: dict[str, str]) -> None:
    """Let the model's own code choose frequencies, in a pass that has the last position."""
    original_F = getattr(rotary, f"{prefix}original_inv_freq")
    rotary.register_buffer(f"{prefix}inv_freq", original_F.clone(), persistent=False)
    setattr(rotary, f"{prefix}max_seq_len_cached", rotary.original_max_seq_len)
    last_11 = torch.tensor([[max_model_len - 1]], device=original_F.device)
    rotary(original_F.new_zeros(1, 1, 1), position_ids=last_11, **layer_type)


def _by_length(rope_type: object) -> bool:
    if isinstance(rope_type, dict):
        return any(map(_by_length, rope_type.values()))
    return isinstance(rope_type, str) and ("dynamic" in rope_type or rope_type == "longrope")


def _static(rope_type: str) -> str:
    """A rope type for which transformers does not choose frequencies in every pass."""
    return "default" if _by_length(rope_type) else rope_type
