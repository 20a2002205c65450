"""Layouts and outcomes of rounds on a CPU, where host and device memory are the same: nothing is padded.

Results are those of `round_layout.py`, `round_outcome.py` and `round_offers.py`, for live rows and tokens only. Logits
are packed: those of live tokens, row after row. Compiled code (`rounds.c`) does each in one call; without a compiler,
those files do it, and the padding is removed.

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
from eyas.kernels.round_layout import lay_out_draft, lay_out_verify
from eyas.kernels.round_offers import LOOKED_UP
from eyas.kernels.round_outcome import settle
from eyas.kernels.round_tensors import BlockShape, DraftLayout, RoundTensors, VerifyLayout

SOURCE = Path(__file__).with_name("rounds.c")
Integers = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class ExactLayout:
    """The live tokens of a pass."""

    tokens: AttentionMetadata
    ids_N: Tensor
    place_N: Tensor
    """Places of states in the ring of all slots."""
    row_R: Sequence[int]
    """Rows with live tokens, in order."""


class RoundArrays:
    """Views of `RoundTensors` on a CPU, sharing its memory."""

    def __init__(self, state: RoundTensors) -> None:
        self._state, self.ring = state, state.ring
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
        """Lay out the newest token of each row and its drafts, as many as `depth_R` says."""
        compiled, (round_at, layout_at) = load_rounds(), self._addresses
        if compiled is None:
            return self._live_of(
                lay_out_verify(self._state, self._shape(block_size), rows=rows, depth=depth), block_size
            )
        return self._laid_out(compiled.lay_out_verify(round_at, rows, depth, block_size, layout_at), rows, block_size)

    def lay_out_draft(self, block_size: int, *, rows: int, depth: int, kept: int = 0) -> ExactLayout:
        """Lay out the states that wait for the drafter; of each row all but the last `kept`.

        The state is updated as if they had been read: drafts per row in `depth_R`, if there are to be any, and states
        read in `drafted_S`.
        """
        assert not (kept and depth)
        compiled, (round_at, layout_at) = load_rounds(), self._addresses
        if compiled is None:
            slot_R = self.row_slot[:rows]
            reads, shape = max(1, int((self.length_S - self.drafted_S)[slot_R].max())), self._shape(block_size)
            layout = lay_out_draft(self._state, shape, rows=rows, reads=reads, depth=depth, kept=kept)
            return self._live_of(layout, block_size)
        live = compiled.lay_out_draft(round_at, rows, depth, kept, block_size, layout_at)
        return self._laid_out(live, rows, block_size)

    def settle(self, *, rows: int, depth: int, token_N: Tensor, packed: bool) -> Tensor:
        """Advance the rows by the tokens of live tokens, or of all; returns lines like `round_outcome.settle`."""
        compiled, line_RC = load_rounds(), np.empty((rows, 3 + 3 * depth), dtype=np.int64)
        assert token_N.is_contiguous()
        if compiled is None:
            tokens = spread(_array(token_N), self.live(rows, depth), 1 + depth) if packed else _array(token_N)
            token_RQ = torch.from_numpy(tokens).view(rows, 1 + depth)
            return settle(self._state, rows=rows, depth=depth, token_RQ=token_RQ)
        compiled.settle(self._addresses[0], rows, depth, token_N.data_ptr(), packed, line_RC.ctypes.data)
        return torch.from_numpy(line_RC)

    def live_tokens(self, rows: int, depth: int) -> int:
        compiled = load_rounds()
        count: int = (
            int(self.live(rows, depth).sum())
            if compiled is None
            else compiled.live_tokens(self._addresses[0], rows, depth)
        )
        return count

    def live(self, rows: int, depth: int) -> Integers:
        """Tokens of each row that the target verifies: the newest and its drafts, or none if the row has ended."""
        slot_R = self.row_slot[:rows]
        runs_R = self.limit_S[slot_R] - self.length_S[slot_R] > 1
        return runs_R * (1 + self.depth_R[:rows] if depth else np.ones(rows, dtype=np.int64))

    def blocks(self, slot: int, end: int, block_size: int) -> list[int]:
        blocks: list[int] = self.table_SP[slot, : -(-end // block_size)].tolist()
        return blocks

    def next_tokens(self, block_size: int, row_R: Sequence[int], made: int, ahead: int) -> AttentionMetadata:
        """Lay out the drafter over draft number `made` of these rows; `ahead` more may follow."""
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
        """Fill in drafts and each row's number of drafts, at most a drafter's `own_depth` where an offer is void."""
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
        """The layout that compiled code has written, with `live` rows in room for `room`."""
        width = self._layout.width
        memory = self._packed[: room * (4 + width)].copy()
        rows = PackedRows(memory, rows=live, room=room, blocks=width)
        tokens = int(self._row_4R[3, :live].sum())
        in_cache_N, position_N, ids_N, place_N = torch.from_numpy(self._token_4N[:, :tokens].copy()).unbind()
        metadata = AttentionMetadata(block_size=block_size, slot_mapping_N=in_cache_N, position_N=position_N, rows=rows)
        return ExactLayout(tokens=metadata, ids_N=ids_N, place_N=place_N, row_R=self._row_4R[0, :live].tolist())

    def _live_of(self, layout: VerifyLayout | DraftLayout, block_size: int) -> ExactLayout:
        """Remove the padding of a layout."""
        tokens, tables = layout.tokens, layout.tokens.tables
        live_R = tables.seq_lens_R - tables.context_lens_R
        live_N = (torch.arange(len(layout.ids_N) // len(live_R)) < live_R[:, None]).flatten()
        metadata = AttentionMetadata(
            block_size=block_size,
            slot_mapping_N=tokens.slot_mapping_N[live_N],
            position_N=tokens.position_N[live_N],
            rows=tokens.on_host.rows,
        )
        row_R = live_R.nonzero()[:, 0].tolist()
        return ExactLayout(tokens=metadata, ids_N=layout.ids_N[live_N], place_N=layout.place_N[live_N], row_R=row_R)

    def _shape(self, block_size: int) -> BlockShape:
        return BlockShape(blocks=self.table_SP.shape[1], block_size=block_size, null_slot=0)


def spread(token_M: Integers, live_R: Integers, width: int) -> Integers:
    """Unpack tokens by row [R, Q]; missing ones are 0."""
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
    """The compiled functions; None if there is no compiler."""
    loaded, _ = load_native(SOURCE)
    if loaded is None:
        return None
    library = ctypes.PyDLL(loaded._name, handle=loaded._handle)  # calls are too short to release the interpreter's lock
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
