"""On a GPU the kernel attends as dense attention does, and targets through it compute what they compute alone.

The first half also runs on a CPU in Triton's interpreter: TRITON_INTERPRET=1, with `--noconftest` against the skip.
"""

import random

import pytest
import torch
from torch import Tensor

from engine.test_target_runner import ALWAYS, WINDOW, assert_serves, built
from eyas.kernels.attention.dense import PagedAttention
from eyas.kernels.attention.metadata import AttentionMetadata, AttentionRow, KVCache
from kernels.test_attention import LAWS, PAGE_SIZE, PAGES, Law, World, ancestors_of

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16  # the interpreter has no products of bfloat16


def world(seed: int, law: Law, dtype: torch.dtype = torch.float32) -> World:
    made = World(seed, law, device=DEVICE, backend="triton")
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


@pytest.mark.parametrize("law", [Law(), Law(window=50), Law(window=70, sinks=4), Law(softcap=1.0)], ids=str)
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


@pytest.mark.parametrize(("heads", "groups", "size", "value_size"), [(9, 3, 64, 64), (8, 1, 80, 80), (4, 4, 24, 16)])
@pytest.mark.parametrize("count", [1, 4, 13])
@pytest.mark.parametrize("law", [Law(), Law(window=300, sinks=4)], ids=str)
def test_long_contexts_are_split_and_merged(
    heads: int, groups: int, size: int, value_size: int, count: int, law: Law
) -> None:
    base, block = 1000, 16
    generator = torch.Generator().manual_seed(0)
    cache = KVCache(blocks=90, block_size=block)
    blocks = random.Random(0).sample(range(90), 90)
    rows = [AttentionRow(blocks=blocks[:70], base=base, count=count), AttentionRow(blocks=blocks[70:], base=7, count=1)]
    layout = AttentionMetadata.of(rows, block_size=block, device=DEVICE)

    def draw(tokens: int, several: int, width: int) -> Tensor:
        return torch.randn(tokens, several, width, generator=generator).to(DEVICE)

    cache.layers[0] = (
        draw(cache.scrap + block, groups, size).transpose(0, 1).contiguous(),
        draw(cache.scrap + block, groups, value_size).transpose(0, 1).contiguous(),
    )
    new = draw(count + 1, heads, size), draw(count + 1, groups, size), draw(count + 1, groups, value_size)
    ours, theirs = (
        PagedAttention(cache, layout, window=law.window, sinks=law.sinks, backend=backend)(0, *new)
        for backend in ("triton", "dense")
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tree", [None, [-1, 0, 0]])
def test_padded_rows_answer_live_tokens_and_stay_finite(tree: list[int] | None) -> None:
    ancestors = None if tree is None else ancestors_of(tree)
    cache = KVCache(blocks=PAGES, block_size=PAGE_SIZE)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(12, heads, 8, generator=generator).to(DEVICE) for heads in (6, 2, 2))
    table = torch.randperm(PAGES, generator=generator)[:20].view(4, 5).int()
    base, seq = torch.tensor([9, 17, 0, 3], dtype=torch.int32), torch.tensor([3, 1, 0, 2], dtype=torch.int32)
    rows = [
        AttentionRow(blocks=blocks, base=b, count=n, ancestors=None if ancestors is None else ancestors[:n, :n])
        for blocks, b, n in zip(table.tolist(), base.tolist(), seq.tolist(), strict=True)
        if n
    ]
    padded = AttentionMetadata.padded(
        *(x.to(DEVICE) for x in (table, base, seq)),
        count=3,
        cache=cache,
        ancestors_RQT=None if ancestors is None else ancestors[None].to(DEVICE),
    )
    ours = PagedAttention(cache, padded, backend="triton")(0, q, k, v)
    assert ours.isfinite().all()
    real = (torch.arange(3) < seq[:, None]).flatten().to(DEVICE)
    layout = AttentionMetadata.of(rows, block_size=PAGE_SIZE, device=DEVICE)
    theirs = PagedAttention(cache, layout, backend="dense")(0, q[real], k[real], v[real])
    torch.testing.assert_close(ours[real], theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tree", [None, [-1, 0, 0]])
def test_a_recorded_pass_serves_other_numbers(tree: list[int] | None) -> None:
    ancestors = None if tree is None else ancestors_of(tree)[None].to(DEVICE)
    cache = KVCache(blocks=PAGES, block_size=PAGE_SIZE)
    table = torch.zeros(4, 12, dtype=torch.int32, device=DEVICE)
    base, seq = torch.zeros(2, 4, dtype=torch.int32, device=DEVICE)
    q, k, v = (torch.zeros(12, heads, 8, device=DEVICE) for heads in (6, 2, 2))

    def step() -> Tensor:
        layout = AttentionMetadata.padded(table, base, seq, count=3, cache=cache, ancestors_RQT=ancestors)
        return PagedAttention(cache, layout)(0, q, k, v)

    step()
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        step()
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = step()
    chance, generator = random.Random(0), torch.Generator().manual_seed(0)
    for _ in range(5):
        blocks = torch.tensor(chance.sample(range(PAGES), 48), dtype=torch.int32).view(4, 12)
        bases, seqs = [chance.randint(0, 44) for _ in range(4)], [chance.randint(0, 3) for _ in range(4)]
        table.copy_(blocks)
        base.copy_(torch.tensor(bases))
        seq.copy_(torch.tensor(seqs))
        for x in (q, k, v):
            x.copy_(torch.randn(x.shape, generator=generator))
        graph.replay()
        rows = [
            AttentionRow(blocks=p, base=b, count=n, ancestors=None if ancestors is None else ancestors[0, :n, :n].cpu())
            for p, b, n in zip(blocks.tolist(), bases, seqs, strict=True)
            if n
        ]
        if not rows:
            continue
        real = (torch.arange(3) < torch.tensor(seqs)[:, None]).flatten().to(DEVICE)
        layout = AttentionMetadata.of(rows, block_size=PAGE_SIZE, device=DEVICE)
        theirs = PagedAttention(cache, layout, backend="dense")(0, q[real], k[real], v[real])
        torch.testing.assert_close(recorded[real], theirs, rtol=1e-4, atol=1e-5)


@pytest.fixture
def _exact_float32() -> None:
    torch.set_float32_matmul_precision("highest")


@pytest.mark.usefixtures("_exact_float32")
@pytest.mark.parametrize("family", ["llama", "qwen3", "phi", "gpt2", "qwen3_moe", *ALWAYS])
def test_a_target_through_blocks_computes_what_it_computes_alone(family: str) -> None:
    target = built(family, **({"sliding_window": WINDOW} if family in ALWAYS else {}))
    target.model.to(DEVICE)
    assert_serves(target)
