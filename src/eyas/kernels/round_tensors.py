"""What kernels of a round read and write of every request, by slot, and of the rows of a pass.

`engine/runner/round_state.py` owns this memory and says what each number is.

Shapes: S slots, R rows, L the ring, P blocks of a request, K deepest draft.
"""

from typing import Protocol

from torch import Tensor


class RoundTensors(Protocol):
    """Integers are int64."""

    ring: int
    nobody: int
    """The slot that padding rows have."""
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
    """Of each row tokens that the host knew, how many it expects behind them, whether the drafter is to confirm them,
    and they themselves."""
