"""Describes a pass to attention: its tokens, where each is written and what each sees.

Keys and values of a layer are one tensor [G, C, K] each, a sequence of blocks of `block_size` slots. A request has a
block table; its slot s is in block `block_table[s // block_size]`. Blocks can be anywhere, so memory is never moved to
make room, and requests with a common prefix can share blocks.

One pass has new tokens of several requests, flattened. A row is one request's share of it:

    slots     0 ............ base | base ........... base + T
              committed prefix    | tail: uncommitted; its last `count` slots are the row's new tokens
    sees      all of it           | chain: up to itself        tree: its ancestors, itself included

Invariant: a committed slot holds the position of its own number. So a new token's position is base plus the tail tokens
that it sees, less one (itself), for chains and trees alike, and what is after the tail (an earlier request, a rejected
draft) is never seen.

Shapes: N tokens of a pass, R rows, P blocks of a row, Q new tokens of a row, T its tail, C slots of the cache, G key
heads, K head dim.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain
from typing import overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Integers32 = NDArray[np.int32]
TREE_BITS = 64
"""Most tail slots of a tree: visibility is stored as bits of an int64."""


@dataclass(frozen=True, kw_only=True)
class AttentionRow:
    """One request's share of a pass."""

    blocks: Sequence[int]
    """The block table; entries after the tail are ignored."""
    base: int
    count: int
    ancestors: Tensor | None = None
    """Tail slots that each new token sees, itself included: bool [Q, T] on the host; None means a chain.

    T above Q: the first T - Q tail slots were written by earlier passes over the same tree. Parents come before their
    children, so a token's ancestors in slot order are its path in order of depth."""

    @property
    def end(self) -> int:
        """The slot after the tail."""
        return self.base + (self.count if self.ancestors is None else self.ancestors.shape[1])

    def positions(self) -> Sequence[int]:
        """Positions of the new tokens."""
        if self.ancestors is None:
            return range(self.base, self.base + self.count)
        return [self.base + seen - 1 for seen in self.ancestors.sum(dim=1).tolist()]

    def places(self, first: int, end: int, block_size: int) -> list[int]:
        """Places of slots first..end in the cache."""
        blocks = self.blocks
        return [blocks[slot // block_size] * block_size + slot % block_size for slot in range(first, end)]

    def check(self, block_size: int) -> None:
        """Assert the invariants of a row."""
        assert self.base >= 0
        assert self.count >= 1
        assert self.end <= len(self.blocks) * block_size, f"{self.end} slots in {len(self.blocks)} blocks"
        if self.ancestors is not None:
            queries, tail = self.ancestors.shape
            assert queries == self.count
            assert queries <= tail <= TREE_BITS, f"a tail of {tail} with {queries} new tokens"
            own = self.ancestors[:, tail - queries :]
            assert own.diagonal().all(), "a token sees itself"
            assert not own.triu(1).any(), "parents before children"


class PackedRows(Sequence[AttentionRow]):
    """Chains as compiled code reads and writes them, in one array.

    32-bit integers: base, end, first token and token count of every row, then its blocks. There may be room for more
    rows.
    """

    def __init__(self, memory: Integers32, *, rows: int, room: int, blocks: int) -> None:
        """Wrap an array with `blocks` block table entries per row."""
        self._memory, self._rows, self._room, self._blocks = memory, rows, room, blocks
        first, step = memory.__array_interface__["data"][0], room * memory.itemsize
        self.fields = {
            "base": first,
            "end": first + step,
            "start": first + 2 * step,
            "count": first + 3 * step,
            "table": first + 4 * step,
            "rows": rows,
            "blocks": blocks,
        }
        """Fields of `struct pass` in `cpu.c`."""

    def __len__(self) -> int:
        return self._rows

    @overload
    def __getitem__(self, index: int) -> AttentionRow: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[AttentionRow]: ...

    def __getitem__(self, index: int | slice) -> AttentionRow | Sequence[AttentionRow]:
        if isinstance(index, slice):
            return [self[at] for at in range(self._rows)[index]]
        at, room = range(self._rows)[index], self._room
        base, _, _, count = self._memory[at : at + 3 * room + 1 : room].tolist()
        blocks = self._memory[4 * room + at * self._blocks :][: self._blocks]
        return AttentionRow(blocks=blocks.tolist(), base=base, count=count)

    @property
    def bases(self) -> list[int]:
        bases: list[int] = self._memory[: self._rows].tolist()
        return bases

    @property
    def counts(self) -> list[int]:
        counts: list[int] = self._memory[3 * self._room :][: self._rows].tolist()
        return counts


@dataclass(frozen=True, kw_only=True)
class BlockTables:
    """The rows as kernels read them, on the device."""

    block_table_RP: Tensor
    """Block tables, int32; entries after a row's tail are ignored."""
    context_lens_R: Tensor
    """Slots before the tail, `base` of the rows: int32."""
    seq_lens_R: Tensor
    """Slots up to the end of the tail: int32."""
    query_start_loc_R: Tensor
    """The first token of each row, and N: int32 [R + 1]."""
    tree_mask_N: Tensor | None
    """Bit t: the token sees tail slot t. None if every row is a chain; only used for rows within TREE_BITS."""
    query_lens: tuple[int, ...] | None
    """New tokens of each row, live or not. None: only the device knows, and there may be tokens after the last row."""
    max_seq_len: int
    """Upper bound of the slots of a row."""
    longest: int | None = None
    """Upper bound of the new tokens of a row where only the device knows them, if it is small."""


@dataclass(frozen=True, kw_only=True)
class AttentionMetadata:
    """The tokens of a pass, where each is written and what each sees."""

    block_size: int
    slot_mapping_N: Tensor
    """Cache places for each token's key and value."""
    position_N: Tensor
    rows: Sequence[AttentionRow] = ()
    """Rows known on the host; empty if everything was laid out on the device."""
    on_device: BlockTables | None = None
    first_token_R: tuple[int, ...] | None = None
    """The first token of each row, if rows are not adjacent."""

    @classmethod
    def of(cls, rows: Sequence[AttentionRow], *, block_size: int, device: torch.device) -> "AttentionMetadata":
        """Lay out rows known on the host."""
        slots: list[int] = []
        positions: list[int] = []
        for row in rows:
            row.check(block_size)
            slots += row.places(row.end - row.count, row.end, block_size)
            positions += row.positions()
        slot_mapping_N, position_N = integers([slots, positions], device).unbind()
        return cls(block_size=block_size, slot_mapping_N=slot_mapping_N, position_N=position_N, rows=tuple(rows))

    @classmethod
    def padded(
        cls,
        block_table_RP: Tensor,
        context_lens_R: Tensor,
        live_R: Tensor,
        *,
        count: int,
        block_size: int,
        null_slot: int,
    ) -> "AttentionMetadata":
        """Lay out chains of `count` tokens, the first live_R of which are real, without leaving the device.

        Nothing here waits for the device and shapes do not depend on its data, so it can be captured in a CUDA graph
        and replayed with other numbers in the three tensors (int32). Every entry of a table must be a block of the
        cache. Tokens that are not real are written to `null_slot`, which is never read; their results are finite. An
        unused row should have base 0.
        """
        offset_RQ = torch.arange(count, device=block_table_RP.device).expand(len(block_table_RP), -1)
        return cls._of_tails(
            block_table_RP, context_lens_R, live_R, offset_RQ, block_size=block_size, null_slot=null_slot
        )

    @classmethod
    def _of_tails(
        cls,
        block_table_RP: Tensor,
        base_R: Tensor,
        live_R: Tensor,
        depth_RQ: Tensor,
        *,
        block_size: int,
        null_slot: int,
        written: int = 0,
        tree_mask_N: Tensor | None = None,
    ) -> "AttentionMetadata":
        """Lay out Q tokens per row after the `written` ones of its tail, at positions base + depth."""
        (rows, blocks), device, count = block_table_RP.shape, block_table_RP.device, depth_RQ.shape[1]
        offset_Q = torch.arange(count, device=device)
        live_RQ = offset_Q < live_R[:, None]
        slot_RQ = base_R[:, None] + (written + offset_Q)
        block_RQ = block_table_RP.gather(1, (slot_RQ // block_size).clamp(max=blocks - 1)).long()
        place_RQ = torch.where(live_RQ, block_RQ * block_size + slot_RQ % block_size, null_slot)
        tables = BlockTables(
            block_table_RP=block_table_RP,
            context_lens_R=base_R,
            seq_lens_R=torch.where(live_R > 0, base_R + (written + live_R), 0).int(),
            query_start_loc_R=torch.arange(0, (rows + 1) * count, count, dtype=torch.int32, device=device),
            tree_mask_N=tree_mask_N,
            query_lens=(count,) * rows,
            max_seq_len=blocks * block_size,
        )
        position_RQ = base_R[:, None] + torch.where(live_RQ, depth_RQ, 0)
        return cls(
            block_size=block_size,
            slot_mapping_N=place_RQ.flatten(),
            position_N=position_RQ.flatten(),
            on_device=tables,
        )

    @classmethod
    def trees(
        cls,
        block_table_RP: Tensor,
        context_lens_R: Tensor,
        live_R: Tensor,
        seen_RQ: Tensor,
        depth_RQ: Tensor,
        *,
        tail: int,
        block_size: int,
        null_slot: int,
    ) -> "AttentionMetadata":
        """Lay out the last Q nodes of trees that take `tail` slots, the first live_R of them real; otherwise like
        `padded`.

        seen_RQ has the bits of the tail slots that a node sees, and depth_RQ the distance of its position from the
        first slot of the tail.
        """
        return cls._of_tails(
            block_table_RP,
            torch.where(live_R > 0, context_lens_R, 0).int(),
            live_R,
            depth_RQ,
            block_size=block_size,
            null_slot=null_slot,
            written=tail - seen_RQ.shape[1],
            tree_mask_N=seen_RQ.flatten(),
        )

    @classmethod
    def ragged(
        cls,
        block_table_RP: Tensor,
        context_lens_R: Tensor,
        query_start_loc_R: Tensor,
        *,
        count: int,
        block_size: int,
        null_slot: int,
        live_R: Tensor | None = None,
        longest: int | None = None,
    ) -> "AttentionMetadata":
        """Lay out chains of any length without leaving the device; `count` tokens include the padding after them.

        Row r has the tokens query_start_loc_R[r] to query_start_loc_R[r + 1] (int32 [R + 1], from 0 on), perhaps none.
        The first live_R of them are real, or all. Tokens after the last row are not. Like `padded`, it can be captured,
        and tokens that are not real are written to `null_slot`. `longest` bounds the tokens of a row, if they are as
        few as drafts.
        """
        blocks, device = block_table_RP.shape[1], block_table_RP.device
        rows = len(context_lens_R)
        if live_R is None:
            live_R = query_start_loc_R.diff()
        token_N = torch.arange(count, dtype=torch.int32, device=device)
        # A token after the last row counts as one of it, after its live ones.
        row_N = torch.searchsorted(query_start_loc_R[1:], token_N, right=True).clamp(max=rows - 1)
        offset_N, live_count_N = token_N - query_start_loc_R[row_N], live_R[row_N]
        live_N = offset_N < live_count_N
        # At the position of the last live token, they see no more and no earlier slots than it does.
        position_N = context_lens_R[row_N].long() + offset_N.minimum(live_count_N - 1).clamp(min=0)
        block_N = block_table_RP[row_N, (position_N // block_size).clamp(max=blocks - 1)].long()
        tables = BlockTables(
            block_table_RP=block_table_RP,
            context_lens_R=context_lens_R,
            seq_lens_R=torch.where(live_R > 0, context_lens_R + live_R, 0).int(),
            query_start_loc_R=query_start_loc_R,
            tree_mask_N=None,
            query_lens=None,
            max_seq_len=blocks * block_size,
            longest=longest,
        )
        return cls(
            block_size=block_size,
            slot_mapping_N=torch.where(live_N, block_N * block_size + position_N % block_size, null_slot),
            position_N=position_N,
            on_device=tables,
        )

    @cached_property
    def on_host(self) -> "AttentionMetadata":
        """The live tokens of all rows, as the host knows or reads them; unused rows are left out."""
        if self.on_device is None or self.rows:
            return self
        tables = self.on_device
        starts, mask_N = tables.query_start_loc_R.tolist(), tables.tree_mask_N
        ends, bases = tables.seq_lens_R.tolist(), tables.context_lens_R.tolist()
        rows, first_token_R = [], []
        for r, (base, end) in enumerate(zip(bases, ends, strict=True)):
            if not end:
                continue
            blocks, count, ancestors = tables.block_table_RP[r, : -(-end // self.block_size)].tolist(), end - base, None
            if mask_N is not None:
                # A tree that earlier passes began has all its new tokens live; one that begins here may not.
                count = min(starts[r + 1] - starts[r], end - base)
                bits_QT = mask_N[starts[r] : starts[r] + count, None].cpu() >> torch.arange(end - base)
                ancestors = bits_QT & 1 > 0
            rows.append(AttentionRow(blocks=blocks, base=base, count=count, ancestors=ancestors))
            first_token_R.append(starts[r])
        return AttentionMetadata(
            block_size=self.block_size,
            slot_mapping_N=self.slot_mapping_N,
            position_N=self.position_N,
            rows=tuple(rows),
            first_token_R=tuple(first_token_R),
        )

    @property
    def idle(self) -> list[int]:
        """Tokens outside all rows."""
        return [] if self.first_token_R is None else self._idle

    @cached_property
    def _idle(self) -> list[int]:
        taken = {start + q for row, start in zip(self.rows, self.starts, strict=False) for q in range(row.count)}
        return [token for token in range(len(self.position_N)) if token not in taken]

    @cached_property
    def starts(self) -> list[int]:
        """The first token of each row, and N."""
        if self.first_token_R is not None:
            return [*self.first_token_R, len(self.position_N)]
        return [0, *accumulate(self._counts)]

    @property
    def _counts(self) -> Sequence[int]:
        rows = self.rows
        return rows.counts if isinstance(rows, PackedRows) else [row.count for row in rows]

    def packed(self, ahead: int = 0) -> PackedRows:
        """The rows as compiled code reads them, with blocks that reach `ahead` slots further."""
        if isinstance(self.rows, PackedRows):
            return self.rows
        widest, (bases, ends, starts, table) = self.numbers(ahead)
        memory = np.array([*bases, *ends, *starts[:-1], *self._counts, *table], dtype=np.int32)
        return PackedRows(memory, rows=len(bases), room=len(bases), blocks=widest)

    @cached_property
    def tables(self) -> BlockTables:
        if self.on_device is not None:
            return self.on_device
        rows, (widest, numbers) = self.rows, self.numbers()
        # One transfer for all of it.
        flat = torch.tensor(list(chain.from_iterable(numbers)), dtype=torch.int32, device=self.slot_mapping_N.device)
        context_lens_R, seq_lens_R, query_start_loc_R, table = torch.split(flat, [len(part) for part in numbers])
        return BlockTables(
            block_table_RP=table.view(len(rows), widest),
            context_lens_R=context_lens_R,
            seq_lens_R=seq_lens_R,
            query_start_loc_R=query_start_loc_R,
            tree_mask_N=self.tree_mask_N(),
            query_lens=tuple(row.count for row in rows),
            max_seq_len=widest * self.block_size,
        )

    def numbers(self, ahead: int = 0) -> tuple[int, list[list[int]]]:
        """Width of the block tables; and base, end, start and table of rows known on the host.

        Tables reach `ahead` slots further than the rows.
        """
        rows = self.rows
        used = [-(-(row.end + ahead) // self.block_size) for row in rows]
        assert all(blocks <= len(row.blocks) for row, blocks in zip(rows, used, strict=True))
        widest = max(used, default=0)
        padding = [0] * widest
        tables = ([*row.blocks[:blocks], *padding[blocks:]] for row, blocks in zip(rows, used, strict=True))
        flat = list(chain.from_iterable(tables))
        return widest, [[row.base for row in rows], [row.end for row in rows], self.starts, flat]

    def tree_mask_N(self) -> Tensor | None:
        """`BlockTables.tree_mask_N` of rows known on the host."""
        if isinstance(self.rows, PackedRows) or all(row.ancestors is None for row in self.rows):
            return None
        tree_mask_N = torch.zeros(self.starts[-1], dtype=torch.int64)
        for row, start in zip(self.rows, self.starts, strict=False):
            if row.count <= TREE_BITS:
                ancestors = row.ancestors
                if ancestors is None:
                    ancestors = torch.ones(row.count, row.count, dtype=torch.bool).tril()
                tree_mask_N[start : start + row.count] = _bits(ancestors)
        return tree_mask_N.to(self.slot_mapping_N.device)


def integers(numbers: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Host numbers as int64 on a device; through numpy, in a third of the time that torch takes for a few."""
    return torch.from_numpy(np.array(numbers, dtype=np.int64)).to(device)


def _bits(seen_QT: Tensor) -> Tensor:
    """Rows of a boolean matrix as the bits of int64, the first column lowest."""
    return (seen_QT.long() << torch.arange(seen_QT.shape[-1], device=seen_QT.device)).sum(dim=-1)
