"""8-bit keys and values: answers depend on the request alone, and more tokens fit."""

from itertools import pairwise
from typing import Any

import pytest
import torch

from each import each
from engine.common import (
    OFF,
    Prompts,
    at_depth,
    bytes_for,
    options,
    request,
    requests,
    run,
    run_preempted,
    tokens_of,
)
from engine.round_engines import round_engine
from eyas.drafter.attention import attend_densely
from eyas.drafter.model import Drafter
from eyas.engine.config import EngineConfig, require_kv_cache_dtype
from eyas.engine.engine import Engine
from eyas.engine.kv_cache.cache import KVCache, PagedAttention
from eyas.engine.request import Request, Speculation
from eyas.engine.speculation.draft import Tree
from eyas.errors import UserError
from eyas.kernels.attention.kv_dtype import FP8, as_stored
from eyas.kernels.attention.metadata import AttentionMetadata, AttentionRow
from eyas.sampling import Sampling
from eyas.target.model import Target
from tiny import drafter_config, random_drafter

CPU = torch.device("cpu")


def narrow(**changes: Any) -> EngineConfig:
    return options(kv_cache_dtype="fp8", **changes)


def asked(prompts: Prompts, speculation: Speculation, sampling: Sampling | None = None) -> list[Request]:
    return [
        request(prompt, speculation=speculation, seed=seed, sampling=sampling or Sampling())
        for seed, prompt in enumerate(prompts)
    ]


@pytest.fixture(scope="module")
def plainly(target: Target, prompts: Prompts) -> list[tuple[int, ...]]:
    """The answer of each request alone, without drafts."""
    return tokens_of(run(Engine(target, None, config=narrow(max_num_seqs=1)), asked(prompts, OFF)))


# --- what is stored ------------------------------------------------------------------------------------------------


def test_numbers_are_rounded_to_the_nearest_and_saturate() -> None:
    given = torch.tensor([1.0, 1.0625, 1.07, -17.0, 447.0, 1e4, -1e30, 2.0**-9, 2.0**-11, 0.0])
    kept = torch.tensor([1.0, 1.0, 1.125, -16.0, 448.0, 448.0, -448.0, 2.0**-9, 0.0, 0.0])
    assert torch.equal(as_stored(given, FP8).float(), kept)
    assert as_stored(given, torch.float32) is given


