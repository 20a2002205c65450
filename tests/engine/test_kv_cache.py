"""The engine's cache keeps what it is given where it is told, and takes its memory once."""

import pytest
import torch

from each import each
from eyas.engine.kv_cache.cache import KVCache
from eyas.errors import UserError
from eyas.kernels.attention.metadata import AttentionMetadata, AttentionRow

CPU = torch.device("cpu")
KEY_HEADS, SIZE = 2, 8


def filled(cache: KVCache, layers: int = 1) -> None:
    generator = torch.Generator().manual_seed(9)
    for layer in range(layers):
        pair = tuple(
            torch.randn(KEY_HEADS, cache.null_slot + cache.block_size, SIZE, generator=generator) for _ in range(2)
        )
        cache.layers[layer] = pair[0], pair[1]


def test_moving_reads_everything_before_it_writes() -> None:
    cache = KVCache(blocks=3, block_size=4)
    filled(cache, layers=2)
    before = [x.clone() for pair in cache.layers.values() for x in pair]
    cache.move(torch.tensor([1, 5, 9]), torch.tensor([5, 9, 2]))
    after = [x for pair in cache.layers.values() for x in pair]
    for old, new in zip(before, after, strict=True):
        assert torch.equal(new[:, [5, 9, 2]], old[:, [1, 5, 9]])
        old[:, [5, 9, 2]] = new[:, [5, 9, 2]]
        assert torch.equal(new, old)


def test_memory_is_counted_and_taken_before_it_is_needed() -> None:
    one, many = KVCache(blocks=1, block_size=4), KVCache(blocks=10, block_size=4)
    metadata = AttentionMetadata.of([AttentionRow(blocks=[0], base=0, count=1)], block_size=4, device=CPU)
    assert many.bytes == 0
    with torch.inference_mode():
        for layer in range(3):
            one.write(layer, metadata.slot_mapping_N, torch.zeros(1, 2, 8), torch.zeros(1, 2, 6))
    assert one.bytes_per_block == 3 * 4 * 2 * (8 + 6) * 4
    many.reserve(one)
    assert many.bytes == 11 * one.bytes_per_block, "one block more is the null block"
    where = {layer: keys.data_ptr() for layer, (keys, _) in many.layers.items()}
    many.write(2, metadata.slot_mapping_N, torch.ones(1, 2, 8), torch.ones(1, 2, 6))
    assert where == {layer: keys.data_ptr() for layer, (keys, _) in many.layers.items()}
    one.write(0, metadata.slot_mapping_N, torch.ones(1, 2, 8), torch.ones(1, 2, 6))  # outside inference mode as well


@each("name", ["blocks", "block_size"])
def test_a_cache_of_nothing_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=f"{name} is 0"):
        KVCache(**{"blocks": 4, "block_size": 4, name: 0})
