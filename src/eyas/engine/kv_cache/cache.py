"""KV cache tensors, and attention over them.

`block_manager.py` decides who owns which block; `kernels/attention/metadata.py` says which slots a pass uses.

Shapes: N tokens of a pass, C slots of the cache, H query heads, G key heads, K head dim, M moved slots.
"""

import os
from itertools import chain
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from eyas.drafter.attention import KeysAndValues
from eyas.drafter.model import Drafter
from eyas.errors import UserError
from eyas.kernels.attention.backend import write_slots
from eyas.kernels.attention.choose import choose_backend, has_triton
from eyas.kernels.attention.kv_dtype import bits
from eyas.kernels.attention.metadata import AttentionMetadata
from eyas.kernels.mapped_memory import mapped_memory


class KVCache:
    """Keys and values [G, C, K] of every layer. The layout is head-major, so that a head's slots are contiguous.

    A layer's memory is allocated on its first write or by `reserve`, and kept. It starts as zeros, because masked NaNs
    would survive in products. One extra block, the null block, takes the writes of padding tokens. Elements are of
    `dtype`, or as computed.
    """

    def __init__(self, *, blocks: int, block_size: int, dtype: torch.dtype | None = None) -> None:
        for name, value in (("blocks", blocks), ("block_size", block_size)):
            if value < 1:
                raise UserError(f"{name} is {value}; it must be 1 or more")
        self.blocks, self.block_size, self.dtype = blocks, block_size, dtype
        self.layers: dict[int, KeysAndValues] = {}
        self._moved: list[tuple[Tensor, Tensor]] = []
        """For `move_by_row`: addresses of the tensors of each shape and dtype, with one of them."""
        self._moved_layers = 0

    @property
    def null_slot(self) -> int:
        """First slot of the null block, which is never read."""
        return self.blocks * self.block_size

    @property
    def slots(self) -> int:
        """Number of slots C per layer, including the null block."""
        return self.null_slot + self.block_size

    @property
    def bytes(self) -> int:
        return sum(x.nbytes for pair in self.layers.values() for x in pair)

    @property
    def bytes_per_block(self) -> int:
        """Memory of one block over all allocated layers."""
        return self.bytes // (self.blocks + 1)

    def reserve(self, like: "KVCache") -> None:
        """Allocate all layers that `like` has."""
        for layer, (keys, values) in like.layers.items():
            if layer not in self.layers:
                self.layers[layer] = self._zeros(keys.transpose(0, 1)), self._zeros(values.transpose(0, 1))

    def memory(self, layer: int, k_NGK: Tensor, v_NGK: Tensor) -> KeysAndValues:
        """Return a layer's memory; allocate it for keys and values like these if needed."""
        pair = self.layers.get(layer)
        if pair is None:
            pair = self.layers[layer] = self._zeros(k_NGK), self._zeros(v_NGK)
        return pair

    def write(self, layer: int, slot_mapping_N: Tensor, k_NGK: Tensor, v_NGK: Tensor) -> None:
        keys, values = self.memory(layer, k_NGK, v_NGK)
        write_slots(keys, values, slot_mapping_N, k_NGK, v_NGK)

    def move(self, from_M: Tensor, to_M: Tensor) -> None:
        """Copy slots in every layer; all reads come before all writes."""
        for pair in self.layers.values():
            for x_GCK in pair:
                bits(x_GCK).index_copy_(1, to_M, bits(x_GCK).index_select(1, from_M))

    def move_by_row(self, from_M: Tensor, to_M: Tensor, rows: int) -> None:
        """`move` for M / rows copies per row. A copy may not overwrite the source of a later one of its row."""
        if not (from_M.is_cuda and has_triton()):
            self.move(from_M, to_M)
            return
        # torch for CPUs has no triton
        from eyas.kernels.move_slots_triton import addresses, move_slots_by_triton

        if self._moved_layers != len(self.layers):
            # Copy addresses to the device once: a captured pass must not wait for them.
            kinds: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = {}
            for x_GCK in chain.from_iterable(self.layers.values()):
                kinds.setdefault((x_GCK.shape, x_GCK.dtype), []).append(x_GCK)
            self._moved_layers = len(self.layers)
            self._moved = [(addresses(tensors), tensors[0]) for tensors in kinds.values()]
        for memory_L, like_GCK in self._moved:
            move_slots_by_triton(memory_L, like_GCK, from_M, to_M, rows)

    def _zeros(self, like_NGK: Tensor) -> Tensor:
        _, heads, head_dim = like_NGK.shape
        shape, dtype = (heads, self.slots, head_dim), self.dtype or like_NGK.dtype
        with torch.inference_mode(False):  # otherwise writes outside of inference mode would fail
            if not like_NGK.is_cpu:
                return like_NGK.new_zeros(shape, dtype=dtype)
            # Use memory that the system zeroes on first touch, so that unused blocks cost nothing; torch would touch
            # all of it now. No huge pages: a block is about one page per head and layer, so the first block would
            # take hundreds of megabytes.
            memory = mapped_memory(prod(shape) * dtype.itemsize, huge_pages=False)
            return torch.frombuffer(memory, dtype=dtype).view(shape)


class PagedAttention:
    """Attention of one pass over a KV cache: an `Attend` for drafters, used by targets too (`target/attention.py`)."""

    def __init__(
        self, cache: KVCache, metadata: AttentionMetadata, *, window: int | None = None, sinks: int = 0
    ) -> None:
        assert metadata.block_size == cache.block_size
        self.cache, self.metadata, self.window = cache, metadata, window
        self.backend = choose_backend(metadata, sinks=sinks)

    def __call__(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float | None = None,
        softcap: float | None = None,
        window: int | None = None,
        sink_logit_H: Tensor | None = None,
    ) -> Tensor:
        """Write k, v [N, G, K] of the new tokens and attend with their queries [N, H, K].

        Scores are scaled by `scale`, by default K ** -0.5, and soft-capped to softcap * tanh(score / softcap).
        """
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        window = self.window if window is None else window
        keys, values = self.cache.memory(layer, k, v)
        return self.backend.write_and_attend(q, k, v, keys, values, scale, softcap, window, sink_logit_H)


def reserve_cache(drafter: Drafter, *, blocks: int, block_size: int, dtype: torch.dtype | None = None) -> KVCache:
    """Allocate the whole KV cache of a replacement drafter beside the old one; refuse if memory is short."""
    config, weight = drafter.config, drafter.fc.weight
    element = (dtype or weight.dtype).itemsize
    per_slot = config.num_hidden_layers * config.cached.numbers * element
    needed, free = per_slot * (blocks + 1) * block_size, free_bytes(weight.device)
    if needed > free:
        raise UserError(
            f"blocks for the drafter need {needed / 2**20:.1f} MiB, above the {free / 2**20:.1f} MiB that are free; "
            "choose a smaller one, or restart with less memory for blocks"
        )
    cache = KVCache(blocks=blocks, block_size=block_size, dtype=dtype)
    sizes = config.cached
    like_1GK, like_1GV = (weight.new_empty(1, sizes.heads, size) for size in (sizes.key_dim, sizes.value_dim))
    for layer in range(config.num_hidden_layers):
        cache.memory(layer, like_1GK, like_1GV)
    return cache


def free_bytes(device: torch.device) -> int:
    """Free memory of the device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    available = [line.split()[1] for line in _meminfo() if line.startswith("MemAvailable:")]
    if available:
        return int(available[0]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _meminfo() -> list[str]:
    """Lines of Linux's memory information; other systems have no such file."""
    try:
        return Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return []
