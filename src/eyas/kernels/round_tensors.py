"""The state that kernels of a round read and write, by slot and by row of a pass; and the layouts that they make of it.

`engine/runner/round_state.py` owns the state and documents each tensor.

Shapes: S slots, R rows, N tokens of a pass, L the ring, P blocks of a request, K deepest draft.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from eyas.kernels.attention.metadata import AttentionMetadata


class RoundTensors(Protocol):
    """Integers are int64."""

    ring: int
    nobody: int
    """The slot of padding rows."""
    length_S: Tensor
    drafted_S: Tensor
    limit_S: Tensor
    follows_S: Tensor
    tokens_SL: Tensor
    table_SP: Tensor
    row_slot: Tensor
    row_depth: Tensor
    row_samples: Tensor
    drafts_RK: Tensor
    sure_RK: Tensor
    """float32."""
    depth_R: Tensor
    offers_RC: Tensor
    """Per row: the tokens that the host knew, how many it expects after them, whether the drafter must confirm them,
    and the expected tokens."""


@dataclass(frozen=True, kw_only=True)
class BlockShape:
    """The KV cache's sizes."""

    blocks: int
    """The most blocks of a row, P."""
    block_size: int
    null_slot: int


@dataclass(frozen=True, kw_only=True, eq=False)
class VerifyLayout:
    """The target's pass over the newest token of each row and its drafts."""

    tokens: AttentionMetadata
    ids_N: Tensor
    place_N: Tensor
    """Places for the tokens' states in the ring of all slots."""


@dataclass(frozen=True, kw_only=True, eq=False)
class DraftLayout:
    """The drafter's passes over the states that wait for it, and over its own drafts."""

    tokens: AttentionMetadata
    ids_N: Tensor
    """The token after each state that is read."""
    place_N: Tensor
    """Places of states in the ring of all slots."""
    last_R: Tensor
    """The index of each row's last live token among the N."""
    deeper: Sequence[AttentionMetadata] = ()
    """Layouts with one token per row, for every draft after the first."""
