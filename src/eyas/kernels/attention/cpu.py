"""Paged attention on a CPU, by code compiled for it (`cpu.c`).

Decoding and verification have a few queries per request against all its keys. Done piece by piece in torch
(`dense.py`), a layer takes several operations per row, which together can take as long as the matrix products. Here a
layer is one call for all rows; whatever is the same for all layers is computed once per pass.

Invariant: a query's result depends on its own path alone, to the last bit; not on the rows beside it, on drafts after
it, on chunks of a prompt, on where its blocks lie or on the number of threads. With linears that have the same property
(`linear/packed_linear.py`), greedy decoding gives the same tokens one by one and verified as drafts.

Shapes: N tokens of a pass, H query heads, G key heads, C slots of the cache, S those of blocks that are read, K size of
queries and keys, V of values. A unit is up to a block of (query, head) lines of a row that share a key head; it is
processed in chunks of positions.
"""

import ctypes
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from eyas.kernels.attention.backend import AttentionBackend, write_slots
from eyas.kernels.attention.dense import DenseBackend
from eyas.kernels.attention.kv_dtype import FP8, as_stored, bits
from eyas.kernels.attention.metadata import AttentionMetadata, AttentionRow
from eyas.kernels.native import load_native

SOURCE = Path(__file__).with_name("cpu.c")
MOST_PARTS_BYTES = 4 * 2**20
"""Intermediate results kept at once, unless a single unit has more: they should stay in the CPU's cache."""
WORK_OF_A_THREAD = 1 << 18
"""Below this many multiplications a second thread costs more than it saves."""

_POINTERS = ("table", "base", "end", "start", "count", "seen", "slot", "units", "tasks", "parts", "left", "idle")
_NUMBERS = (
    *("rows", "blocks", "block_size", "new_tokens", "idle_count"),
    *("unit_count", "task_count", "part_count", "window", "sinks"),
    *("shared", "key_heads", "slots", "key_size", "value_size"),
    *("q_token", "q_head", "k_token", "k_head", "v_token", "v_head", "threads"),
)


class _Pass(ctypes.Structure):
    """`struct pass`."""

    _fields_ = (*((name, ctypes.c_void_p) for name in _POINTERS), *((name, ctypes.c_int64) for name in _NUMBERS))


@dataclass(frozen=True, eq=False)
class AttentionKernel:
    """The compiled attention."""

    library: ctypes.CDLL

    def __post_init__(self) -> None:
        pointer, number = ctypes.c_void_p, ctypes.c_float
        self.library.attend_blocks.argtypes = [pointer] * 8 + [number] * 2
        self.library.attend_blocks.restype = None
        self.library.advance_blocks.argtypes, self.library.advance_blocks.restype = [pointer], None
        self.library.plan_blocks.argtypes = [pointer, ctypes.c_long, ctypes.c_long, ctypes.c_long]
        self.library.plan_blocks.restype = ctypes.c_long

    @cached_property
    def unit_size(self) -> int:
        """The size of a unit's description, in 32-bit integers."""
        return int(self.library.unit_bytes()) // 4

    @cached_property
    def chunk(self) -> int:
        """Positions per chunk."""
        return int(self.library.chunk_positions())


@cache
def load_kernel() -> tuple[AttentionKernel | None, str]:
    """Return the kernel and its compiler, or None and the reason why there is none."""
    library, words = load_native(SOURCE)
    if library is None:
        return None, words
    kernel = AttentionKernel(library)
    return (kernel, words) if _is_right(kernel) else (None, f"the library compiled by {words} computes wrong results")


@torch.no_grad()
def _is_right(kernel: AttentionKernel) -> bool:
    """Try it: this compiler may never have been tested."""
    if kernel.library.pass_bytes() != ctypes.sizeof(_Pass):
        return False
    size, count, base = 20, 3, kernel.chunk + 5
    end = base + count
    metadata = AttentionMetadata.of(
        [AttentionRow(blocks=range(end), base=base, count=count)], block_size=1, device=torch.device("cpu")
    )
    x = torch.linspace(-1, 1, end * size).mul(99).sin()
    keys, values = x.view(1, end, size), x.flip(0).view(1, end, size)
    q, k, v = keys[0, -count:, None], keys[0, base:, None].clone(), values[0, base:, None].clone()
    ours = CompiledBackend(kernel, metadata).write_and_attend(q.contiguous(), k, v, keys.clone(), values.clone(), 0.5)
    visible = torch.ones(count, end, dtype=torch.bool).tril(base)
    weights = (q[:, 0] @ keys[0].T * 0.5).masked_fill(~visible, float("-inf")).softmax(-1)
    return torch.allclose(ours[:, 0], weights @ values[0], rtol=1e-5, atol=1e-5)


