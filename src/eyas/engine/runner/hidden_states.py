"""The target's hidden states that the drafter has not read yet: whose they are, and where they lie.

A pass of the target leaves the states of its tokens in one tensor; a request's share of it is a few rows. The drafter
reads them later, many in one pass. An eager pass leaves a tensor of its own. A captured one leaves them in memory that
the next replay overwrites, and the graph that drafts reads them from there in place. So:

    add        a pass has left states of a request
    take       the drafter reads them now
    release    a captured graph reads them where they lie
    stage      bring what lies elsewhere to the memory that captured graphs read
    preserve   copy what still waits in memory that is about to be overwritten

Invariant: the states that wait for a request are those of its tokens from `drafter_length` up to `target_length`, in
order. Only the latest of them can lie in the memory of captured passes.

Shapes: N tokens of a pass, T tokens of a request, X concatenated states, S and C rows of the captured passes' memory.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
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
        self.pass_SX: Tensor | None = None
        """Where captured passes over decoding requests leave states, and behind them what is staged."""
        self.chunk_CX: Tensor | None = None
        """Where captured chunks of prompts leave them."""
        self._staged_from = 0

    def reserve(self, like_X: Tensor, *, pass_tokens: int, staged_tokens: int, chunk_tokens: int) -> None:
        """Take the memory of captured passes, for states like this one."""
        self.pass_SX = like_X.new_zeros(pass_tokens + staged_tokens, len(like_X))
        self.chunk_CX = like_X.new_zeros(chunk_tokens, len(like_X))
        self._staged_from = pass_tokens

    @property
    def bytes(self) -> int:
        """Memory of captured passes."""
        return sum(x.nbytes for x in (self.pass_SX, self.chunk_CX) if x is not None)

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

    def keep_last(self, seq: SequenceState) -> None:
        """A captured graph has read all that waits but the last state."""
        memory, first, size = self._waiting[seq.key][-1]
        self._waiting[seq.key] = [HiddenStates(memory, first + size - 1, 1)]

    def release(self, seqs: Iterable[SequenceState]) -> None:
        """A captured graph reads all that waits for these requests."""
        for seq in seqs:
            self._waiting.pop(seq.key, None)

    def forget(self, key: int) -> None:
        """Drop what waits for a request that ended or lost its blocks."""
        self._waiting.pop(key, None)

    def unstaged(self, seqs: Sequence[SequenceState]) -> list[SequenceState]:
        """Requests whose states do not lie in one piece where captured graphs read them."""
        waits = [(seq, self.of(seq)) for seq in seqs]
        return [seq for seq, waiting in waits if len(waiting) != 1 or waiting[0].pass_NX is not self.pass_SX]

    def stage(self, seqs: Sequence[SequenceState]) -> None:
        """Bring all that waits for these requests there, one request behind the other."""
        assert self.pass_SX is not None, "reserve comes first"
        moved_NX = torch.cat([states.aux_TX for seq in seqs for states in self._waiting[seq.key]])
        first = self._staged_from
        self.pass_SX[first : first + len(moved_NX)] = moved_NX
        for seq in seqs:
            size = sum(states.size for states in self._waiting[seq.key])
            self._waiting[seq.key] = [HiddenStates(self.pass_SX, first, size)]
            first += size

    def preserve(self, *, chunks_of: Sequence[SequenceState] = ()) -> None:
        """Copy what waits in memory that the next pass overwrites, or would hide behind later states.

        Chunks of prompts overwrite the memory of chunks, and hide what their own requests have in the other; a pass
        over decoding requests does so to both.
        """
        everyone = self._waiting.values()
        if chunks_of:
            self._copy_out_of(self.chunk_CX, everyone)
            self._copy_out_of(self.pass_SX, [self._waiting.get(seq.key, []) for seq in chunks_of])
        else:
            for memory in (self.pass_SX, self.chunk_CX):
                self._copy_out_of(memory, everyone)

    def _copy_out_of(self, memory: Tensor | None, several: Iterable[list[HiddenStates]]) -> None:
        if memory is None:
            return
        lying = [waiting for waiting in several if waiting and waiting[-1].pass_NX is memory]
        if lying:
            copy_NX = memory[: max(waiting[-1].first + waiting[-1].size for waiting in lying)].clone()
            for waiting in lying:
                waiting[-1] = waiting[-1]._replace(pass_NX=copy_NX)
