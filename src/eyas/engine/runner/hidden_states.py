"""The target's hidden states that the drafter has not read yet: whose they are, and where they lie.

A pass of the target leaves the states of its tokens in one tensor; a request's share of it is a few rows. The drafter
reads them later, many in one pass. Where rounds live on the device, states wait in their ring (`round_state.py`).

Invariant: the states that wait for a request are those of its tokens from `drafter_length` up to `target_length`, in
order.

Shapes: N tokens of a pass, T tokens of a request, X concatenated states.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from eyas.engine.request import SequenceState

MOSTLY_OTHERS = 8
"""A pass this many times as large as a request's part of it is not kept for that part's sake."""


class HiddenStates(NamedTuple):
    """States of some tokens of a request: a few rows of a pass."""

    pass_NX: Tensor
    first: int
    size: int

    @property
    def aux_TX(self) -> Tensor:
        """They alone."""
        return self.pass_NX[self.first : self.first + self.size]


class HiddenStateBuffer:
    """All that waits for one drafter."""

    def __init__(self) -> None:
        self._waiting: dict[int, list[HiddenStates]] = {}

    def add(self, seq: SequenceState, states: HiddenStates) -> None:
        """Keep the states of tokens that the target has just read."""
        if states.pass_NX.is_cpu and states.size * MOSTLY_OTHERS < len(states.pass_NX):
            states = HiddenStates(states.aux_TX.clone(), 0, states.size)
        self._waiting.setdefault(seq.key, []).append(states)

    def of(self, seq: SequenceState) -> Sequence[HiddenStates]:
        """What waits for a request."""
        return self._waiting.get(seq.key, ())

    def take(self, seq: SequenceState, *, but_last: bool = False) -> list[Tensor]:
        """What waits, as tensors [T, X], to be read now; the last state may stay behind."""
        waiting = self._waiting.pop(seq.key)
        if but_last:
            memory, first, size = waiting.pop()
            waiting.append(HiddenStates(memory, first, size - 1))
            self._waiting[seq.key] = [HiddenStates(memory, first + size - 1, 1)]
        return [states.aux_TX for states in waiting]

    def forget(self, key: int) -> None:
        """Drop what waits for a request that ended or lost its blocks."""
        self._waiting.pop(key, None)
