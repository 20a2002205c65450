"""What an EAGLE-1 drafter could be taken for and is not: each a drafter with the same weights."""

from copy import deepcopy

import torch
from torch import nn

from eyas.drafter.model import Drafter, RMSNorm


def state_before_last_norm(drafter: Drafter) -> Drafter:
    """The target's state is read as its last layer left it."""
    other = deepcopy(drafter)
    other.target_norm = nn.Identity()
    return other


def norm_before_attention(drafter: Drafter) -> Drafter:
    """The first layer norms its input, as every other layer does."""
    other = deepcopy(drafter)
    other.layers[0].input_layernorm = RMSNorm(drafter.config.hidden_size, drafter.config.rms_norm_eps)
    return other


def norm_before_head(drafter: Drafter) -> Drafter:
    """The head reads the last state through the target's norm, as it reads the target's own."""
    other = deepcopy(drafter)
    assert other.lm_head is not None
    assert other.target_norm is not None
    other.lm_head = nn.Sequential(other.target_norm, other.lm_head)  # type: ignore[assignment]
    return other


def state_before_embedding(drafter: Drafter) -> Drafter:
    """fc reads the state first."""
    other = deepcopy(drafter)
    other.fc.weight.copy_(torch.cat(drafter.fc.weight.chunk(2, dim=1)[::-1], dim=1))
    return other
