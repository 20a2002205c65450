"""Keys and values of all requests in blocks, and the layout of one pass over them.

Memory is a row of blocks of `block_size` slots. A request owns a list of blocks, its block table; slot s of the request
lies in block `table[s // block_size]`. Blocks come from anywhere, so memory is never moved to make room and requests
that begin alike can share their first blocks.

One pass takes new tokens of several requests, flattened into one line. A row is one request's share of it:

    slots     0 ............ base | base ........... base + T
              committed prefix    | tail: uncommitted; its last `count` slots are the row's new tokens
    sees      all of it           | chain: up to itself        tree: its ancestors, itself included

Invariant: a committed slot holds the position of its own number. So a new token's position is base plus the tail
tokens that it sees, less one (itself), for chains and trees alike, and what lies behind the tail (an earlier
request, a rejected draft) is never seen.

Shapes: N tokens of a pass, R rows, P blocks of a row, Q new tokens of a row, T its tail, C slots of the cache, G key
heads, K head dim, M slots moved.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from math import prod

import numpy as np
import torch
from torch import Tensor

from eyas.drafter.attention import KeysAndValues
from eyas.errors import UserError

MOST_IN_TREE = 64
"""Tail slots of a tree: who sees whom is kept as bits of an int64."""


class KVCache:
    """Keys and values [G, C, K] of every layer: head by head, so that one head's slots lie side by side.

    A layer's memory is taken on its first write or by `reserve`, once and for good. It starts as zeros, because a
    masked NaN is still a NaN after a product. One block more than asked for is the null block: in layouts of fixed
    shape, tokens that are not real are written there.
    """

    def __init__(self, *, blocks: int, block_size: int) -> None:
        for name, value in (("blocks", blocks), ("block_size", block_size)):
            if value < 1:
                raise UserError(f"{name} is {value}; it must be 1 or more")
        self.blocks, self.block_size = blocks, block_size
        self.layers: dict[int, KeysAndValues] = {}

    @property
    def scrap(self) -> int:
        """A slot that nobody reads."""
        return self.blocks * self.block_size

    @property
    def slots(self) -> int:
        """Of every layer, C, those of the null block included."""
        return self.scrap + self.block_size

    @property
    def bytes(self) -> int:
        """Memory taken so far."""
        return sum(x.nbytes for pair in self.layers.values() for x in pair)

    @property
    def bytes_per_block(self) -> int:
        """What one block takes in all the layers seen so far."""
        return self.bytes // (self.blocks + 1)

    def reserve(self, like: "KVCache") -> None:
        """Take the memory of every layer that `like` has seen."""
        for layer, (keys, values) in like.layers.items():
            if layer not in self.layers:
                self.layers[layer] = self._zeros(keys.transpose(0, 1)), self._zeros(values.transpose(0, 1))

    def memory(self, layer: int, k_NGK: Tensor, v_NGK: Tensor) -> KeysAndValues:
        """A layer's memory, taken now if it was not yet, for keys and values like these."""
        pair = self.layers.get(layer)
        if pair is None:
            pair = self.layers[layer] = self._zeros(k_NGK), self._zeros(v_NGK)
        return pair

    def write(self, layer: int, slot_N: Tensor, k_NGK: Tensor, v_NGK: Tensor) -> KeysAndValues:
        """Put new keys and values in their slots and return the whole layer."""
        keys, values = pair = self.memory(layer, k_NGK, v_NGK)
        keys.index_copy_(1, slot_N, k_NGK.transpose(0, 1))
        values.index_copy_(1, slot_N, v_NGK.transpose(0, 1))
        return pair

    def move(self, from_M: Tensor, to_M: Tensor) -> None:
        """Copy slots in every layer; all are read before any is written."""
        for pair in self.layers.values():
            for x_GCK in pair:
                x_GCK.index_copy_(1, to_M, x_GCK.index_select(1, from_M))

    def _zeros(self, like_NGK: Tensor) -> Tensor:
        _, heads, size = like_NGK.shape
        shape = heads, self.slots, size
        with torch.inference_mode(False):  # else it could be written in inference mode only
            if not like_NGK.is_cpu:
                return like_NGK.new_zeros(shape)
            # The system hands out zeros when they are first touched, and blocks that are never used cost nothing;
            # torch would touch all of them now.
            numbers = np.zeros(prod(shape) * like_NGK.element_size(), dtype=np.uint8)
            return torch.from_numpy(numbers).view(like_NGK.dtype).view(shape)


