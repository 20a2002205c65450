"""A drafter through the engine's blocks drafts as it does through dense attention."""

import pytest
import torch
from torch import Tensor

import tiny
from eyas.drafter.attention import DenseAttention
from eyas.drafter.model import Drafter
from eyas.engine.kv_cache.cache import KVCache, PagedAttention
from eyas.engine.speculation.draft import MOST_IN_TREE
from eyas.kernels.attention.metadata import TREE_BITS, AttentionMetadata, AttentionRow

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
    # Two drafts side by side behind each request, then a third behind the second: a tree, against two branches.
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
