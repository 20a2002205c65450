"""On a GPU the kernel equals dense attention, and targets that use it compute what they compute alone.

The first half also runs on a CPU in Triton's interpreter: TRITON_INTERPRET=1, with `--noconftest` against the skip.
"""

import random

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.test_target_runner import ALWAYS, WINDOW, assert_serves, built
from eyas.kernels.attention.backend import AttentionBackend
from eyas.kernels.attention.dense import DenseBackend
from eyas.kernels.attention.metadata import AttentionMetadata, AttentionRow
from kernels.test_attention import BLOCK_SIZE, BLOCKS, LAWS, Law, Layer, World, ancestors_of

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16  # the interpreter cannot multiply bfloat16


def by_triton(metadata: AttentionMetadata, *, sinks: int = 0) -> AttentionBackend:
    from eyas.kernels.attention.triton import TritonBackend

    return TritonBackend(metadata, sinks=sinks)


def world(seed: int, law: Law, dtype: torch.dtype = torch.float32) -> World:
    made = World(seed, law, device=DEVICE, backend=by_triton)
    made.dtype = dtype
    if dtype != torch.float32:
        made.tolerance = 0.03
        made.held = [(k.to(dtype), v.to(dtype)) for k, v in made.held]
    return made


@pytest.mark.parametrize("law", LAWS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("seed", range(2))
def test_random_rows_attend_as_each_request_alone(seed: int, law: Law, dtype: torch.dtype) -> None:
    world(seed, law, dtype).seq(passes=6)


@pytest.mark.parametrize(
    "law", [Law(), Law(window=50), Law(window=70, sinks=4), Law(softcap=1.0), Law(sunk=True)], ids=str
)
def test_prompts_beside_decoding_and_trees(law: Law) -> None:
    made = world(0, law)
    made.tables = [list(range(0, 30)), list(range(59, 29, -1))]
    tree = ancestors_of([-1, 0, 0, 1, 2])
    first, second = made.tables
    made.check([(0, AttentionRow(blocks=first, base=0, count=80)), (1, AttentionRow(blocks=second, base=0, count=2))])
    made.check(
        [
            (1, AttentionRow(blocks=second, base=2, count=5, ancestors=tree)),
            (0, AttentionRow(blocks=first, base=80, count=1)),
        ]
    )
    made.check(
        [
            (1, AttentionRow(blocks=second, base=2, count=66)),
            (0, AttentionRow(blocks=first, base=81, count=5, ancestors=tree)),
        ]
    )


@pytest.mark.parametrize(
    ("heads", "groups", "size", "value_size"),
    [(9, 3, 64, 64), (8, 1, 80, 80), (4, 4, 24, 16), (4, 1, 576, 512)],  # the last one is latent attention
)
@pytest.mark.parametrize("count", [1, 4, 13])
@pytest.mark.parametrize("law", [Law(), Law(window=300, sinks=4), Law(sunk=True)], ids=str)
def test_long_contexts_are_split_and_merged(
    heads: int, groups: int, size: int, value_size: int, count: int, law: Law
) -> None:
    base, block = 1000, 16
    generator = torch.Generator().manual_seed(0)
    blocks = random.Random(0).sample(range(90), 90)
    rows = [AttentionRow(blocks=blocks[:70], base=base, count=count), AttentionRow(blocks=blocks[70:], base=7, count=1)]

    def draw(tokens: int, several: int, width: int) -> Tensor:
        return torch.randn(tokens, several, width, generator=generator).to(DEVICE)

    layer = Layer(
        block_size=block,
        keys=draw(90 * block, groups, size).transpose(0, 1).contiguous(),
        values=draw(90 * block, groups, value_size).transpose(0, 1).contiguous(),
    )
    new = draw(count + 1, heads, size), draw(count + 1, groups, size), draw(count + 1, groups, value_size)
    ours, theirs = (layer.attend(rows, new, law, backend) for backend in (by_triton, DenseBackend))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_keys_beyond_what_32_bits_count_are_found() -> None:
    """The last of three heads starts 2^31 elements after the first, as in a cache of millions of tokens."""
    groups, size, block, stride = 3, 16, 16, 2**30 + 64
    numbers = 2 * stride + 8 * block * size
    if DEVICE.type == "cuda":
        memory = torch.empty(numbers, dtype=torch.float16, device=DEVICE)
    else:  # the system zeroes memory on first touch, and almost none is touched
        memory = torch.from_numpy(np.zeros(numbers, dtype=np.float16))
    shape, strides = (groups, 4 * block, size), (stride, size, 1)
    far = Layer(
        block_size=block,
        keys=memory.as_strided(shape, strides),
        values=memory.as_strided(shape, strides, storage_offset=4 * block * size),
    )
    near = Layer.filled(4, block, heads=groups, size=size, value_size=size)
    near = Layer(block_size=block, keys=near.keys.to(DEVICE).half(), values=near.values.to(DEVICE).half())
    for x, y in zip(far.both, near.both, strict=True):
        x.copy_(y)
    generator = torch.Generator().manual_seed(0)
    new = [torch.randn(2, several, size, generator=generator).to(DEVICE).half() for several in (6, groups, groups)]
    rows = [AttentionRow(blocks=(2, 0, 3), base=40, count=2)]
    assert torch.equal(far.attend(rows, new, Law(), by_triton), near.attend(rows, new, Law(), by_triton))


@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("law", [Law(), Law(window=600, sinks=4)], ids=str)
def test_a_long_row_among_many_is_split_and_the_others_stay_whole(count: int, law: Law) -> None:
    from eyas.kernels.attention import triton as kernels

    groups, size, block, many = 3, 16, 16, 9 if DEVICE.type == "cpu" else 100
    bases = [(3, 1100, 200, 508, 512, 513 - count, 2000)[row % 7] for row in range(many)]
    longest = max(bases) + count
    assert kernels._splits(many * groups, longest, DEVICE) == (kernels.LONG_ROW_SPLITS, kernels.LONG_ROW)
    generator, chance = torch.Generator().manual_seed(0), random.Random(0)
    blocks = longest // block + 1  # rows may share blocks they only read; each has its own tail
    tails = [[blocks + 2 * row, blocks + 2 * row + 1] for row in range(many)]
    rows = [
        AttentionRow(blocks=[*chance.sample(range(blocks), base // block), *tail], base=base, count=count)
        for base, tail in zip(bases, tails, strict=True)
    ]

    def draw(tokens: int, several: int) -> Tensor:
        return torch.randn(tokens, several, size, generator=generator).to(DEVICE)

    slots = (blocks + 2 * many) * block
    layer = Layer(
        block_size=block,
        keys=draw(slots, groups).transpose(0, 1).contiguous(),
        values=draw(slots, groups).transpose(0, 1).contiguous(),
    )
    new = draw(many * count, 3 * groups), draw(many * count, groups), draw(many * count, groups)
    ours, theirs = (layer.attend(rows, new, law, backend) for backend in (by_triton, DenseBackend))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def empty() -> Layer:
    """Memory for keys and values, followed by a null block."""
    keys, values = torch.zeros(2, 2, (BLOCKS + 1) * BLOCK_SIZE, 8, device=DEVICE)
    return Layer(block_size=BLOCK_SIZE, keys=keys, values=values)


def padded(table: Tensor, base: Tensor, live: Tensor) -> AttentionMetadata:
    """Rows of at most three tokens."""
    return AttentionMetadata.padded(table, base, live, count=3, block_size=BLOCK_SIZE, null_slot=BLOCKS * BLOCK_SIZE)


def test_padded_rows_answer_live_tokens_and_stay_finite() -> None:
    layer = empty()
    generator = torch.Generator().manual_seed(0)
    new = [torch.randn(12, heads, 8, generator=generator).to(DEVICE) for heads in (6, 2, 2)]
    table = torch.randperm(BLOCKS, generator=generator)[:20].view(4, 5).int()
    base, live = torch.tensor([9, 17, 0, 3], dtype=torch.int32), torch.tensor([3, 1, 0, 2], dtype=torch.int32)
    rows = [
        AttentionRow(blocks=blocks, base=b, count=n)
        for blocks, b, n in zip(table.tolist(), base.tolist(), live.tolist(), strict=True)
        if n
    ]
    ours = layer.attend(padded(*(x.to(DEVICE) for x in (table, base, live))), new, Law(), by_triton)
    assert ours.isfinite().all()
    real = (torch.arange(3) < live[:, None]).flatten().to(DEVICE)
    theirs = layer.attend(rows, [x[real] for x in new], Law(), DenseBackend)
    torch.testing.assert_close(ours[real], theirs, rtol=1e-4, atol=1e-5)


def ragged(
    table: Tensor, base: Tensor, start: Tensor, count: int, live: Tensor | None = None, longest: int | None = None
) -> AttentionMetadata:
    null_slot = BLOCKS * BLOCK_SIZE
    return AttentionMetadata.ragged(
        table, base, start, count=count, live_R=live, block_size=BLOCK_SIZE, null_slot=null_slot, longest=longest
    )


RAGGED = {
    "prompts": ((0, 0, 0), (7, 20, 3), 30),
    "chunks behind prefixes": ((13, 0, 25, 4), (11, 1, 20, 2), 34),
    "empty rows": ((0, 9, 0, 5, 0), (0, 6, 0, 1, 0), 16),
    "no padding": ((2, 3), (5, 11), 16),
    "one token each": ((19, 0, 31), (1, 1, 1), 3),
    "one row": ((1,), (40,), 64),
    "nothing": ((0, 0), (0, 0), 8),
}
"""Slots before the tail and new tokens of each row; tokens of the pass."""


@pytest.mark.parametrize(
    "law", [Law(), Law(window=5), Law(window=6, sinks=3), Law(softcap=1.5), Law(sunk=True)], ids=str
)
@pytest.mark.parametrize("rows", RAGGED.values(), ids=RAGGED.keys())
@pytest.mark.parametrize("heads", [2, 6])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("bounded", [False, True])
def test_ragged_rows_answer_live_tokens_and_stay_finite(
    rows: tuple[tuple[int, ...], tuple[int, ...], int], law: Law, heads: int, dtype: torch.dtype, bounded: bool
) -> None:
    bases, counts, count = rows
    generator = torch.Generator().manual_seed(0)
    filled = Layer.filled(BLOCKS + 1, BLOCK_SIZE, heads=2, size=8, value_size=8)
    layer = Layer(block_size=BLOCK_SIZE, keys=filled.keys.to(DEVICE, dtype), values=filled.values.to(DEVICE, dtype))
    alone = layer.clone()
    new = [torch.randn(count, several, 8, generator=generator).to(DEVICE, dtype) for several in (heads, 2, 2)]
    table = torch.randperm(BLOCKS, generator=generator)[: 12 * len(bases)].view(-1, 12).int()
    start = torch.tensor([0, *counts]).cumsum(0).int()
    base = torch.tensor(bases, dtype=torch.int32)
    longest = max(counts) + 1 if bounded else None
    numbers = [x.to(DEVICE) for x in (table, base, start)]
    ours = layer.attend(ragged(*numbers, count, longest=longest), new, law, by_triton)
    assert ours.isfinite().all()
    asked = [
        AttentionRow(blocks=blocks, base=b, count=n)
        for blocks, b, n in zip(table.tolist(), bases, counts, strict=True)
        if n
    ]
    real = slice(0, int(start[-1]))
    if asked:
        theirs = alone.attend(asked, [x[real] for x in new], law, DenseBackend)
        tolerance = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.03, "atol": 0.03}
        torch.testing.assert_close(ours[real], theirs, **tolerance)
    null = slice(BLOCKS * BLOCK_SIZE, None)
    for x, y in zip(layer.both, alone.both, strict=True):
        x[:, null] = y[:, null] = 0
        assert torch.equal(x, y), "nothing else is written"


def test_rows_of_many_tiles_and_dead_tokens_within_rows() -> None:
    """Heads that share keys split a row into several tiles; its last tokens may not belong to the drafter."""
    generator = torch.Generator().manual_seed(0)
    layer = empty()
    new = [torch.randn(100, several, 8, generator=generator).to(DEVICE) for several in (8, 2, 2)]
    table = torch.randperm(BLOCKS, generator=generator).view(4, 15).int()
    base, counts, lives = (3, 10, 0, 20), (40, 1, 30, 17), (39, 0, 30, 16)
    start = torch.tensor([0, *counts]).cumsum(0)
    numbers = [torch.tensor(x).int().to(DEVICE) for x in (base, start.tolist(), lives)]
    ours = layer.attend(ragged(table.to(DEVICE), *numbers[:2], 100, numbers[2]), new, Law(window=33), by_triton)
    assert ours.isfinite().all()
    rows = [
        AttentionRow(blocks=blocks, base=b, count=n)
        for blocks, b, n in zip(table.tolist(), base, lives, strict=True)
        if n
    ]
    real = [int(s) + q for s, n in zip(start, lives, strict=False) for q in range(n)]
    theirs = layer.attend(rows, [x[real] for x in new], Law(window=33), DenseBackend)
    torch.testing.assert_close(ours[real], theirs, rtol=1e-4, atol=1e-5)


def test_a_captured_pass_serves_other_numbers() -> None:
    layer = empty()
    table = torch.zeros(4, 12, dtype=torch.int32, device=DEVICE)
    base, live = torch.zeros(2, 4, dtype=torch.int32, device=DEVICE)
    new = [torch.zeros(12, heads, 8, device=DEVICE) for heads in (6, 2, 2)]

    def step() -> Tensor:
        return layer.attend(padded(table, base, live), new, Law())

    step()
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        step()
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    chance, generator = random.Random(0), torch.Generator().manual_seed(0)
    for _ in range(5):
        blocks = torch.tensor(chance.sample(range(BLOCKS), 48), dtype=torch.int32).view(4, 12)
        bases, lives = [chance.randint(0, 44) for _ in range(4)], [chance.randint(0, 3) for _ in range(4)]
        table.copy_(blocks)
        base.copy_(torch.tensor(bases))
        live.copy_(torch.tensor(lives))
        for x in new:
            x.copy_(torch.randn(x.shape, generator=generator))
        graph.replay()
        rows = [
            AttentionRow(blocks=p, base=b, count=n) for p, b, n in zip(blocks.tolist(), bases, lives, strict=True) if n
        ]
        if not rows:
            continue
        real = (torch.arange(3) < torch.tensor(lives)[:, None]).flatten().to(DEVICE)
        theirs = layer.attend(rows, [x[real] for x in new], Law(), DenseBackend)
        torch.testing.assert_close(captured[real], theirs, rtol=1e-4, atol=1e-5)


def test_a_captured_pass_over_ragged_rows_serves_other_numbers() -> None:
    layer, count = empty(), 40
    table = torch.zeros(4, 15, dtype=torch.int32, device=DEVICE)
    base, start = (torch.zeros(n, dtype=torch.int32, device=DEVICE) for n in (4, 5))
    new = [torch.zeros(count, heads, 8, device=DEVICE) for heads in (6, 2, 2)]

    def step() -> Tensor:
        return layer.attend(ragged(table, base, start, count), new, Law())

    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        step()
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    chance, generator = random.Random(0), torch.Generator().manual_seed(0)
    for _ in range(5):
        blocks = torch.tensor(chance.sample(range(BLOCKS), 60), dtype=torch.int32).view(4, 15)
        bases, counts = [chance.randint(0, 44) for _ in range(4)], [chance.randint(0, 10) for _ in range(4)]
        table.copy_(blocks)
        base.copy_(torch.tensor(bases))
        start.copy_(torch.tensor([0, *counts]).cumsum(0))
        for x in new:
            x.copy_(torch.randn(x.shape, generator=generator))
        graph.replay()
        assert captured.isfinite().all()
        rows = [
            AttentionRow(blocks=p, base=b, count=n) for p, b, n in zip(blocks.tolist(), bases, counts, strict=True) if n
        ]
        total = sum(counts)
        theirs = layer.attend(rows, [x[:total] for x in new], Law(), DenseBackend)
        torch.testing.assert_close(captured[:total], theirs, rtol=1e-4, atol=1e-5)


@pytest.fixture
def _exact_float32() -> None:
    torch.set_float32_matmul_precision("highest")


@pytest.mark.usefixtures("_exact_float32")
@pytest.mark.parametrize("family", ["llama", "qwen3", "phi", "gpt2", "qwen3_moe", "gpt_oss", *ALWAYS])
def test_a_target_through_blocks_computes_what_it_computes_alone(family: str) -> None:
    target = built(family, **({"sliding_window": WINDOW} if family in ALWAYS else {}))
    target.model.to(DEVICE)
    assert_serves(target)
