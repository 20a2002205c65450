"""On a GPU 8-bit keys and values are written and read as by torch, and drafts do not change answers.

The first half also runs on a CPU in Triton's interpreter: TRITON_INTERPRET=1, with `--noconftest` against the skip.
"""

import random
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace

import pytest
import torch

from eyas.drafter.model import Drafter
from eyas.engine.config import EngineConfig
from eyas.engine.engine import Engine
from eyas.engine.request import Request, Speculation
from eyas.engine.runner.fused_target import fused_target
from eyas.kernels.attention.dense import DenseBackend
from eyas.kernels.attention.kv_dtype import FP8, as_stored
from eyas.kernels.attention.metadata import AttentionMetadata, AttentionRow
from eyas.sampling import Sampling
from eyas.target.model import Target
from kernels.test_attention import Law, Layer, ancestors_of
from tiny import language

pytestmark = pytest.mark.gpu
ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
NEW = 16


def by_triton(metadata: AttentionMetadata, *, sinks: int = 0):  # type: ignore[no-untyped-def]
    from eyas.kernels.attention.triton import TritonBackend

    return TritonBackend(metadata, sinks=sinks)


def filled(blocks: int, block: int, groups: int, size: int) -> Layer:
    layer = Layer.filled(blocks, block, heads=groups, size=size, value_size=size)
    return Layer(block_size=block, keys=layer.keys.to(DEVICE).to(FP8), values=layer.values.to(DEVICE).to(FP8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("heads", "groups", "size"), [(9, 3, 64), (8, 2, 128), (4, 4, 24)])
@pytest.mark.parametrize("count", [1, 5, 66])
@pytest.mark.parametrize("law", [Law(), Law(window=300, sinks=4), Law(softcap=1.5), Law(sunk=True)], ids=str)
def test_the_kernel_reads_what_dense_attention_reads(
    law: Law, count: int, heads: int, groups: int, size: int, dtype: torch.dtype
) -> None:
    """A long row, which is split among programs, and a short one; queries of any magnitude."""
    block, base = 16, 1000 if count < 66 else 40
    generator, blocks = torch.Generator().manual_seed(0), random.Random(0).sample(range(90), 90)
    rows = [AttentionRow(blocks=blocks[:70], base=base, count=count), AttentionRow(blocks=blocks[70:], base=7, count=1)]
    layer = filled(90, block, groups, size)
    q, k, v = (torch.randn(count + 1, several, size, generator=generator) for several in (heads, groups, groups))
    new = [x.to(DEVICE, dtype) for x in (q * torch.logspace(-3, 0.5, count + 1)[:, None, None], k, v)]
    alone = layer.clone()
    ours = layer.attend(rows, new, law, by_triton)
    theirs = alone.attend(rows, [x.float() for x in new], law, DenseBackend)
    assert ours.dtype == dtype
    tolerance = 1e-4 if dtype == torch.float32 else 0.01
    torch.testing.assert_close(ours.float(), theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_trees_see_their_ancestors(dtype: torch.dtype) -> None:
    generator, layer = torch.Generator().manual_seed(0), filled(40, 16, 3, 64)
    rows = [
        AttentionRow(blocks=range(20), base=200, count=5, ancestors=ancestors_of([-1, 0, 0, 1, 2])),
        AttentionRow(blocks=range(20, 40), base=9, count=2),
    ]
    new = [torch.randn(7, several, 64, generator=generator).to(DEVICE, dtype) for several in (9, 3, 3)]
    alone = layer.clone()
    ours = layer.attend(rows, new, Law(), by_triton)
    theirs = alone.attend(rows, [x.float() for x in new], Law(), DenseBackend)
    tolerance = 1e-4 if dtype == torch.float32 else 0.01
    torch.testing.assert_close(ours.float(), theirs, rtol=tolerance, atol=tolerance)


def test_queries_beyond_float16_are_scored() -> None:
    """Possible in bfloat16: the kernel multiplies in float16 where keys have 8 bits."""
    layer = filled(4, 16, 1, 64)
    q, k, v = (torch.randn(2, several, 64).to(DEVICE, torch.bfloat16) for several in (2, 1, 1))
    new = [q * torch.tensor([1e6, 1e-20], device=DEVICE, dtype=q.dtype)[:, None, None], k, v]
    rows = [AttentionRow(blocks=(0, 1), base=20, count=1), AttentionRow(blocks=(2, 3), base=20, count=1)]
    alone = layer.clone()
    ours = layer.attend(rows, new, Law(), by_triton)
    theirs = alone.attend(rows, [x.float() for x in new], Law(), DenseBackend)
    torch.testing.assert_close(ours.float(), theirs, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_keys_and_values_are_stored_as_torch_rounds_them(dtype: torch.dtype) -> None:
    """Too large numbers saturate. The interpreter rounds incorrectly, so it gets numbers that need no rounding."""
    from eyas.kernels.llama.block_triton import rotate

    tokens, heads, groups, size, slots = 50, 6, 2, 64, 64
    generator = torch.Generator().manual_seed(0)
    size_of = torch.logspace(-4, 3.5, tokens)[:, None]
    qkv = torch.randn(tokens, (heads + 2 * groups) * size, generator=generator) * size_of
    if not ON_GPU:
        qkv = qkv.clamp(-448, 448).to(FP8).float()
    qkv = qkv.to(DEVICE, dtype)
    # A rotation by 90 degrees moves numbers without rounding.
    cos, sin = (torch.zeros(tokens, size, device=DEVICE, dtype=dtype) for _ in range(2))
    sin += 1
    slot = torch.randperm(slots, generator=generator)[:tokens].to(DEVICE)
    memory = [torch.zeros(groups, slots, size, device=DEVICE).to(FP8) for _ in range(2)]
    q = qkv.new_empty(tokens, heads, size)
    rotate(qkv, cos, sin, slot, None, q, *memory)
    parts = qkv.view(tokens, -1, size)
    k, v = parts[:, heads : heads + groups], parts[:, heads + groups :]
    turned = torch.cat([-k[..., size // 2 :], k[..., : size // 2]], dim=-1)
    for found, given in zip(memory, (turned, v), strict=True):
        expected = as_stored(given, FP8).transpose(0, 1).float()
        assert torch.equal(found.float()[:, slot], expected)
        assert found.float().abs().max() == 448


def answers(
    engine: Engine, prompts: Mapping[int, tuple[int, ...]], depth: int, sampling: Sampling | None = None
) -> dict[int, list[int]]:
    """Answers by seed."""
    speculation = Speculation(mode="fixed", depth=depth) if depth else Speculation(mode="off")
    seeds, said = dict[int, int](), dict[int, list[int]]()
    for seed, prompt in prompts.items():
        asked = Request(
            prompt=prompt, sampling=sampling or Sampling(), max_new_tokens=NEW, speculation=speculation, seed=seed
        )
        seeds[engine.submit(asked)] = seed
        said[seed] = []
    while engine.busy:
        for piece in engine.step():
            said[seeds[piece.key]] += piece.tokens
    return said


def some_prompts(count: int) -> dict[int, tuple[int, ...]]:
    rows = language(count, 40, torch.Generator().manual_seed(5)).tolist()
    return {index: tuple(row[: 3 + index]) for index, row in enumerate(rows)}


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8)], ids=["greedy", "sampled"])
@pytest.mark.parametrize(("dtype", "least"), [(torch.float32, 39), (torch.bfloat16, 34)])
def test_drafts_change_nothing(
    dtype: torch.dtype, least: int, sampling: Sampling, target: Target, drafter: Drafter
) -> None:
    """Up to near-ties, of which 8 bits make some more in bfloat16: products of other numbers of rows round
    differently, and where a key lies between two numbers of 8 bits that decides which it becomes."""
    loaded = replace(target, model=deepcopy(target.model).to(dtype))
    assert type(fused_target(loaded)).__name__ == "TritonLlama", "the fused pass must be the one that is tested"
    options = EngineConfig(max_num_seqs=32, max_model_len=128, kv_cache_dtype="fp8")
    engine, prompts = Engine(loaded, deepcopy(drafter).to(dtype), config=options), some_prompts(32)
    assert engine.core.runner.capture.enabled, "steps are captured"
    alone: dict[int, list[int]] = {}
    for seed, prompt in prompts.items():
        alone |= answers(engine, {seed: prompt}, 0, sampling)
    for depth in (0, 3):
        same = 0
        for count in (1, 7, 32):
            some = answers(engine, {seed: prompts[seed] for seed in range(count)}, depth, sampling)
            same += sum(said == alone[seed] for seed, said in some.items())
        assert same >= least, f"at depth {depth} {same} of 40 answers are the same"
    assert engine.stats.accepted > 0
    assert engine._drafting is not None
    for cache in (engine.model_runner.cache, engine._drafting.cache):
        assert {x.dtype for pair in cache.layers.values() for x in pair} == {FP8}


def test_chunks_and_the_prefix_cache_change_nothing(target: Target, drafter: Drafter) -> None:
    """Prompts read the same rounded keys as decoding."""
    prompts, said = some_prompts(12), []
    for tokens, prefix_cache in ((512, False), (16, False), (512, True)):
        options = EngineConfig(
            max_num_seqs=16,
            max_model_len=128,
            max_num_batched_tokens=tokens,
            prefix_cache=prefix_cache,
            kv_cache_dtype="fp8",
        )
        engine = Engine(target, drafter, config=options)
        answers(engine, prompts, 3)  # the second time with prefix cache hits
        said.append(answers(engine, prompts, 3))
    for other in said[1:]:
        same = sum(other[seed] == tokens for seed, tokens in said[0].items())
        assert same >= 11, f"{same} of 12 answers are the same"


def test_as_many_bytes_hold_more_tokens(target: Target, drafter: Drafter) -> None:
    loaded, small = replace(target, model=deepcopy(target.model).bfloat16()), deepcopy(drafter).bfloat16()
    engines = {
        kind: Engine(
            loaded,
            small,
            config=EngineConfig(max_num_seqs=4096, max_model_len=128, memory=2**20, kv_cache_dtype=kind),
        )
        for kind in ("auto", "fp8")
    }
    wide, narrow = engines["auto"], engines["fp8"]
    assert wide.budget.bytes_per_block == 2 * narrow.budget.bytes_per_block
    assert narrow.budget.blocks in (2 * wide.budget.blocks, 2 * wide.budget.blocks + 1)
    assert narrow.model_runner.cache.bytes <= 2**20 + narrow.budget.bytes_per_block
