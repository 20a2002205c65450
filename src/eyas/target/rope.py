"""Rotations that depend on how long a sequence is, settled for the longest that is served.

`longrope` and `dynamic` have other frequencies for long sequences than for short ones. transformers looks at the
furthest position of every pass. In an engine a pass has many requests, whose older keys were rotated in other passes:
what a request is answered would depend on who else is there. So frequencies are those of the longest context, for
every request, as vLLM and llama.cpp have them.
"""

from typing import Any

import torch
from torch import nn

_KEPT = "rope_type_by_length"


def settle_rope(model: nn.Module, max_model_len: int) -> None:
    """Choose frequencies for contexts of so many tokens, whatever was chosen before."""
    for module in model.modules():
        if not hasattr(module, _KEPT) and not _by_length(getattr(module, "rope_type", None)):
            continue
        rotary: Any = module
        if not hasattr(rotary, _KEPT):
            setattr(rotary, _KEPT, rotary.rope_type)
        rotary.rope_type = getattr(rotary, _KEPT)
        if isinstance(rotary.rope_type, dict):
            for kind, rope_type in rotary.rope_type.items():
                if _by_length(rope_type):
                    _settle(rotary, f"{kind}_", max_model_len, {"layer_type": kind})
            # A kind of no dependence on length: nothing is chosen anew from here on.
            rotary.rope_type = {kind: _static(rope_type) for kind, rope_type in rotary.rope_type.items()}
        else:
            _settle(rotary, "", max_model_len, {})
            rotary.rope_type = _static(rotary.rope_type)


def _settle(rotary: Any, prefix: str, max_model_len: int, kind: dict[str, str]) -> None:
    """By the model's own code: a pass that has the last position."""
    original_F = getattr(rotary, f"{prefix}original_inv_freq")
    rotary.register_buffer(f"{prefix}inv_freq", original_F.clone(), persistent=False)
    setattr(rotary, f"{prefix}max_seq_len_cached", rotary.original_max_seq_len)
    last_11 = torch.tensor([[max_model_len - 1]], device=original_F.device)
    rotary(original_F.new_zeros(1, 1, 1), position_ids=last_11, **kind)


def _by_length(rope_type: object) -> bool:
    if isinstance(rope_type, dict):
        return any(map(_by_length, rope_type.values()))
    return isinstance(rope_type, str) and ("dynamic" in rope_type or rope_type == "longrope")


def _static(rope_type: str) -> str:
    return "default" if _by_length(rope_type) else rope_type
