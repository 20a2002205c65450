"""Per-request state of rounds, in device memory that persists between steps.

Every running request has a slot; one extra slot takes the writes of padding. For a request whose target has read t
tokens and whose drafter has read d <= t:

    length     t: the newest token, at position t, is chosen but not read
    drafted    d
    limit      maximum length, prompt included; a request with length + 1 >= limit has ended
    follows    whether the drafter reads its tokens
    tokens     ring buffer: the token at position p is at p % ring
    states     ring buffer: the target's auxiliary states of position p are at p % ring
    table      block table

Both rings hold positions d to t, and a pass over 1 + depth tokens writes that many behind them. They suffice if the
drafter reads in time (`most_waiting`).

The host writes numbers of new requests and new blocks (`set`, sent together by `send`). Passes compute everything else
(`round_passes.py`).

By row, not by slot: `row_slot`, `row_depth` and `row_samples` describe the rows of the next pass; `drafts`, `sure` and
`depth` carry its drafts to verification; `offers` are suffix drafts from the host (`kernels/round_offers.py`).

Shapes: S slots and one, R rows, P blocks of a request, X concatenated auxiliary states, K deepest draft.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from eyas.engine.runner.device_queue import DeviceQueue
from eyas.kernels.exact_rounds import RoundArrays
from eyas.kernels.mapped_memory import untouched_zeros
from eyas.plan.footprint import ring_length


class SentOffer(NamedTuple):
    """Suffix drafts for a row, perhaps looked up a step ago."""

    known: int
    """Length of the request at the look-up."""
    expected: Sequence[int]
    """Tokens expected behind them."""
    confirmed: bool = False
    """Whether to draft them only where the drafter's own drafts agree, as far as these go."""


class RoundState:
    """Numbers of all requests on the device."""

    def __init__(
        self,
        *,
        slots: int,
        blocks: int,
        max_depth: int,
        like_X: Tensor | None,
        device: torch.device,
        ring: int = 0,
        offers: bool = False,
    ) -> None:
        """`offers` makes room for suffix drafts. The `ring` length is the shortest possible unless given."""
        self.slots, self.nobody, self.blocks, self.max_depth = slots, slots, blocks, max_depth
        self.ring, self.device = ring or ring_length(max_depth), device
        sizes = {"length": 1, "drafted": 1, "limit": 1, "follows": 1, "tokens": self.ring, "table": blocks}
        self._arena = torch.zeros((slots + 1) * sum(sizes.values()), dtype=torch.int64, device=device)
        self._offsets: dict[str, tuple[int, int]] = {}
        views: dict[str, Tensor] = {}
        end = 0
        for name, size in sizes.items():
            self._offsets[name] = end, size
            start, end = end, end + (slots + 1) * size
            views[name] = self._arena[start:end].view(slots + 1, size)
        self.length_S, self.drafted_S, self.limit_S, self.follows_S = (
            views[name][:, 0] for name in ("length", "drafted", "limit", "follows")
        )
        self.tokens_SL, self.table_SP = views["tokens"], views["table"]
        self.states_SLX = None
        if like_X is not None:
            shape = slots + 1, self.ring, len(like_X)
            self.states_SLX = untouched_zeros(*shape, dtype=like_X.dtype, device=device)

        self._rows_3R = torch.zeros(3, slots, dtype=torch.int64, device=device)
        self.row_slot, self.row_depth, self.row_samples = self._rows_3R
        self.row_slot.fill_(self.nobody)
        self.drafts_RK = torch.zeros(slots, max_depth, dtype=torch.int64, device=device)
        self.sure_RK = torch.zeros(slots, max_depth, dtype=torch.float32, device=device)
        self.depth_R = torch.zeros(slots, dtype=torch.int64, device=device)
        # The previous step may yield 1 + max_depth of the expected tokens, and max_depth more are drafted.
        self.most_expected = 2 * max_depth + 1
        self.offers_RC = torch.zeros(slots * offers, 3 + self.most_expected, dtype=torch.int64, device=device)
        self._changes: dict[int, int] = {}

    @cached_property
    def arrays(self) -> RoundArrays:
        """NumPy views of the numbers, on a CPU."""
        return RoundArrays(self)

    @cached_property
    def states_NX(self) -> Tensor | None:
        """State rings of all slots, concatenated."""
        return None if self.states_SLX is None else self.states_SLX.flatten(0, 1)

    @property
    def most_waiting(self) -> int:
        """Most states of a request that may wait for the drafter when the deepest pass begins."""
        return self.ring - (self.max_depth + 1)

    @property
    def bytes(self) -> int:
        kept = (self._arena, self.states_SLX, self._rows_3R, self.drafts_RK, self.sure_RK, self.depth_R, self.offers_RC)
        return sum(x.nbytes for x in kept if x is not None)

    def set(self, name: str, slot: int, value: int, at: int = 0) -> None:
        """Schedule a write to a slot, effective from the next `send`."""
        offset, size = self._offsets[name]
        self._changes[offset + slot * size + at] = value

    def set_blocks(self, slot: int, first: int, blocks: Sequence[int]) -> None:
        """Schedule writes to a slot's block table, from entry `first` on."""
        offset, size = self._offsets["table"]
        at = offset + slot * size + first
        for place, block in enumerate(blocks, at):
            self._changes[place] = block

    def send(self, queue: DeviceQueue) -> None:
        """Queue the scheduled writes, ahead of later passes."""
        if not self._changes:
            return
        changes, self._changes = self._changes, {}
        sent_2N = to_send(np.array([list(changes.keys()), list(changes.values())], dtype=np.int64), self.device)
        arena = self._arena

        def change() -> None:
            index_N, value_N = sent_2N.to(arena.device, non_blocking=True)
            arena.index_copy_(0, index_N, value_N)

        queue.run(change)

    def send_rows(self, queue: DeviceQueue, slots: NDArray[np.int64], depths: ArrayLike, samples: ArrayLike) -> None:
        """Send the rows of the next pass, padded; a single number applies to all rows."""
        numbers, rows = np.zeros(self._rows_3R.shape, dtype=np.int64), len(slots)
        numbers[0] = self.nobody
        numbers[0, :rows], numbers[1, :rows], numbers[2, :rows] = slots, depths, samples
        sent_3R = to_send(numbers, self.device)
        queue.run(lambda: self._rows_3R.copy_(sent_3R, non_blocking=True))

    def send_offers(self, queue: DeviceQueue, offers: Sequence[SentOffer | None]) -> None:
        """Send suffix drafts for the rows of the next pass."""
        numbers = np.zeros(self.offers_RC.shape, dtype=np.int64)
        for row, offer in enumerate(offers):
            if offer is not None:
                expected = offer.expected[: self.most_expected]
                numbers[row, :3] = offer.known, len(expected), offer.confirmed
                numbers[row, 3 : 3 + len(expected)] = expected
        sent_RC = to_send(numbers, self.device)
        queue.run(lambda: self.offers_RC.copy_(sent_RC, non_blocking=True))

    def blank_rows(self) -> None:
        """Make all rows padding, for a pass that is run to be captured."""
        self.row_slot.fill_(self.nobody)
        self.row_samples.zero_()


def to_send(numbers: "np.ndarray[tuple[int, ...], np.dtype[Any]]", device: torch.device) -> Tensor:
    """Copy host numbers to fresh memory, pinned for CUDA, so that sending them to the device is asynchronous.

    An earlier copy may still be read; torch keeps pinned memory until then.
    """
    sent = torch.from_numpy(numbers)
    return sent.pin_memory() if device.type == "cuda" else sent