@dataclass(frozen=True, kw_only=True)
class AttentionRow:
    """One request's share of a pass."""

    blocks: Sequence[int]
    """Its block table; entries behind the tail are not looked at."""
    base: int
    count: int
    """New tokens."""
    ancestors: Tensor | None = None
    """Which tail slots each new token sees, itself included: bool [Q, T] on the host; None is a chain.

    T above Q: the first T - Q tail slots were written by earlier passes over the same tree. Parents lie before their
    children, so a token's ancestors in order of slots are its path in order of depth.
    """

    @property
    def end(self) -> int:
        """The slot behind the tail."""
        return self.base + (self.count if self.ancestors is None else self.ancestors.shape[1])

    def positions(self) -> Sequence[int]:
        """Of the new tokens."""
        if self.ancestors is None:
            return range(self.base, self.base + self.count)
        return [self.base + seen - 1 for seen in self.ancestors.sum(dim=1).tolist()]

    def places(self, first: int, end: int, block_size: int) -> list[int]:
        """Where slots first..end lie in the cache."""
        blocks = self.blocks
        return [blocks[slot // block_size] * block_size + slot % block_size for slot in range(first, end)]

    def check(self, block_size: int) -> None:
        """Assert what every row must hold."""
        assert self.base >= 0
        assert self.count >= 1
        assert self.end <= len(self.blocks) * block_size, f"{self.end} slots in {len(self.blocks)} blocks"
        if self.ancestors is not None:
            queries, tail = self.ancestors.shape
            assert queries == self.count
            assert queries <= tail <= MOST_IN_TREE, f"a tail of {tail} with {queries} new tokens"
            own = self.ancestors[:, tail - queries :]
            assert own.diagonal().all(), "a token sees itself"
            assert not own.triu(1).any(), "parents before children"


@dataclass(frozen=True, kw_only=True)
class BlockTables:
    """The rows as kernels read them, on the device."""

    table_RP: Tensor
    """Block tables, int32; what lies behind a row's tail is not looked at."""
    base_R: Tensor
    end_R: Tensor
    """The slot behind the tail; int32 as base_R."""
    start_R: Tensor
    """Where rows begin among the N tokens, and N: int32 [R + 1]."""
    seen_N: Tensor | None
    """Bit t: the token sees tail slot t. None when every row is a chain; of use only for rows within MOST_IN_TREE."""
    counts: tuple[int, ...]
    """New tokens of each row, live or not."""
    longest: int
    """No row has more slots; may be above the truth."""


@dataclass(frozen=True, kw_only=True)
class AttentionMetadata:
    """Which tokens one pass holds, where each is written and what each sees."""

    block_size: int
    slot_N: Tensor
    """Where each token's key and value are written: places in the cache."""
    position_N: Tensor
    rows: tuple[AttentionRow, ...] = ()
    """None of them in a layout that was made on the device."""
    on_device: BlockTables | None = None

    @classmethod
    def of(cls, rows: Sequence[AttentionRow], *, block_size: int, device: torch.device) -> "AttentionMetadata":
        """Lay out rows known on the host."""
        slots: list[int] = []
        positions: list[int] = []
        for row in rows:
            row.check(block_size)
            slots += row.places(row.end - row.count, row.end, block_size)
            positions += row.positions()
        slot_N, position_N = integers([slots, positions], device).unbind()
        return cls(block_size=block_size, slot_N=slot_N, position_N=position_N, rows=tuple(rows))

    @classmethod
    def padded(
        cls,
        table_RP: Tensor,
        base_R: Tensor,
        live_R: Tensor,
        *,
        count: int,
        cache: KVCache,
        ancestors_RQT: Tensor | None = None,
    ) -> "AttentionMetadata":
        """Lay out rows of `count` tokens, the first live_R of which are real, without leaving the device.

        Nothing here waits for the device and no shape depends on its numbers, so it can be recorded in a CUDA graph
        and replayed after other numbers were put into the three tensors (int32). Every place of a table must be a
        block of the cache. Tokens that are not real are written to the null block; what they compute is finite. A row
        of none should have base 0.
        `ancestors_RQT` makes every row a tree whose tail is live_R + T - Q long; R may be 1 for one shape for all.
        """
        size = cache.block_size
        (rows, blocks), device = table_RP.shape, table_RP.device
        offset_Q = torch.arange(count, device=device)
        depth, earlier, seen_N = offset_Q, 0, None
        if ancestors_RQT is not None:
            depth = ancestors_RQT.sum(dim=-1) - 1
            earlier = ancestors_RQT.shape[-1] - count
            seen_N = _bits(ancestors_RQT).expand(rows, -1).flatten()
        live_RQ = offset_Q < live_R[:, None]
        slot_RQ = base_R[:, None] + earlier + offset_Q
        block_RQ = table_RP.gather(1, (slot_RQ // size).clamp(max=blocks - 1)).long()
        place_RQ = torch.where(live_RQ, block_RQ * size + slot_RQ % size, cache.scrap)
        position_RQ = base_R[:, None] + torch.where(live_RQ, depth, 0)
        tables = BlockTables(
            table_RP=table_RP,
            base_R=base_R,
            end_R=torch.where(live_R > 0, base_R + live_R + earlier, 0).int(),
            start_R=torch.arange(0, (rows + 1) * count, count, dtype=torch.int32, device=device),
            seen_N=seen_N,
            counts=(count,) * rows,
            longest=blocks * size,
        )
        return cls(block_size=size, slot_N=place_RQ.flatten(), position_N=position_RQ.flatten(), on_device=tables)

    @cached_property
    def starts(self) -> list[int]:
        """Where rows begin among the N tokens, and N."""
        starts = [0]
        for row in self.rows:
            starts.append(starts[-1] + row.count)
        return starts

    @property
    def last_R(self) -> Tensor:
        """The index among the N tokens of each row's last one, live or not."""
        if self.on_device is not None:
            return self.on_device.start_R[1:].long() - 1
        return torch.tensor(self.starts[1:], device=self.slot_N.device) - 1

    @cached_property
    def tables(self) -> BlockTables:
        """The rows as kernels read them."""
        if self.on_device is not None:
            return self.on_device
        rows, (widest, numbers) = self.rows, self.numbers()
        # One transfer for all of it.
        flat = torch.tensor(list(chain.from_iterable(numbers)), dtype=torch.int32, device=self.slot_N.device)
        base_R, end_R, start_R, table = torch.split(flat, [len(part) for part in numbers])
        return BlockTables(
            table_RP=table.view(len(rows), widest),
            base_R=base_R,
            end_R=end_R,
            start_R=start_R,
            seen_N=self.seen_N(),
            counts=tuple(row.count for row in rows),
            longest=widest * self.block_size,
        )

    def numbers(self) -> tuple[int, list[list[int]]]:
        """The width of the block tables, and what `Tables` holds of rows known on the host: base, end, start, table."""
        rows = self.rows
        used = [-(-row.end // self.block_size) for row in rows]
        widest = max(used)
        padding = [0] * widest
        tables = ([*row.blocks[:blocks], *padding[blocks:]] for row, blocks in zip(rows, used, strict=True))
        flat = list(chain.from_iterable(tables))
        return widest, [[row.base for row in rows], [row.end for row in rows], self.starts, flat]

    def seen_N(self) -> Tensor | None:
        """As `Tables` has it, of rows known on the host."""
        if all(row.ancestors is None for row in self.rows):
            return None
        seen_N = torch.zeros(self.starts[-1], dtype=torch.int64)
        for row, (start, end) in zip(self.rows, pairwise(self.starts), strict=True):
            if row.count <= MOST_IN_TREE:
                ancestors = row.ancestors
                if ancestors is None:
                    ancestors = torch.ones(row.count, row.count, dtype=torch.bool).tril()
                seen_N[start:end] = _bits(ancestors)
        return seen_N.to(self.slot_N.device)


def integers(numbers: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Numbers of the host as int64 on a device; by way of numpy, in a third of the time that torch takes for a few."""
    return torch.from_numpy(np.array(numbers, dtype=np.int64)).to(device)


def _bits(seen_QT: Tensor) -> Tensor:
    """Rows of a boolean matrix as the bits of int64, the first column lowest."""
    return (seen_QT.long() << torch.arange(seen_QT.shape[-1], device=seen_QT.device)).sum(dim=-1)