class _Asked(NamedTuple):
    """What a layer's plan depends on, beside the rows."""

    window: int | None
    q_shape: tuple[int, ...]
    v_shape: tuple[int, ...]
    strides: tuple[int, ...]
    slots: int
    ahead: int = 0


class CompiledBackend(AttentionBackend):
    """Runs the kernel, which also writes the new keys and values; what it cannot read goes to `DenseBackend`.

    The kernel reads float32. 8-bit keys and values of the blocks in use are converted to float32 in every layer: that
    saves memory, not time, and a result still depends on its own path alone. Rows that were laid out on a device are
    read from its tensors; tokens outside all rows are not computed.
    """

    def __init__(self, kernel: AttentionKernel, metadata: AttentionMetadata, *, sinks: int = 0) -> None:
        super().__init__(metadata if metadata.rows else metadata.on_host, sinks=sinks)
        self._kernel = kernel
        self._call = kernel.library.attend_blocks
        self._plans: dict[_Asked, list[_Wave]] = {}
        self._q: Tensor | None = None
        self._k: Tensor | None = None
        self._v: Tensor | None = None

    @cached_property
    def _dense(self) -> DenseBackend:
        return DenseBackend(self.metadata, sinks=self.sinks)

    def attend(
        self,
        q_NHK: Tensor,
        keys_GCK: Tensor,
        values_GCV: Tensor,
        scale: float,
        softcap: float | None = None,
        window: int | None = None,
        sink_logit_H: Tensor | None = None,
    ) -> Tensor:
        """Attend densely, since the kernel would also write keys and values."""
        return self._dense.attend(q_NHK, keys_GCK, values_GCV, scale, softcap, window, sink_logit_H)

    def _takes(self, q_NHK: Tensor, k_NGK: Tensor, v_NGV: Tensor) -> bool:
        return (q_NHK is self._q and k_NGK is self._k and v_NGV is self._v) or all(
            x.dtype == torch.float32 and x.is_cpu and x.stride(-1) == 1 and not x.requires_grad
            for x in (q_NHK, k_NGK, v_NGV)
        )

    def write_and_attend(
        self,
        q_NHK: Tensor,
        k_NGK: Tensor,
        v_NGV: Tensor,
        keys_GCK: Tensor,
        values_GCV: Tensor,
        scale: float,
        softcap: float | None = None,
        window: int | None = None,
        sink_logit_H: Tensor | None = None,
    ) -> Tensor:
        """Write and attend, [N, H, V]. All layers have the same number of slots."""
        asked = scale, softcap, window, sink_logit_H
        if not self._takes(q_NHK, k_NGK, v_NGV) or (keys_GCK.dtype == FP8 and self.metadata.idle):
            return super().write_and_attend(q_NHK, k_NGK, v_NGV, keys_GCK, values_GCV, *asked)
        if keys_GCK.dtype == FP8:
            write_slots(keys_GCK, values_GCV, self.metadata.slot_mapping_N, k_NGK, v_NGV)
            slot_S, alone = self._alone
            k_NGK, v_NGV = (as_stored(x_NGK, FP8).float() for x_NGK in (k_NGK, v_NGV))
            keys_GSK, values_GSV = (
                bits(x_GCK).index_select(1, slot_S).view(FP8).float() for x_GCK in (keys_GCK, values_GCV)
            )
            return alone.write_and_attend(q_NHK, k_NGK, v_NGV, keys_GSK, values_GSV, *asked)
        if q_NHK is not self._q or k_NGK is not self._k or v_NGV is not self._v or window != self._window:
            assert keys_GCK.dtype == values_GCV.dtype == torch.float32
            self._prepare(q_NHK, k_NGK, v_NGV, keys_GCK.shape[1], window)
        output_NHV = torch.empty(self._output_shape, dtype=torch.float32)
        sink_logit_H = None if sink_logit_H is None else sink_logit_H.detach().float().contiguous()
        sink = None if sink_logit_H is None else sink_logit_H.data_ptr()
        for wave in self._waves:
            self._call(
                *(wave.address, *self._pointers, keys_GCK.data_ptr(), values_GCV.data_ptr(), sink),
                *(output_NHV.data_ptr(), scale, softcap or 0.0),
            )
        return output_NHV

    @cached_property
    def _alone(self) -> tuple[Tensor, "CompiledBackend"]:
        """The slots of the blocks in use, and a backend over those alone."""
        size, rows = self.metadata.block_size, self.metadata.rows
        tables = [row.blocks[: -(-row.end // size)] for row in rows]
        used = sorted({block for table in tables for block in table})
        place = {block: number for number, block in enumerate(used)}
        moved = [replace(row, blocks=[place[x] for x in table]) for row, table in zip(rows, tables, strict=True)]
        metadata = AttentionMetadata.of(moved, block_size=size, device=self.metadata.slot_mapping_N.device)
        slot_S = (torch.tensor(used)[:, None] * size + torch.arange(size)).flatten()
        return slot_S, CompiledBackend(self._kernel, metadata, sinks=self.sinks)

    def waves(
        self,
        q_shape: Sequence[int],
        v_shape: Sequence[int],
        strides: tuple[int, ...],
        slots: int,
        window: int | None,
        *,
        ahead: int = 0,
    ) -> list[int]:
        """Addresses of a layer's calls for a caller in C; valid as long as this object.

        `strides` are those of tokens and heads, of queries, keys and values. The caller may let chains advance by
        `ahead` slots (`advance_blocks`), for which there must be blocks; the metadata is outdated then.
        """
        asked = _Asked(window, tuple(q_shape), tuple(v_shape), strides, slots, ahead)
        return [wave.address for wave in self._planned(asked)]

    def _prepare(self, q_NHK: Tensor, k_NGK: Tensor, v_NGV: Tensor, slots: int, window: int | None) -> None:
        """Plan a layer; most layers have new numbers in the same memory as the one before."""
        strides = (*q_NHK.stride()[:2], *k_NGK.stride()[:2], *v_NGV.stride()[:2])
        self._waves = self._planned(_Asked(window, tuple(q_NHK.shape), tuple(v_NGV.shape), strides, slots))
        self._window = window
        self._output_shape = (*q_NHK.shape[:2], v_NGV.shape[-1])
        self._q, self._k, self._v = q_NHK, k_NGK, v_NGV  # held, so that nothing else can take their address
        self._pointers = (q_NHK.data_ptr(), k_NGK.data_ptr(), v_NGV.data_ptr())

    def _planned(self, asked: _Asked) -> list["_Wave"]:
        if asked not in self._plans:
            self._plans[asked] = list(self._plan(asked))
        return self._plans[asked]

    def _plan(self, asked: _Asked) -> Iterator["_Wave"]:
        """Yield the calls of a layer, almost always one."""
        (tokens, heads, key_size), (_, key_heads, value_size) = asked.q_shape, asked.v_shape
        metadata, part, plan = self.metadata, 2 + value_size, self._kernel.library.plan_blocks
        rows, idle, tree_mask_N = metadata.packed(asked.ahead), array("i", metadata.idle), metadata.tree_mask_N()
        assert not (asked.ahead and tree_mask_N is not None), "only chains advance"
        at, most, has_begun = 0, MOST_PARTS_BYTES // (4 * part), False
        while at or not has_begun:
            made = _Pass(
                **rows.fields,
                seen=None if tree_mask_N is None else tree_mask_N.data_ptr(),
                slot=metadata.slot_mapping_N.data_ptr(),
                idle=idle.buffer_info()[0],
                block_size=metadata.block_size,
                new_tokens=0 if has_begun else tokens,
                idle_count=0 if has_begun else len(idle),
                window=asked.window or 0,
                sinks=self.sinks,
                shared=heads // key_heads,
                key_heads=key_heads,
                slots=asked.slots,
                key_size=key_size,
                value_size=value_size,
            )
            made.q_token, made.q_head, made.k_token, made.k_head, made.v_token, made.v_head = asked.strides
            address = ctypes.addressof(made)
            plan(address, at, most, asked.ahead)
            sizes = made.part_count * part, made.unit_count * self._kernel.unit_size, made.task_count * 2
            memory = torch.empty(sum(sizes) + made.unit_count * key_heads, dtype=torch.float32)
            first = made.parts = memory.data_ptr()
            made.units, made.tasks, made.left = (first + 4 * before for before in accumulate(sizes))
            at, has_begun = plan(address, at, most, asked.ahead), True
            work = made.part_count * self._kernel.chunk * (key_size + value_size)
            made.threads = min(torch.get_num_threads(), 1 + work // WORK_OF_A_THREAD)
            yield _Wave(address=address, kept=(made, rows, idle, memory, tree_mask_N, metadata.slot_mapping_N))


@dataclass(frozen=True, kw_only=True, eq=False)
class _Wave:
    """One call of a layer: as many units as there is memory for."""

    address: int
    kept: Sequence[object]
    """What lies at the address, and what pointers there refer to."""
