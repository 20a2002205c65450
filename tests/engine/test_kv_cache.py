"""The KV cache stores what it is given in the right place; drafting through it equals dense attention."""

import pytest
import torch
from torch import Tensor

import tiny
from each import each
from eyas.drafter.model import Drafter
from eyas.engine.kv_cache.cache import KVCache, PagedAttention
from eyas.engine.speculation.draft import MOST_IN_TREE
from eyas.errors import UserError
from eyas.kernels.attention.metadata import TREE_BITS, AttentionMetadata, AttentionRow
from oracle.dense import DenseAttention

CPU = torch.device("cpu")
KEY_HEADS, SIZE = 2, 8


def filled(cache: KVCache, layers: int = 1) -> None:
    generator = torch.Generator().manual_seed(9)
    for layer in range(layers):
        pair = tuple(
            torch.randn(KEY_HEADS, cache.null_slot + cache.block_size, SIZE, generator=generator) for _ in range(2)
        )
        cache.layers[layer] = pair[0], pair[1]


def test_moving_reads_all_slots_before_it_writes() -> None:
    cache = KVCache(blocks=3, block_size=4)
    filled(cache, layers=2)
    before = [x.clone() for pair in cache.layers.values() for x in pair]
    cache.move(torch.tensor([1, 5, 9]), torch.tensor([5, 9, 2]))
    after = [x for pair in cache.layers.values() for x in pair]
    for old, new in zip(before, after, strict=True):
        assert torch.equal(new[:, [5, 9, 2]], old[:, [1, 5, 9]])
        old[:, [5, 9, 2]] = new[:, [5, 9, 2]]
        assert torch.equal(new, old)


def test_memory_is_counted_and_reserved_ahead() -> None:
    one, many = KVCache(blocks=1, block_size=4), KVCache(blocks=10, block_size=4)
    metadata = AttentionMetadata.of([AttentionRow(blocks=[0], base=0, count=1)], block_size=4, device=CPU)
    assert many.bytes == 0
    with torch.inference_mode():
        for layer in range(3):
            one.write(layer, metadata.slot_mapping_N, torch.zeros(1, 2, 8), torch.zeros(1, 2, 6))
    assert one.bytes_per_block == 3 * 4 * 2 * (8 + 6) * 4
    many.reserve(one)
    assert many.bytes == 11 * one.bytes_per_block, "one extra block is the null block"
    where = {layer: keys.data_ptr() for layer, (keys, _) in many.layers.items()}
    many.write(2, metadata.slot_mapping_N, torch.ones(1, 2, 8), torch.ones(1, 2, 6))
    assert where == {layer: keys.data_ptr() for layer, (keys, _) in many.layers.items()}
    one.write(0, metadata.slot_mapping_N, torch.ones(1, 2, 8), torch.ones(1, 2, 6))  # outside inference mode as well


@each("name", ["blocks", "block_size"])
def test_a_cache_of_nothing_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=f"{name} is 0"):
        KVCache(**{"blocks": 4, "block_size": 4, name: 0})


CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def drafter() -> Drafter:
    return tiny.random_drafter(tiny.drafter_config(num_hidden_layers=2, norm_output=True))


@torch.no_grad()
def test_a_drafter_through_blocks_drafts_as_through_dense_attention(drafter: Drafter) -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = (9, 5)
    states = [torch.randn(n, tiny.HIDDEN, generator=generator) for n in lengths]
    ids = [torch.randint(tiny.VOCAB, (n,), generator=generator) for n in lengths]
    past, theirs = [], []
    for state, tokens in zip(states, ids, strict=True):
        attention = DenseAttention()
        theirs.append(drafter.step(state, tokens, torch.arange(len(tokens)), attention))
        past.append(attention.present)
    cache = KVCache(blocks=8, block_size=4)
    blocks = [[6, 1, 3, 2], [0, 7, 4]]

    def run(rows: list[AttentionRow], hidden: Tensor, tokens: Tensor) -> Tensor:
        metadata = AttentionMetadata.of(rows, block_size=4, device=CPU)
        return drafter.step(hidden, tokens, metadata.position_N, PagedAttention(cache, metadata)).feedback

    rows = [AttentionRow(blocks=table, base=0, count=n) for table, n in zip(blocks, lengths, strict=True)]
    ours = run(rows, torch.cat(states), torch.cat(ids))
    torch.testing.assert_close(ours, torch.cat([output.feedback for output in theirs]), rtol=1e-4, atol=1e-4)
    # Two drafts side by side, then a third behind the second: a tree, compared with two branches.
    fork = torch.eye(2, dtype=torch.bool)
    rows = [
        AttentionRow(blocks=table, base=n, count=2, ancestors=fork) for table, n in zip(blocks, lengths, strict=True)
    ]
    last = torch.stack([output.feedback[-1] for output in theirs])
    ours = run(rows, last.repeat_interleave(2, dim=0), torch.tensor([3, 4, 3, 4]))
    path = torch.tensor([[False, True, True]])
    rows = [
        AttentionRow(blocks=table, base=n, count=1, ancestors=path) for table, n in zip(blocks, lengths, strict=True)
    ]
    third = run(rows, ours[[1, 3]], torch.tensor([5, 5]))
    for i, n in enumerate(lengths):
        for branch, token in enumerate((3, 4)):
            attention = DenseAttention(past[i])
            alone = drafter.step(last[i : i + 1], torch.tensor([token]), torch.tensor([n]), attention).feedback
            torch.testing.assert_close(ours[2 * i + branch : 2 * i + branch + 1], alone, rtol=1e-4, atol=1e-4)
        deeper = DenseAttention(attention.present)
        alone = drafter.step(alone, torch.tensor([5]), torch.tensor([n + 1]), deeper).feedback
        torch.testing.assert_close(third[i : i + 1], alone, rtol=1e-4, atol=1e-4)


def test_attention_has_a_bit_for_every_slot_of_the_largest_tree() -> None:
    assert MOST_IN_TREE <= TREE_BITS
