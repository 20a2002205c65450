"""Keys and values of all requests, in blocks, and the memory that there is for them.

What a block is and who owns which is for `block_manager.py` to say; which slots a pass writes and reads is said by
`kernels/attention/metadata.py`. Here are the tensors, and attention over them.

Shapes: N tokens of a pass, C slots of the cache, H query heads, G key heads, K head dim, M slots moved.
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
    """Keys and values [G, C, K] of every layer: head by head, so that one head's slots lie side by side.

    A layer's memory is taken on its first write or by `reserve`, once and for good. It starts as zeros, because a
    masked NaN is still a NaN after a product. One block more than asked for is the null block: in passes of fixed
    shape, tokens that are not real are written there. What is written is kept as `dtype`, or as it comes.
    """

    def __init__(self, *, blocks: int, block_size: int, dtype: torch.dtype | None = None) -> None:
        for name, value in (("blocks", blocks), ("block_size", block_size)):
            if value < 1:
                raise UserError(f"{name} is {value}; it must be 1 or more")
        self.blocks, self.block_size, self.dtype = blocks, block_size, dtype
        self.layers: dict[int, KeysAndValues] = {}
        self._moved: list[tuple[Tensor, Tensor]] = []
        """For `move_by_row`: the addresses of all tensors of a kind, and one of them."""
        self._moved_layers = 0
        """Layers that had memory then."""

    @property
    def null_slot(self) -> int:
        """A slot of the null block, which nobody reads."""
        return self.blocks * self.block_size

    @property
    def slots(self) -> int:
        """Of every layer, C, those of the null block included."""
        return self.null_slot + self.block_size

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

    def write(self, layer: int, slot_mapping_N: Tensor, k_NGK: Tensor, v_NGK: Tensor) -> None:
        """Put new keys and values in their slots."""
        keys, values = self.memory(layer, k_NGK, v_NGK)
        write_slots(keys, values, slot_mapping_N, k_NGK, v_NGK)

    def move(self, from_M: Tensor, to_M: Tensor) -> None:
        """Copy slots in every layer; all are read before any is written."""
        for pair in self.layers.values():
            for x_GCK in pair:
                bits(x_GCK).index_copy_(1, to_M, bits(x_GCK).index_select(1, from_M))

    def move_by_row(self, from_M: Tensor, to_M: Tensor, rows: int) -> None:
        """The same for as many moves of each row, each to a slot before those that later ones of the row come from."""
        if not (from_M.is_cuda and has_triton()):
            self.move(from_M, to_M)
            return
        # torch for CPUs comes without triton
        from eyas.kernels.move_slots_triton import addresses, move_slots_by_triton

        if self._moved_layers != len(self.layers):
            # Addresses are brought to the device once: a captured pass may not wait for it.
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
        with torch.inference_mode(False):  # else it could be written in inference mode only
            if not like_NGK.is_cpu:
                return like_NGK.new_zeros(shape, dtype=dtype)
            # The system hands out zeros when they are first touched, and blocks that are never used cost nothing;
            # torch would touch all of them now. A block is a page or so in every head of every layer: in huge pages,
            # which numpy asks for, the first block would take hundreds of megabytes.
            memory = mapped_memory(prod(shape) * dtype.itemsize, huge_pages=False)
            return torch.frombuffer(memory, dtype=dtype).view(shape)


class PagedAttention:
    """One pass's attention over a cache: an `Attend` for drafters, and what targets attend through
    (`target/attention.py`).
    """

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
        """Write k, v [N, G, K] of the new tokens and answer their queries [N, H, K].

        Scores are scaled by `scale`, K ** -0.5 if none is given, and bent to softcap * tanh(score / softcap).
        """
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        window = self.window if window is None else window
        keys, values = self.cache.memory(layer, k, v)
        return self.backend.write_and_attend(q, k, v, keys, values, scale, softcap, window, sink_logit_H)


def reserve_cache(drafter: Drafter, *, blocks: int, block_size: int, dtype: torch.dtype | None = None) -> KVCache:
    """Blocks for another drafter, all taken at once beside the old ones, or a refusal."""
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
    """Memory that is free where the caches will lie."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    available = [line.split()[1] for line in _meminfo() if line.startswith("MemAvailable:")]
    if available:
        return int(available[0]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _meminfo() -> list[str]:
    """Linux counts what it could drop as available; other systems have no such file."""
    try:
        return Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return []