@each("dtype", [torch.float32, torch.bfloat16])
def test_a_pass_reads_what_it_has_written(dtype: torch.dtype) -> None:
    """Keys of the pass itself are rounded like those of earlier passes."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(9, heads, 8, generator=generator).to(dtype) for heads in (6, 2, 2))
    keys, values = (as_stored(x, FP8).float() for x in (k, v))
    expected = attend_densely(q.float(), keys, values, torch.ones(9, 9, dtype=torch.bool).tril())
    for cuts in ((0, 9), (0, 4, 5, 9)):
        cache, found = KVCache(blocks=6, block_size=4, dtype=FP8), []
        for base, end in pairwise(cuts):
            rows = [AttentionRow(blocks=(5, 1, 3), base=base, count=end - base)]
            attend = PagedAttention(cache, AttentionMetadata.of(rows, block_size=4, device=CPU))
            found.append(attend(0, q[base:end], k[base:end], v[base:end]))
        assert cache.layers[0][0].dtype == FP8
        tolerance = 1e-5 if dtype == torch.float32 else 0.02
        torch.testing.assert_close(torch.cat(found).float(), expected, rtol=tolerance, atol=tolerance)


def test_a_row_does_not_depend_on_its_batch() -> None:
    """Bit for bit, where there is a compiler."""
    from eyas.kernels.attention.cpu import load_kernel

    if load_kernel()[0] is None:
        pytest.skip("no compiler: dense attention is the same up to rounding")
    generator = torch.Generator().manual_seed(0)
    cache = KVCache(blocks=40, block_size=4, dtype=FP8)
    rows = [AttentionRow(blocks=range(10), base=30, count=3), AttentionRow(blocks=range(10, 30), base=60, count=5)]
    filled = AttentionMetadata.of([AttentionRow(blocks=range(40), base=0, count=160)], block_size=4, device=CPU)
    cache.write(0, filled.slot_mapping_N, *(torch.randn(160, 2, 8, generator=generator) for _ in range(2)))
    new = [torch.randn(8, heads, 8, generator=generator) for heads in (6, 2, 2)]

    def attend(some: list[AttentionRow], *given: torch.Tensor) -> torch.Tensor:
        return PagedAttention(cache, AttentionMetadata.of(some, block_size=4, device=CPU))(0, *given)

    together = attend(rows, *new)
    assert torch.equal(attend(rows[:1], *(x[:3] for x in new)), together[:3])
    assert torch.equal(attend(rows[1:], *(x[3:] for x in new)), together[3:])


def test_slots_move_as_they_are() -> None:
    cache = KVCache(blocks=3, block_size=4, dtype=FP8)
    cache.write(0, torch.arange(12), torch.randn(12, 2, 8), torch.randn(12, 2, 8))
    before = [x.float() for x in cache.layers[0]]
    cache.move(torch.tensor([1, 5]), torch.tensor([5, 9]))
    for old, new in zip(before, cache.layers[0], strict=True):
        assert torch.equal(new.float()[:, [5, 9]], old[:, [1, 5]])


# --- answers -------------------------------------------------------------------------------------------------------


@each("rows", [1, 7])
@each("speculation", [OFF, at_depth(3), Speculation()])
def test_drafts_change_nothing(
    target: Target, tiny_drafter: Drafter, prompts: Prompts, plainly: list[Any], rows: int, speculation: Speculation
) -> None:
    engine = Engine(target, tiny_drafter, config=narrow(max_num_seqs=rows))
    assert tokens_of(run(engine, asked(prompts, speculation))) == plainly
    assert speculation.mode != "fixed" or engine.stats.accepted > 0
    assert engine._drafting is not None
    caches = [engine.model_runner.cache] + ([engine._drafting.cache] if engine.stats.drafts else [])
    assert {x.dtype for cache in caches for pair in cache.layers.values() for x in pair} == {FP8}


def test_sampled_answers_are_the_same_with_drafts(target: Target, tiny_drafter: Drafter, prompts: Prompts) -> None:
    sampling = Sampling(temperature=0.9)
    said = [
        tokens_of(run(Engine(target, drafter, config=narrow()), asked(prompts, how, sampling)))
        for drafter, how in ((None, OFF), (tiny_drafter, at_depth(3)))
    ]
    assert said[0] == said[1]


@each(
    "changes",
    [{"tree": Tree(depth=3, width=2, budget=6)}, {"prefix_cache": False}, {"max_num_batched_tokens": 9}],
)
def test_trees_chunks_and_prefixes_do_not_show(
    target: Target, tiny_drafter: Drafter, prompts: Prompts, plainly: list[Any], changes: dict[str, Any]
) -> None:
    engine = Engine(target, tiny_drafter, config=narrow(**changes))
    for _ in range(2):  # the second time prompts come from the prefix cache, if there is one
        assert tokens_of(run(engine, asked(prompts, at_depth(3)))) == plainly


def test_preemption_does_not_show(target: Target, tiny_drafter: Drafter, prompts: Prompts, plainly: list[Any]) -> None:
    memory = bytes_for(24, target, tiny_drafter, narrow())
    engine = Engine(target, tiny_drafter, config=narrow(max_model_len=64, memory=memory))
    assert tokens_of(run_preempted(engine, asked(prompts, at_depth(3)))) == plainly


def test_rounds_on_the_device_give_the_same(
    target: Target, tiny_drafter: Drafter, prompts: Prompts, plainly: list[Any]
) -> None:
    """Uncaptured, by dense attention: equal up to near-ties."""
    engine = round_engine(target, tiny_drafter, narrow())
    said = tokens_of(run(engine, asked(prompts, at_depth(3))))
    assert sum(a == b for a, b in zip(said, plainly, strict=True)) >= len(prompts) - 1
    assert engine.stats.accepted > 0


def test_eight_bits_are_really_used(target: Target, prompts: Prompts) -> None:
    logprobs = []
    for config in (options(), narrow()):
        (answer,) = run(Engine(target, None, config=config), [request(prompts[-1], logprobs=1)])
        logprobs.append([entry.logprob for entry in answer.logprobs])
    assert logprobs[0] != logprobs[1]


def test_a_swapped_drafter_keeps_eight_bits(target: Target, tiny_drafter: Drafter, prompts: Prompts) -> None:
    engine = Engine(target, tiny_drafter, config=narrow())
    engine.swap_drafter(random_drafter(drafter_config()))
    run(engine, asked(prompts[:2], at_depth(2)))
    assert engine._drafting is not None
    assert engine._drafting.cache.layers[0][0].dtype == FP8


def test_the_drift_probe_reads_eight_bits(target: Target, tiny_drafter: Drafter, prompts: Prompts) -> None:
    engine = Engine(target, tiny_drafter, config=narrow(drift_share=0.9))
    run(engine, requests(prompts, speculation=at_depth(3), max_new_tokens=60))
    assert engine.drift.report().checkups > 0


# --- memory, and what is refused -----------------------------------------------------------------------------------


def test_as_many_bytes_hold_more_tokens(target: Target, tiny_drafter: Drafter) -> None:
    """Four times as many as float32."""
    config = {"memory": 2**20, "max_num_seqs": 4096}
    wide, small = (Engine(target, tiny_drafter, config=make(**config)) for make in (options, narrow))
    assert wide.budget.bytes_per_block == 4 * small.budget.bytes_per_block
    assert 4 * wide.budget.blocks <= small.budget.blocks <= 4 * wide.budget.blocks + 3
    assert small.model_runner.cache.bytes < 2**20


@each("name", ["fp8_e5m2", "int8", "bfloat16", ""])
def test_other_types_are_refused_and_vllms_names_are_accepted(name: str) -> None:
    with pytest.raises(UserError, match=f"kv_cache_dtype is '{name}'; it must be one of auto, fp8, fp8_e4m3"):
        EngineConfig(kv_cache_dtype=name)
    assert EngineConfig(kv_cache_dtype="fp8_e4m3").kv_cache_type == FP8
    assert EngineConfig().kv_cache_type is None


def test_gpus_that_cannot_convert_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eyas.engine.config.has_triton", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 6))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a card of 2020")
    with pytest.raises(UserError, match=r"fp8 needs a GPU of compute capability 8\.9 .* a card of 2020 has 8\.6"):
        require_kv_cache_dtype(EngineConfig(kv_cache_dtype="fp8"), torch.device("cuda"))
    require_kv_cache_dtype(EngineConfig(), torch.device("cuda"))
    require_kv_cache_dtype(EngineConfig(kv_cache_dtype="fp8"), CPU)
