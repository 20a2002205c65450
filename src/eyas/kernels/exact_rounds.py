"""Layouts and outcomes of rounds where a number costs nothing to read: on a CPU, nothing is padded.

The law is that of `round_layout.py`, `round_outcome.py` and `round_offers.py`, over live rows and live tokens alone.
Logits are packed: those of live tokens only, row behind row. Compiled code (`rounds.c`) does it in a call each; where
there is no compiler, numpy does.

Shapes: R rows, Q tokens of a row, K = Q - 1 drafts, N live tokens of a pass, S slots, L the ring, P blocks of a row.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eyas.kernels.attention.metadata import AttentionMetadata, AttentionRow, PackedRows
from eyas.kernels.native import load_native
from eyas.kernels.round_offers import LOOKED_UP
from eyas.kernels.round_tensors import RoundTensors

SOURCE = Path(__file__).with_name("rounds.c")
Integers = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class ExactLayout:
    """Live tokens of a pass."""

    tokens: AttentionMetadata
    ids_N: Tensor
    place_N: Tensor
    """Where states lie in the ring of all slots, or go to."""
    row_R: Sequence[int]
    """Rows that have any, in their order."""


class RoundArrays:
    """The numbers of `RoundTensors` on a CPU, in the same memory."""

    def __init__(self, state: RoundTensors) -> None:
        self.ring, self.nobody = state.ring, state.nobody
        self.length_S, self.drafted_S, self.limit_S, self.follows_S = (
            _array(x) for x in (state.length_S, state.drafted_S, state.limit_S, state.follows_S)
        )
        self.tokens_SL, self.table_SP = _array(state.tokens_SL), _array(state.table_SP)
        self.row_slot, self.row_depth, self.row_samples = (
            _array(x) for x in (state.row_slot, state.row_depth, state.row_samples)
        )
        self.drafts_RK, self.depth_R, self.offers_RC = (
            _array(x) for x in (state.drafts_RK, state.depth_R, state.offers_RC)
        )
        self.sure_RK: NDArray[np.float32] = state.sure_RK.numpy()
        rows, most = self.drafts_RK.shape
        self._row_4R = np.empty((4, rows), dtype=np.int64)
        self._token_4N = np.empty((4, rows * max(self.ring, 1 + most)), dtype=np.int64)
        self._round = _Round(
            *(x.ctypes.data for x in (self.length_S, self.drafted_S, self.limit_S, self.follows_S, self.tokens_SL)),
            *(x.ctypes.data for x in (self.row_slot, self.row_depth, self.row_samples, self.drafts_RK)),
            *(self.sure_RK.ctypes.data, self.depth_R.ctypes.data, self.table_SP.ctypes.data),
            *(self.ring, most, self.table_SP.shape[1]),
        )
        self._packed = np.empty(rows * (4 + self.table_SP.shape[1]), dtype=np.int32)
        self._layout = _PackedLayout(*(x.ctypes.data for x in (*self._row_4R, *self._token_4N, self._packed)))
        self._addresses = ctypes.addressof(self._round), ctypes.addressof(self._layout)

    def lay_out_verify(self, block_size: int, *, rows: int, depth: int) -> ExactLayout:
        """The newest token of each row and its drafts, as many as `depth_R` says."""
        compiled, (round_at, layout_at) = load_rounds(), self._addresses
        if compiled is None:
            return self._plainly_laid_out(self._plain_verify(rows, depth, block_size), block_size)
        return self._laid_out(compiled.lay_out_verify(round_at, rows, depth, block_size, layout_at), rows, block_size)

    def lay_out_draft(self, block_size: int, *, rows: int, depth: int, kept: int = 0) -> ExactLayout:
        """The states that wait for the drafter, of each row all but the last `kept`.

        The state is left as it will be when they are read: how deep rows are drafted for in `depth_R`, if there are to
        be drafts, and what has been read in `drafted_S`.
        """
        assert not (kept and depth)
        compiled, (round_at, layout_at) = load_rounds(), self._addresses
        if compiled is None:
            return self._plainly_laid_out(self._plain_draft(rows, depth, kept, block_size), block_size)
        live = compiled.lay_out_draft(round_at, rows, depth, kept, block_size, layout_at)
        return self._laid_out(live, rows, block_size)

    def settle(self, *, rows: int, depth: int, token_N: Tensor, packed: bool) -> Tensor:
        """Move the rows on by the target's tokens, of live tokens or of all; a line of each as `round_outcome.settle`
        has it."""
        compiled, line_RC = load_rounds(), np.empty((rows, 3 + 3 * depth), dtype=np.int64)
        assert token_N.is_contiguous()
        if compiled is not None:
            compiled.settle(self._addresses[0], rows, depth, token_N.data_ptr(), packed, line_RC.ctypes.data)
        else:
            self._plain_settle(rows, depth, _array(token_N), packed, line_RC)
        return torch.from_numpy(line_RC)

    def live_tokens(self, rows: int, depth: int) -> int:
        """Tokens of all rows that the target verifies."""
        compiled = load_rounds()
        count: int = (
            int(self.live(rows, depth).sum())
            if compiled is None
            else compiled.live_tokens(self._addresses[0], rows, depth)
        )
        return count

    def live(self, rows: int, depth: int) -> Integers:
        """Tokens of each row that the target verifies: the newest and its drafts, or none of a row that has ended."""
        slot_R = self.row_slot[:rows]
        runs_R = self.limit_S[slot_R] - self.length_S[slot_R] > 1
        return runs_R * (1 + self.depth_R[:rows] if depth else np.ones(rows, dtype=np.int64))

    def blocks(self, slot: int, end: int, block_size: int) -> list[int]:
        """The blocks of a slot's first `end` positions."""
        blocks: list[int] = self.table_SP[slot, : -(-end // block_size)].tolist()
        return blocks

    def next_tokens(self, block_size: int, row_R: Sequence[int], made: int, ahead: int) -> AttentionMetadata:
        """The drafter over the newest drafts of these rows, of which there are `made`; `ahead` more may follow."""
        compiled, live = load_rounds(), len(row_R)
        if compiled is not None:
            self._row_4R[0, :live] = row_R
            compiled.lay_out_next(self._addresses[0], live, made, ahead, block_size, self._addresses[1])
            return self._laid_out(live, live, block_size).tokens
        rows, slots = list[AttentionRow](), self.row_slot[list(row_R)]
        for slot, length in zip(slots.tolist(), self.length_S[slots].tolist(), strict=True):
            base = length + made - 1
            blocks = self.blocks(slot, base + 1 + ahead, block_size)
            rows.append(AttentionRow(blocks=blocks, base=base, count=1))
        return AttentionMetadata.of(rows, block_size=block_size, device=torch.device("cpu"))

    def place_offers(self, *, rows: int, depth: int, own_depth: int) -> None:
        """Leave drafts and how deep each row is drafted for; a drafter's `own_depth` where an offer is void."""
        for row, slot in enumerate(self.row_slot[:rows].tolist()):
            known, count, confirmed, *expected = self.offers_RC[row].tolist()
            length, own = int(self.length_S[slot]), min(max(int(self.depth_R[row]), 0), own_depth)
            came = length + 1 - known
            deep = min(count - came, int(self.row_depth[row]), int(self.limit_S[slot]) - length - 2)
            stands = came >= 0 and deep > 0
            for at in range(min(came, len(expected)) if stands else 0):
                stands = stands and self.tokens_SL[slot, (known + at) % self.ring] == expected[at]
            if stands and confirmed:
                mine = self.drafts_RK[row, :own].tolist()
                stands = 0 < own < deep and mine == expected[came : came + own]
            if stands:
                first, deepest = own if confirmed else 0, min(deep, depth)
                self.drafts_RK[row, first:deepest] = expected[came + first : came + deepest]
                self.sure_RK[row, first:deepest] = LOOKED_UP
            self.depth_R[row] = deep if stands else own

    def _laid_out(self, live: int, room: int, block_size: int) -> ExactLayout:
        """What compiled code left of so many rows, in room for some."""
        width = self._layout.width
        memory = self._packed[: room * (4 + width)].copy()
        return self._layout_of(PackedRows(memory, rows=live, room=room, blocks=width), live, block_size)

    def _layout_of(self, rows: Sequence[AttentionRow], live: int, block_size: int) -> ExactLayout:
        tokens = int(self._row_4R[3, :live].sum())
        in_cache_N, position_N, ids_N, place_N = torch.from_numpy(self._token_4N[:, :tokens].copy()).unbind()
        metadata = AttentionMetadata(block_size=block_size, slot_mapping_N=in_cache_N, position_N=position_N, rows=rows)
        return ExactLayout(tokens=metadata, ids_N=ids_N, place_N=place_N, row_R=self._row_4R[0, :live].tolist())

    # --- without a compiler ------------------------------------------------------------------------------------

    def _plainly_laid_out(self, live: int, block_size: int) -> ExactLayout:
        _, slots, bases, counts = self._row_4R[:, :live].tolist()
        rows = [
            AttentionRow(blocks=self.blocks(slot, base + count, block_size), base=base, count=count)
            for slot, base, count in zip(slots, bases, counts, strict=True)
        ]
        return self._layout_of(rows, live, block_size)

    def _plain_verify(self, rows: int, depth: int, block_size: int) -> int:
        live_R = self.live(rows, depth)
        row_R = live_R.nonzero()[0]
        slot_R = self.row_slot[row_R]
        self._take(row_R, self.length_S[slot_R], live_R[row_R], 0, block_size)
        first = 0
        for row, live in zip(row_R, live_R[row_R].tolist(), strict=True):
            self._token_4N[2, first + 1 : first + live] = self.drafts_RK[row, : live - 1]
            first += live
        return len(row_R)

    def _plain_draft(self, rows: int, depth: int, kept: int, block_size: int) -> int:
        slot_R = self.row_slot[:rows]
        length_R, drafted_R = self.length_S[slot_R], self.drafted_S[slot_R]
        room_R = self.limit_S[slot_R] - length_R - 1
        live_R = np.where((self.follows_S[slot_R] > 0) & (room_R > 0), length_R - kept - drafted_R, 0).clip(min=0)
        if depth:
            self.depth_R[:rows] = np.where(live_R > 0, np.minimum(self.row_depth[:rows], room_R - 1), 0)
        row_R = live_R.nonzero()[0]
        self._take(row_R, drafted_R[row_R], live_R[row_R], 1, block_size)
        self.drafted_S[slot_R[row_R]] = (length_R - kept)[row_R]
        return len(row_R)

    def _take(self, row_R: Integers, base_R: Integers, count_R: Integers, shift: int, block_size: int) -> None:
        slot_R, live, tokens = self.row_slot[row_R], len(row_R), int(count_R.sum())
        self._row_4R[:, :live] = row_R, slot_R, base_R, count_R
        slot_N = slot_R.repeat(count_R)
        position_N = np.arange(tokens) + (base_R - count_R.cumsum() + count_R).repeat(count_R)
        in_cache_N = self.table_SP[slot_N, position_N // block_size] * block_size + position_N % block_size
        ids_N = self.tokens_SL[slot_N, (position_N + shift) % self.ring]
        self._token_4N[:, :tokens] = in_cache_N, position_N, ids_N, slot_N * self.ring + position_N % self.ring

    def _plain_settle(self, rows: int, depth: int, token_N: Integers, packed: bool, line_RC: Integers) -> None:
        slot_R, drafts_RK, offset_Q = self.row_slot[:rows], self.drafts_RK[:rows, :depth], np.arange(1 + depth)
        live_R, length_R = self.live(rows, depth), self.length_S[slot_R]
        token_RQ = spread(token_N, live_R, 1 + depth) if packed else token_N.reshape(rows, 1 + depth)
        same_RK = (token_RQ[:, :depth] == drafts_RK) & (offset_Q[1:] < live_R[:, None])
        accepted_R = np.logical_and.accumulate(same_RK, axis=1).sum(axis=1)
        room_R = np.maximum(self.limit_S[slot_R] - length_R - 1, 0)
        new_R = np.minimum(accepted_R + 1, room_R) * (self.row_samples[:rows] > 0) * (live_R > 0)
        new_RQ = offset_Q < new_R[:, None]
        place_RQ = slot_R[:, None] * self.ring + (length_R[:, None] + 1 + offset_Q) % self.ring
        self.tokens_SL.reshape(-1)[place_RQ[new_RQ]] = token_RQ[new_RQ]
        self.length_S[slot_R] = length_R + new_R
        line_RC[:, 0], line_RC[:, 1], line_RC[:, 2 : 3 + depth] = new_R, accepted_R, token_RQ
        line_RC[:, 3 + depth : 3 + 2 * depth] = drafts_RK
        line_RC[:, 3 + 2 * depth :] = self.sure_RK[:rows, :depth].astype(np.float64).view(np.int64)


def spread(token_M: Integers, live_R: Integers, width: int) -> Integers:
    """Packed tokens by row [R, Q]; what no row has is 0."""
    if len(token_M) == len(live_R) * width:
        return token_M.reshape(-1, width)
    token_RQ = np.zeros((len(live_R), width), dtype=np.int64)
    token_RQ[np.arange(width) < live_R[:, None]] = token_M
    return token_RQ


class _Round(ctypes.Structure):
    """`struct round`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("length", "drafted", "limit", "follows", "tokens")),
        *((name, ctypes.c_void_p) for name in ("slot", "asked", "samples", "drafts", "sure", "depth", "table")),
        *((name, ctypes.c_int64) for name in ("ring", "most", "blocks")),
    )


class _PackedLayout(ctypes.Structure):
    """`struct layout`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("row", "slot", "base", "count")),
        *((name, ctypes.c_void_p) for name in ("in_cache", "position", "id", "place", "packed")),
        ("width", ctypes.c_int64),
    )


@cache
def load_rounds() -> Any:
    """The compiled functions; None where there is no compiler."""
    loaded, _ = load_native(SOURCE)
    if loaded is None:
        return None
    library = ctypes.PyDLL(loaded._name, handle=loaded._handle)  # calls are too short to let others run meanwhile
    if library.round_bytes() != ctypes.sizeof(_Round) or library.layout_bytes() != ctypes.sizeof(_PackedLayout):
        return None
    pointer, number = ctypes.c_void_p, ctypes.c_long
    library.lay_out_verify.argtypes = [pointer, number, number, number, pointer]
    library.lay_out_draft.argtypes = [pointer, number, number, number, number, pointer]
    library.lay_out_next.argtypes = [pointer, number, number, number, number, pointer]
    library.settle.argtypes = [pointer, number, number, pointer, ctypes.c_int, pointer]
    library.live_tokens.argtypes = [pointer, number, number]
    library.lay_out_verify.restype = library.lay_out_draft.restype = library.live_tokens.restype = number
    library.lay_out_next.restype = library.settle.restype = None
    return library


def _array(tensor: Tensor) -> Integers:
    array: Integers = tensor.numpy()
    assert array.flags.c_contiguous
    return array
