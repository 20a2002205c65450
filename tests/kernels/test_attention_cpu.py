"""Compiled attention equals dense attention, and a query's result does not depend on its batch."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from each import each
from eyas.engine.runner.fused_target import fused_target
from eyas.kernels.attention import choose, cpu
from eyas.kernels.attention.choose import choose_backend
from eyas.kernels.attention.cpu import AttentionKernel, load_kernel
from eyas.kernels.attention.dense import DenseBackend
from eyas.kernels.attention.metadata import AttentionMetadata, AttentionRow
from eyas.kernels.linear.packed_linear import pack_linears
from eyas.target.model import Target
from kernels.test_attention import Law, Layer, MakeBackend, ancestors_of, compiled
from kernels.test_recognise import zeros

CPU = torch.device("cpu")
SIZES = [(9, 3, 64, 64), (4, 4, 16, 16), (8, 1, 20, 12), (71, 1, 8, 8), (2, 2, 5, 3)]  # H, G, K, V
LONG_LAWS = [Law(), Law(window=200), Law(window=130, sinks=4), Law(softcap=2.0), Law(window=90, softcap=1.5)]
LONG_LAWS += [Law(sunk=True), Law(window=70, sunk=True)]


@pytest.fixture(autouse=True)
def kernel() -> AttentionKernel:
    found, words = load_kernel()
    if found is None:
        pytest.skip(f"no native code here: {words}")
    return found


def filled(sizes: Sequence[int], blocks: int, block_size: int) -> Layer:
    """A layer that holds random numbers."""
    _, heads, size, value_size = sizes
    return Layer.filled(blocks, block_size, heads=heads, size=size, value_size=value_size, seed=0)


def drawn(sizes: Sequence[int], tokens: int, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    heads, key_heads, key_size, value_size = sizes
    generator = torch.Generator().manual_seed(seed)
    shapes = ((heads, key_size), (key_heads, key_size), (key_heads, value_size))
    q, k, v = (torch.randn(tokens, *shape, generator=generator) for shape in shapes)
    return q, k, v


def run(
    layer: Layer, rows: Sequence[AttentionRow], new: Sequence[Tensor], law: Law, backend: MakeBackend = compiled
) -> Tensor:
    return layer.attend(rows, new, law, backend)


@each("law", LONG_LAWS)
@each("sizes", SIZES)
@each("block_size", [1, 3, 16])
def test_long_contexts_in_scattered_blocks_equal_dense_attention(
    sizes: tuple[int, ...], law: Law, block_size: int, threads: int
) -> None:
    chance = random.Random(block_size)
    blocks = 2400 // block_size
    cache = filled(sizes, blocks, block_size)
    free = chance.sample(range(blocks), blocks)
    rows = []
    for base, count, tree in ((700, 1, False), (0, 2, False), (120, 9, True), (256, 33, False), (390, 64, True)):
        used = -(-(base + count) // block_size)
        row = AttentionRow(blocks=free[:used], base=base, count=count)
        if tree:
            row = replace(row, ancestors=ancestors_of([chance.randint(-1, node - 1) for node in range(count)]))
        rows.append(row)
        free = free[used:]
    new = drawn(sizes, sum(row.count for row in rows))
    other = cache.clone()
    ours, theirs = run(cache, rows, new, law), run(other, rows, new, law, DenseBackend)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    for x, y in zip(cache.both, other.both, strict=True):
        assert torch.equal(x, y)


@each("law", LONG_LAWS)
@each("sizes", SIZES)
def test_a_query_has_the_same_bits_alone_and_in_any_batch(sizes: tuple[int, ...], law: Law, threads: int) -> None:
    """Bases are around chunk ends; the reference is each token alone, in order, on one thread."""
    counts = {0: 5, 119: 24, 127: 3, 128: 1, 250: 17, 509: 64}
    blocks = random.Random(0).sample(range(216), 216)
    before = filled(sizes, 216, 16)
    rows = []
    for index, (base, count) in enumerate(counts.items()):
        rows.append(AttentionRow(blocks=blocks[36 * index : 36 * index + 36], base=base, count=count))
    new = drawn(sizes, sum(counts.values()))
    starts = AttentionMetadata.of(rows, block_size=16, device=CPU).starts
    torch.set_num_threads(1)
    alone = []
    for row, start in zip(rows, starts, strict=False):
        cache = before.clone()
        for i in range(row.count):
            step = [x[start + i : start + i + 1] for x in new]
            alone.append(run(cache, [replace(row, base=row.base + i, count=1)], step, law))
    expected = torch.cat(alone)
    torch.set_num_threads(threads)
    for row, start in zip(rows, starts, strict=False):
        here = slice(start, start + row.count)
        assert torch.equal(run(before.clone(), [row], [x[here] for x in new], law), expected[here]), row.base
    for chosen in ([0, 1, 2], [5, 3], [4, 2, 0, 1], [0, 1, 2, 3, 4]):
        index = torch.cat([torch.arange(starts[i], starts[i] + rows[i].count) for i in chosen])
        together = run(before.clone(), [rows[i] for i in chosen], [x[index] for x in new], law)
        assert torch.equal(together, expected[index]), chosen


@each("law", LONG_LAWS)
def test_a_prompt_has_the_same_bits_in_any_chunks(law: Law, threads: int) -> None:
    sizes, row = SIZES[0], AttentionRow(blocks=random.Random(0).sample(range(40), 40), base=70, count=400)
    before, new = filled(sizes, 40, 16), drawn(sizes, row.count)
    whole = run(before.clone(), [row], new, law)
    cache, pieces, first = before.clone(), [], 0
    for count in (1, 63, 66, 200, 70):
        part = replace(row, base=row.base + first, count=count)
        pieces.append(run(cache, [part], [x[first : first + count] for x in new], law))
        first += count
    assert torch.equal(torch.cat(pieces), whole)


@each("law", [Law(), Law(window=40)])
@each("base", [5, 120, 300])
def test_a_branch_of_a_tree_has_the_bits_of_a_chain(base: int, law: Law) -> None:
    sizes, blocks = SIZES[0], random.Random(0).sample(range(40), 40)
    parents = [-1, 0, 0, 1, 2, 4, 3, 5, 7, 8, 8, 10]
    before, new = filled(sizes, 40, 16), drawn(sizes, len(parents))
    tree = AttentionRow(blocks=blocks, base=base, count=len(parents), ancestors=ancestors_of(parents))
    ours = run(before.clone(), [tree], new, law)
    for leaf in (6, 9, 11):
        path = ancestors_of(parents)[leaf].nonzero().flatten()
        chain = run(
            before.clone(), [AttentionRow(blocks=blocks, base=base, count=len(path))], [x[path] for x in new], law
        )
        assert torch.equal(ours[path], chain)


def test_block_placement_changes_no_bit() -> None:
    sizes, places = SIZES[0], random.Random(0).sample(range(300), 300)
    straight, new = filled(sizes, 300, 1), drawn(sizes, 5)
    crooked = straight.clone()
    for x, y in zip(crooked.both, straight.both, strict=True):
        x[:, places] = y[:, :300]
    outputs = [
        run(cache, [AttentionRow(blocks=blocks, base=295, count=5)], new, Law())
        for cache, blocks in ((straight, range(300)), (crooked, places))
    ]
    assert torch.equal(*outputs)


@each("law", LONG_LAWS[:3])
def test_chunks_of_prompts_may_stand_beside_trees(law: Law) -> None:
    sizes = SIZES[0]
    cache, new = filled(sizes, 120, 16), drawn(sizes, 1 + 90 + 3 + 200)
    rows = [
        AttentionRow(blocks=range(30), base=310, count=1),
        AttentionRow(blocks=range(30, 60), base=40, count=90),
        AttentionRow(blocks=range(60, 90), base=7, count=3, ancestors=ancestors_of([-1, -1, 0])),
        AttentionRow(blocks=range(90, 120), base=0, count=200),
    ]
    theirs = run(cache.clone(), rows, new, law, DenseBackend)
    torch.testing.assert_close(run(cache.clone(), rows, new, law), theirs, rtol=1e-5, atol=1e-5)


def test_little_workspace_takes_several_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, rows = SIZES[0], [AttentionRow(blocks=range(30 * i, 30 * i + 30), base=400, count=7) for i in range(4)]
    cache, new = filled(sizes, 120, 16), drawn(sizes, 28)
    at_once = run(cache.clone(), rows, new, Law())
    monkeypatch.setattr(cpu, "MOST_PARTS_BYTES", 1)
    assert torch.equal(run(cache, rows, new, Law()), at_once)


def test_nan_is_not_hidden() -> None:
    sizes = SIZES[0]
    cache, new = filled(sizes, 30, 16), drawn(sizes, 2)
    new[0][1, 4] = float("nan")
    output = run(cache, [AttentionRow(blocks=range(30), base=300, count=2)], new, Law())
    assert output[1, 4].isnan().all()
    assert output[0].isfinite().all()


def test_queries_and_keys_may_be_strided() -> None:
    sizes = SIZES[0]
    cache, (q, k, v) = filled(sizes, 30, 16), drawn(sizes, 3)
    row = AttentionRow(blocks=range(30), base=300, count=3)
    expected = run(cache.clone(), [row], (q, k, v), Law())
    heads_first = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v)]
    assert torch.equal(run(cache.clone(), [row], heads_first, Law()), expected)
    every_other = [x.repeat_interleave(2, dim=2)[..., ::2] for x in (q, k, v)]
    torch.testing.assert_close(run(cache.clone(), [row], every_other, Law()), expected, rtol=1e-5, atol=1e-5)


@each("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes_use_dense_attention(dtype: torch.dtype) -> None:
    row, new = AttentionRow(blocks=range(4), base=0, count=3), [x.to(dtype) for x in drawn(SIZES[0], 3)]
    layers = [
        Layer(block_size=16, keys=keys.to(dtype), values=values.to(dtype))
        for keys, values in [filled(SIZES[0], 4, 16).both] * 2
    ]
    assert torch.equal(run(layers[0], [row], new, Law()), run(layers[1], [row], new, Law(), DenseBackend))


def test_without_a_compiler_attention_is_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, row, new = filled(SIZES[0], 30, 16), AttentionRow(blocks=range(30), base=300, count=2), drawn(SIZES[0], 2)
    ours = run(cache.clone(), [row], new, Law(), choose_backend)
    assert torch.equal(ours, run(cache.clone(), [row], new, Law()))
    monkeypatch.setattr(choose, "load_kernel", lambda: (None, "nobody compiles here"))
    ours = run(cache.clone(), [row], new, Law(), choose_backend)
    assert torch.equal(ours, run(cache.clone(), [row], new, Law(), DenseBackend))


@torch.inference_mode()
def test_verification_has_the_bits_of_decoding(tiny_target: Target) -> None:
    """Compare a packed target's logits of every draft token, beside another request, with decoding token by token."""
    import copy

    target = replace(tiny_target, model=copy.deepcopy(tiny_target.model))
    if not pack_linears(target.model).linears:
        pytest.skip("no packed linears here")
    fused = fused_target(target)
    assert fused is not None
    generator = torch.Generator().manual_seed(0)
    ids_N = torch.randint(target.facts.vocab_size, (60,), generator=generator)

    def logits_of(passes: Sequence[Sequence[tuple[AttentionRow, Tensor]]]) -> Tensor:
        kv, kept = zeros(fused, blocks=20, block_size=4), []
        for rows in passes:
            metadata = AttentionMetadata.of([row for row, _ in rows], block_size=4, device=CPU)
            logits, _ = fused.forward(torch.cat([ids for _, ids in rows]), choose_backend(metadata), kv, None)
            kept.append(logits[: rows[0][0].count])
        return torch.cat(kept)

    def mine(base: int, count: int) -> tuple[AttentionRow, Tensor]:
        return AttentionRow(blocks=range(10), base=base, count=count), ids_N[base : base + count]

    beside = AttentionRow(blocks=range(10, 20), base=0, count=3), ids_N[:3]
    plain = logits_of([[mine(0, 20)], *([mine(i, 1)] for i in range(20, 32))])
    verified = logits_of([[mine(0, 20)], [mine(20, 5), beside], [mine(25, 7)]])
    assert torch.equal(plain, verified)
