"""On a GPU the engine answers the same with and without CUDA graphs, and as transformers does.

Real prompts: test_real_prompts_cuda.py.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.common import NEW_TOKENS, OFF, SAMPLINGS, at_depth, options, request, run
from engine.round_engines import graphs_of
from eyas.drafter.model import Drafter
from eyas.engine.engine import Engine
from eyas.engine.request import Request, Speculation
from eyas.engine.speculation.draft import Tree
from eyas.kernels.noise import exponential, race, uniform
from eyas.sampling import Sampling
from eyas.target.model import Target
from tiny import VOCAB, drafter_config, random_drafter

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("falls_back_to_nothing")]


def both(
    target: Target, drafter: Drafter | None, asked: Sequence[Request], **changes: Any
) -> tuple[Engine, list[Any], list[Any]]:
    """Answers with and without graphs."""
    recorded = Engine(target, drafter, config=options(**changes))
    ours = run(recorded, asked)
    theirs = run(Engine(target, drafter, config=options(**changes, graphs=False)), asked)
    assert len(graphs_of(recorded)) > 0
    return recorded, ours, theirs


@torch.inference_mode()
def by_transformers(target: Target, prompt: Sequence[int]) -> tuple[int, ...]:
    """Recomputes the whole sequence for every token, without a cache."""
    ids = list(prompt)
    for _ in range(NEW_TOKENS):
        model: Any = target.model
        ids.append(int(model(input_ids=torch.tensor([ids]).cuda(), use_cache=False).logits[0, -1].argmax()))
    return tuple(ids[len(prompt) :])


@pytest.mark.parametrize("depth", range(6))
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_graphs_equal_eager_steps_and_transformers(
    target: Target, drafter: Drafter, prompts: list[tuple[int, ...]], depth: int, rows: int
) -> None:
    asked = [request(prompt, speculation=at_depth(depth) if depth else OFF) for prompt in prompts]
    engine, ours, theirs = both(target, drafter, asked, max_num_seqs=rows)
    assert [answer.tokens for answer in ours] == [answer.tokens for answer in theirs]
    assert [answer.depths for answer in ours] == [answer.depths for answer in theirs], "the same drafts"
    assert [answer.tokens for answer in ours] == [by_transformers(target, prompt) for prompt in prompts]
    assert engine.stats.accepted > 0 or not depth


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_every_sampling_among_greedy_ones(
    target: Target, drafter: Drafter, prompts: list[tuple[int, ...]], sampling: Sampling
) -> None:
    asked = [
        request(prompt, seed=seed, speculation=at_depth(3), **({"sampling": sampling} if seed % 3 else {}))
        for seed, prompt in enumerate(prompts)
    ]
    _, ours, theirs = both(target, drafter, asked)
    assert [answer.tokens for answer in ours] == [answer.tokens for answer in theirs]
    plain = run(Engine(target, config=options(max_num_seqs=1)), [replace(one, speculation=OFF) for one in asked])
    assert [answer.tokens for answer in ours] == [answer.tokens for answer in plain], "a seed is a text"


@pytest.mark.parametrize(
    "changes",
    [
        {"prefix_cache": False},
        {"max_num_batched_tokens": 9},
        {"block_size": 1},
        {"block_size": 64},
        {"max_num_seqs": 2},
    ],
)
def test_chunks_blocks_and_prefixes(
    target: Target, drafter: Drafter, prompts: list[tuple[int, ...]], changes: dict[str, Any]
) -> None:
    # Three of each: the third one reuses blocks that another request left, however few blocks there are.
    asked = [request(prompt, speculation=at_depth(4)) for prompt in prompts for _ in range(3)]
    engine, ours, theirs = both(target, drafter, asked, **changes)
    assert [answer.tokens for answer in ours] == [answer.tokens for answer in theirs]
    assert engine.block_manager.hits > 0 or not engine.config.prefix_cache or "block_size" in changes


def test_trees(target: Target, drafter: Drafter, prompts: list[tuple[int, ...]]) -> None:
    engine = Engine(target, drafter, config=options(tree=Tree(depth=3, width=2, budget=6)))
    answers = run(engine, [request(prompt, speculation=at_depth(3)) for prompt in prompts])
    assert [answer.tokens for answer in answers] == [by_transformers(target, prompt) for prompt in prompts]
    assert engine.stats.accepted > 0


def test_a_random_drafter_of_two_layers(
    target: Target, prompts: list[tuple[int, ...]], caplog: pytest.LogCaptureFixture
) -> None:
    wrong = random_drafter(drafter_config(num_hidden_layers=2, draft_vocab_size=VOCAB // 2), seed=9).cuda()
    _, ours, theirs = both(target, wrong, [request(prompt, speculation=at_depth(3)) for prompt in prompts])
    assert [answer.tokens for answer in ours] == [answer.tokens for answer in theirs]
    assert set(caplog.messages) == {"the drafter runs by its own code: it has 2 layers"}
    caplog.clear()  # kernels support one layer, which may be logged


def test_without_a_drafter_and_with_transformers_own_code(
    target: Target, drafter: Drafter, prompts: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [request(prompt) for prompt in prompts]
    _, ours, theirs = both(target, None, asked)
    assert [answer.tokens for answer in ours] == [answer.tokens for answer in theirs]
    monkeypatch.setattr("eyas.engine.runner.model_runner.fused_target", lambda *_: None)
    asked = [replace(one, speculation=at_depth(2)) for one in asked]
    _, others, _ = both(target, drafter, asked)
    assert [answer.tokens for answer in others] == [answer.tokens for answer in theirs]


def test_preempted_requests(target: Target, drafter: Drafter, prompts: list[tuple[int, ...]]) -> None:
    per_block = Engine(target, drafter, config=options()).budget.bytes_per_block
    asked = [request(prompt, speculation=at_depth(3)) for prompt in prompts]
    engine = Engine(target, drafter, config=options(max_model_len=64, memory=30 * per_block))
    keys = [engine.submit(one) for one in asked]
    preempted, tokens = set[int](), dict[int, list[int]]()
    while engine.busy:
        for piece in engine.step():
            tokens.setdefault(piece.key, []).extend(piece.tokens)
        preempted |= {seq.key for seq in engine.scheduler.running if seq.preemptions}
        engine.scheduler.check()
    assert preempted
    theirs = run(Engine(target, drafter, config=options(graphs=False)), asked)
    assert [tuple(tokens[key]) for key in keys] == [answer.tokens for answer in theirs]


def test_requests_that_join_and_leave_at_any_moment_on_auto(
    target: Target, drafter: Drafter, prompts: list[tuple[int, ...]]
) -> None:
    source = random.Random(5)
    asked = [request(prompt, max_new_tokens=60, speculation=Speculation()) for prompt in prompts]
    expected = [answer.tokens for answer in run(Engine(target, config=options(graphs=False)), asked)]
    engine = Engine(target, drafter, config=options(max_num_seqs=5, max_model_len=256))
    tokens: dict[int, list[int]] = {key: [] for key in range(len(asked))}
    waiting, doomed = list(asked), {2, 7}
    while waiting or engine.busy:
        if waiting and source.random() < 0.3:
            engine.submit(waiting.pop(0))
        for piece in engine.step():
            tokens[piece.key].extend(piece.tokens)
        for key in [key for key in doomed if len(tokens[key]) > 10]:
            doomed.remove(key)
            engine.cancel(key)
        engine.scheduler.check()
    assert engine.block_manager.used == 0
    for key, made in tokens.items():
        assert tuple(made) == expected[key][: len(made)]
        assert len(made) == 60 or key in (2, 7)


def test_noise_is_the_same_on_every_device() -> None:
    seed, position = torch.tensor([0, 7, -(2**63), 2**63 - 1]), torch.tensor([0, 3, 9, 2**31])
    token = torch.arange(5000)
    on_cpu = uniform(seed, position, token)
    on_cuda = uniform(seed.cuda(), position.cuda(), token.cuda()).cpu()
    assert torch.equal(on_cuda, on_cpu)
    times = exponential(seed.cuda(), position.cuda(), token.cuda()).cpu()
    torch.testing.assert_close(times, exponential(seed, position, token), rtol=2e-7, atol=0)
    p = torch.randn(4, 5000, generator=torch.Generator().manual_seed(0)).softmax(dim=-1)
    theirs = race(p.cuda(), seed.cuda(), position.cuda(), token.cuda(), width=3).cpu()
    assert torch.equal(theirs, race(p, seed, position, token, width=3))
