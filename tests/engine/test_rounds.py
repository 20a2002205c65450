"""Rounds on the device give what ordinary steps give, with a step in flight and a device that finishes late."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.late_queue import LateQueue
from engine.round_engines import (
    graphs_of,
    live_through,
    make_moody,
    round_engine,
)
from engine.test_engine import OFF, SAMPLINGS, at_depth, options, request, run
from engine.test_grammar import SHORT, guidance, letters  # noqa: F401  fixtures are used by name
from engine.test_grammar import requests as grammar_requests
from engine.test_swap import run_with_swaps
from eyas.drafter.model import Drafter
from eyas.engine import drift_probe
from eyas.engine.engine import Engine
from eyas.engine.request import Request, Speculation
from eyas.engine.runner import round_runner
from eyas.engine.runner.device_queue import DeviceQueue, ImmediateQueue, RoundDevice
from eyas.engine.runner.graph_capture import GraphCapture
from eyas.engine.speculation.choice import Choice
from eyas.engine.speculation.controller import RowFacts
from eyas.errors import UserError
from eyas.grammar.llguidance import LlGuidance
from eyas.plan.shapes import CAPTURED_TREE_ROWS
from eyas.sampling import Sampling
from eyas.target.model import Target
from tiny import drafter_config, random_drafter

QUEUES: dict[str, Callable[[], DeviceQueue]] = {
    "at once": ImmediateQueue,
    "late": LateQueue,
    "by chance": lambda: LateQueue(seed=1, haste=0.4),
}
"""Devices by how late they finish."""


@pytest.fixture(params=[*QUEUES, "synchronous", "exact, by chance"])
def build(request: pytest.FixtureRequest) -> Callable[..., Engine]:
    """How engines are made: by device. They are compared with engines whose steps are exact and land at once."""

    def made(target: Target, drafter: Drafter | None, **changes: Any) -> Engine:
        if request.param == "synchronous":
            return round_engine(target, drafter, options(**changes), ImmediateQueue(), synchronous=True)
        if request.param == "exact, by chance":
            return round_engine(target, drafter, options(**changes), QUEUES["by chance"](), exact=True)
        return round_engine(target, drafter, options(**changes), QUEUES[request.param]())

    return made


def tokens_of(answers: Sequence[Any]) -> list[tuple[int, ...]]:
    return [answer.tokens for answer in answers]


@pytest.mark.slow
@pytest.mark.parametrize("depth", [0, 1, 3, 5])
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_chains_of_every_depth(
    build: Callable[..., Engine],
    target: Target,
    tiny_drafter: Drafter,
    prompts: list[tuple[int, ...]],
    depth: int,
    rows: int,
) -> None:
    asked = [request(prompt, speculation=at_depth(depth) if depth else OFF) for prompt in prompts]
    manner = {"max_num_seqs": rows, "max_num_batched_tokens": 256}
    ours = run(build(target, tiny_drafter, **manner), asked)
    theirs = run(Engine(target, tiny_drafter, config=options(**manner)), asked)
    assert tokens_of(ours) == tokens_of(theirs)
    assert [answer.depths for answer in ours] == [answer.depths for answer in theirs], "the same drafts"


@pytest.mark.parametrize(("chance", "accepted"), [(0.0, 0), (1.0, 3)])
def test_a_coin_may_accept_instead_of_the_law(
    target: Target, tiny_drafter: Drafter, prompts: list[tuple[int, ...]], chance: float, accepted: int
) -> None:
    """Benchmarks measure so, at an acceptance of their choice."""
    engine = round_engine(target, tiny_drafter, options(), chance=chance)
    asked = [request(prompt, speculation=at_depth(3), max_new_tokens=13) for prompt in prompts[:3]]
    for answer in run(engine, asked):
        # The first token is the prompt's; then come rounds of drafts and one of the target's own.
        assert list(answer.depths) == [0, *([*range(1, accepted + 1), 0] * 12)][:13]


def test_without_a_drafter(build: Callable[..., Engine], target: Target, prompts: list[tuple[int, ...]]) -> None:
    asked = [request(prompt) for prompt in prompts]
    assert tokens_of(run(build(target, None), asked)) == tokens_of(run(Engine(target, config=options()), asked))


def test_texts_that_nobody_wants_are_not_made(
    build: Callable[..., Engine], target: Target, tiny_drafter: Drafter, prompts: list[tuple[int, ...]]
) -> None:
    asked = [request(prompt, speculation=at_depth(3), detokenize=bool(n % 2)) for n, prompt in enumerate(prompts)]
    ours = run(build(target, tiny_drafter), asked)
    theirs = run(Engine(target, tiny_drafter, config=options()), [replace(one, detokenize=True) for one in asked])
    assert tokens_of(ours) == tokens_of(theirs)
    assert [answer.text for answer in ours] == [a.text if n % 2 else "" for n, a in enumerate(theirs)]
    with pytest.raises(UserError, match="detokenize"):
        request(prompts[0], stop_strings=("x",), detokenize=False)


def test_what_needs_a_mask_needs_it_with_another_drafter_too(
    target: Target, tiny_drafter: Drafter, prompts: list[tuple[int, ...]]
) -> None:
    usual = run(Engine(target, config=options()), [request(prompt) for prompt in prompts[:3]])
    # Words that each answer would have after the swap: only a mask keeps them out.
    asked = [
        request(prompt, bad_words=(answer.tokens[6:8],), speculation=at_depth(2))
        for prompt, answer in zip(prompts, usual, strict=False)
    ]
    expected = tokens_of(run(Engine(target, config=options()), [replace(one, speculation=OFF) for one in asked]))
    assert expected != tokens_of(usual)
    engine = round_engine(target, tiny_drafter, options())
    assert run_with_swaps(engine, asked, {2: random_drafter(drafter_config(), seed=5)}) == expected


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_every_sampling_among_greedy_ones(
    target: Target, tiny_drafter: Drafter, prompts: list[tuple[int, ...]], sampling: Any
) -> None:
    asked = [
        request(prompt, seed=seed, speculation=at_depth(3), **({"sampling": sampling} if seed % 3 else {}))
        for seed, prompt in enumerate(prompts)
    ]
    manner = options(max_num_batched_tokens=256)
    ours = run(round_engine(target, tiny_drafter, manner), asked)
    theirs = run(Engine(target, tiny_drafter, config=manner), asked)
    assert tokens_of(ours) == tokens_of(theirs)
    assert [answer.depths for answer in ours] == [answer.depths for answer in theirs], "the same drafts"


def test_logprobs_ends_and_shortest_lengths(
    build: Callable[..., Engine], target: Target, tiny_drafter: Drafter, prompts: list[tuple[int, ...]]
) -> None:
    asked = [
        request(prompt, speculation=at_depth(4), logprobs=2, stop_ids=frozenset({5, 9}), min_new_tokens=6)
        for prompt in prompts
    ]
    ours = run(build(target, tiny_drafter), asked)
    theirs = run(Engine(target, tiny_drafter, config=options()), asked)
    assert [(answer.tokens, answer.finished) for answer in ours] == [(a.tokens, a.finished) for a in theirs]
    for a, b in zip(ours, theirs, strict=True):
        assert a.logprobs is not None
        assert b.logprobs is not None
        assert [(x.token, x.rank) for x in a.logprobs] == [(x.token, x.rank) for x in b.logprobs]
        assert [x.logprob for x in a.logprobs] == pytest.approx([x.logprob for x in b.logprobs], abs=1e-4)
        assert [[t for t, _ in x.top] for x in a.logprobs] == [[t for t, _ in x.top] for x in b.logprobs]


@pytest.mark.parametrize(
    "changes", [{"prefix_cache": False}, {"max_num_batched_tokens": 9}, {"block_size": 1}, {"block_size": 64}], ids=str
)
def test_chunks_blocks_and_prefixes(
    build: Callable[..., Engine],
    target: Target,
    tiny_drafter: Drafter,
    prompts: list[tuple[int, ...]],
    changes: dict[str, Any],
) -> None:
    asked = [request(prompt, speculation=at_depth(4)) for prompt in [*prompts, *prompts]]
    ours = run(build(target, tiny_drafter, **changes), asked)
    assert tokens_of(ours) == tokens_of(run(Engine(target, tiny_drafter, config=options(**changes)), asked))


def test_prefixes_found_later_are_right(
    build: Callable[..., Engine], target: Target, tiny_drafter: Drafter, prompts: list[tuple[int, ...]]
) -> None:
    """What a request leaves in the prefix cache, the drafter's part included, serves the next one."""
    engine, asked = build(target, tiny_drafter, max_num_seqs=3, max_num_batched_tokens=256), prompts[3:6]
    first = run(engine, [request(prompt, speculation=at_depth(4)) for prompt in asked])
    # Enough behind them for what the drafter lacks to be read at once.
    longer = [
        request((*prompt, *answer.tokens, *prompts[2]), speculation=at_depth(4))
        for prompt, answer in zip(asked, first, strict=True)
    ]
    ours = run(engine, longer)
    assert all(answer.num_cached_tokens > len(prompt) for answer, prompt in zip(ours, asked, strict=True))
    theirs = run(Engine(target, tiny_drafter, config=options(prefix_cache=False, max_num_batched_tokens=256)), longer)
    assert tokens_of(ours) == tokens_of(theirs)
    assert [answer.depths for answer in ours] == [answer.depths for answer in theirs], "the same drafts"


def test_preempted_requests(
    build: Callable[..., Engine], target: Target, tiny_drafter: Drafter, prompts: list[tuple[int, ...]]
) -> None:
    per_block = Engine(target, tiny_drafter, config=options()).budget.bytes_per_block
    asked = [request(prompt, speculation=at_depth(3)) for prompt in prompts]
    engine = build(target, tiny_drafter, max_model_len=64, memory=30 * per_block)
    preempted = set[int]()
    tokens: dict[int, list[int]] = {}
    for one in asked:
        engine.submit(one)
    while engine.busy:
        for piece in engine.step():
            tokens.setdefault(piece.key, []).extend(piece.tokens)
        preempted |= {seq.key for seq in engine.scheduler.running if seq.preemptions}
        engine.scheduler.check()
    assert preempted
    theirs = run(Engine(target, tiny_drafter, config=options()), asked)
    assert [tuple(tokens[key]) for key in range(len(asked))] == tokens_of(theirs)


def test_depths_that_change_and_requests_that_come_and_go(
    build: Callable[..., Engine], target: Target, tiny_drafter: Drafter, prompts: list[tuple[int, ...]]
) -> None:
    """Plain steps gather states, deep ones follow shallow ones, users leave in the middle: nothing shows."""
    asked = [request(prompt, max_new_tokens=60) for prompt in prompts]
    expected = tokens_of(run(Engine(target, config=options()), asked))
    engine = build(target, tiny_drafter, max_num_seqs=6, max_model_len=256)
    tokens, depths = live_through(engine, prompts)
    for key, made in tokens.items():
        assert tuple(made) == expected[key][: len(made)]
        assert len(made) == 60 or key in (2, 7)
    assert sum(depth > 0 for row in depths.values() for depth in row) > 100


def test_long_rests_are_caught_up_on(
    build: Callable[..., Engine], target: Target, tiny_drafter: Drafter, prompts: list[tuple[int, ...]]
) -> None:
    """After many plain steps the drafter drafts as if it had read along: the ring is read before it is overwritten."""
    asked = [request(prompt, max_new_tokens=90, speculation=Speculation()) for prompt in prompts[:4]]
    accepted = []
    for engine in (
        build(target, tiny_drafter, max_model_len=256),
        Engine(target, tiny_drafter, config=options(max_model_len=256)),
    ):
        steps = iter(range(10**6))
        make_moody(engine, lambda steps=steps: 4 if next(steps) // 4 % 40 > 36 else 0)  # type: ignore[misc]
        answers = run(engine, asked)
        accepted.append(
            sum(answer.stats.accepted for answer in answers) / sum(answer.stats.drafts for answer in answers)
        )
        assert tokens_of(answers) == tokens_of(run(Engine(target, config=options(max_model_len=256)), asked))
    assert accepted[0] == pytest.approx(accepted[1], rel=0.3)


def test_sampled_answers_are_those_of_no_drafts(
    target: Target, tiny_drafter: Drafter, prompts: list[tuple[int, ...]]
) -> None:
    def asked(speculation: Speculation) -> list[Request]:
        return [
            request(prompt, seed=seed, sampling=Sampling(temperature=1.0, top_p=0.9), speculation=speculation)
            for seed, prompt in enumerate(prompts)
        ]

    engine = round_engine(target, tiny_drafter, options())
    assert tokens_of(run(engine, asked(at_depth(5)))) == tokens_of(run(engine, asked(OFF)))


@pytest.mark.parametrize("seed", range(3))
def test_everything_at_once(target: Target, tiny_drafter: Drafter, prompts: list[tuple[int, ...]], seed: int) -> None:
    """Requests of all kinds come, are cancelled, stop and are preempted while steps are in flight."""
    chance = random.Random(seed)

    def one(number: int) -> Request:
        sampling = chance.choice([Sampling(), Sampling(), *SAMPLINGS])
        return request(
            chance.choice(prompts),
            seed=number,
            sampling=sampling,
            max_new_tokens=chance.randint(1, 40),
            speculation=chance.choice([OFF, at_depth(2), at_depth(5), Speculation()]),
            stop_ids=frozenset(chance.sample(range(96), chance.choice([0, 3]))),
            logprobs=chance.choice([None, None, 2]),
        )

    asked = [one(number) for number in range(24)]
    expected = tokens_of(run(Engine(target, config=options(max_model_len=64)), [_plain(this) for this in asked]))
    per_block = Engine(target, tiny_drafter, config=options()).budget.bytes_per_block
    engine = round_engine(
        target, tiny_drafter, options(max_num_seqs=5, max_model_len=64, memory=40 * per_block), LateQueue(seed, 0.3)
    )
    make_moody(engine, lambda: chance.choice([0, 0, 1, 3, 7]))
    tokens: dict[int, list[int]] = {number: [] for number in range(len(asked))}
    left, cancelled = list(asked), set[int]()
    while left or engine.busy:
        if left and chance.random() < 0.5:
            engine.submit(left.pop(0))
        for piece in engine.step():
            tokens[piece.key] += piece.tokens
        engine.scheduler.check()
        if engine.scheduler.running and chance.random() < 0.02:
            key = chance.choice(engine.scheduler.running).key
            cancelled.add(key)
            engine.cancel(key)
    assert engine.block_manager.used == 0
    for number, made in tokens.items():
        if number in cancelled:
            assert tuple(made) == expected[number][: len(made)]
        else:
            assert tuple(made) == expected[number]


def _plain(one: Request) -> Request:
    return replace(one, speculation=OFF, logprobs=None)


def test_grammars_among_others(
    build: Callable[..., Engine],
    letters: Target,  # noqa: F811
    tiny_drafter: Drafter,
    guidance: LlGuidance,  # noqa: F811
) -> None:
    """Masks are made while the step's passes run; rows without a grammar beside them are not touched."""
    asked = grammar_requests(letters, guidance.json_schema(SHORT), (at_depth(1), at_depth(3), Speculation(), OFF))
    free = [replace(one, grammar=None) for one in asked[:3]]
    expected = Engine(letters, tiny_drafter, config=options()).generate([*asked, *free])
    for changes in ({}, {"max_num_batched_tokens": 11}):  # the latter leaves some fewer drafts than were planned
        answers = build(letters, tiny_drafter, **changes).generate([*asked, *free])
        assert tokens_of(answers) == tokens_of(expected)


def test_drafters_come_and_go(
    build: Callable[..., Engine], target: Target, tiny_drafter: Drafter, prompts: list[tuple[int, ...]]
) -> None:
    asked = [request(prompt, speculation=Speculation()) for prompt in prompts]
    other = random_drafter(drafter_config(), seed=5).to(target.device)
    engine = build(target, tiny_drafter)
    make_moody(engine, lambda: 3)
    got = run_with_swaps(engine, asked, {2: other, 4: None, 6: tiny_drafter, 9: other})
    assert got == tokens_of(run(Engine(target, config=options()), asked))


def test_looks_for_drift_change_nothing(
    build: Callable[..., Engine],
    target: Target,
    tiny_drafter: Drafter,
    prompts: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(drift_probe, "EVERY", 1)
    engine = build(target, tiny_drafter, drift_share=0.9)
    asked = [request(prompt, speculation=at_depth(3)) for prompt in prompts]
    expected = run(Engine(target, config=options()), [_plain(one) for one in asked])
    assert tokens_of(run(engine, asked)) == tokens_of(expected)
    # On a GPU the first look compiles kernels, and takes the share of many others.
    assert engine.drift.checkups > (0 if target.device.type == "cuda" else 3)


def test_after_a_step_that_failed_others_are_served(
    build: Callable[..., Engine],
    target: Target,
    tiny_drafter: Drafter,
    prompts: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Wherever it failed: with nothing of it queued, with its drafts, or with its target's pass."""
    engine = build(target, tiny_drafter)
    asked = [request(prompt, speculation=at_depth(3)) for prompt in prompts]
    for name in ("begin_round", "verify", "accept"):
        with monkeypatch.context() as patch:
            patch.setattr(engine.core.runner, name, _failing(getattr(engine.core.runner, name), call=4))
            for one in asked:
                engine.submit(one)
            with pytest.raises(RuntimeError, match="out of memory"):
                _exhaust(engine)
        while engine.scheduler.running:
            for seq in engine.scheduler.running:
                engine.cancel(seq.key)
        engine.abandon_step()
        engine.scheduler.check()
        _exhaust(engine)
    expected = run(Engine(target, config=options()), [_plain(one) for one in asked])
    assert tokens_of(run(engine, asked)) == tokens_of(expected)


def _failing(function: Callable[..., Any], *, call: int) -> Callable[..., Any]:
    """It, but for one call."""
    calls = 0

    def fail(*given: Any, **how: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            raise RuntimeError("out of memory")
        return function(*given, **how)

    return fail


def _exhaust(engine: Engine) -> None:
    while engine.busy:
        engine.step()


def test_a_step_is_in_flight_while_the_host_works(target: Target, tiny_drafter: Drafter) -> None:
    """A late device runs a step only when the next one has been launched."""
    queue = LateQueue()
    engine = round_engine(target, tiny_drafter, options(), queue)
    engine.submit(request((1, 2, 3), speculation=at_depth(3)))
    assert engine.step() == [], "nothing has landed"
    told = queue.told
    assert queue.done < told
    assert engine.step(), "the first token"
    assert told <= queue.done < queue.told


def test_drafters_of_two_layers(build: Callable[..., Engine], target: Target, prompts: list[tuple[int, ...]]) -> None:
    """Such a drafter reads prompts by attention: it does not remember."""
    drafter = random_drafter(drafter_config(num_hidden_layers=2)).eval().to(target.device)
    asked = [request(prompt, speculation=at_depth(3)) for prompt in prompts]
    ours = run(build(target, drafter), asked)
    theirs = run(Engine(target, drafter, config=options()), asked)
    assert tokens_of(ours) == tokens_of(theirs)
    assert [answer.depths for answer in ours] == [answer.depths for answer in theirs], "the same drafts"


def test_eagle1_drafters(
    build: Callable[..., Engine], target: Target, tiny_eagle1: Drafter, prompts: list[tuple[int, ...]]
) -> None:
    """They read the last state, and run by their own code."""
    asked = [request(prompt, speculation=at_depth(3)) for prompt in prompts]
    ours = run(build(target, tiny_eagle1, max_num_batched_tokens=256), asked)
    theirs = run(Engine(target, tiny_eagle1, config=options(max_num_batched_tokens=256)), asked)
    assert tokens_of(ours) == tokens_of(theirs)
    assert [answer.depths for answer in ours] == [answer.depths for answer in theirs], "the same drafts"
    assert any(depth for answer in ours for depth in answer.depths), "some were accepted"


@pytest.mark.parametrize("max_depth", [7, 5, 1])
def test_nothing_is_left_to_capture_behind_what_was_captured_ahead(
    target: Target, tiny_drafter: Drafter, prompts: list[tuple[int, ...]], max_depth: int
) -> None:
    engine = round_engine(target, tiny_drafter, options(max_num_seqs=6, max_model_len=256, max_depth=max_depth))
    ahead = engine.capture_graphs()
    assert ahead == len(graphs_of(engine)) > 0
    rehearsed, shapes = engine.controller.costs._rehearsed, engine.core.runner.shapes
    assert set(rehearsed) == {0, *shapes.depths, *shapes.trees}
    assert all(rehearsed[depth][-1][0] == 6 for depth in (0, *shapes.depths_for(6))), "steps of every depth"
    asked = [request(prompt, max_new_tokens=40, speculation=Speculation()) for prompt in prompts]
    source = random.Random(5)
    make_moody(engine, lambda: source.randint(0, max_depth))
    ours = run(engine, asked)
    assert tokens_of(ours) == tokens_of(run(Engine(target, config=options()), asked))
    assert sum(answer.stats.accepted for answer in ours) > 0
    assert len(graphs_of(engine)) == ahead
    assert Engine(target, config=options()).capture_graphs() == 0, "without a GPU there is nothing to capture"


def test_a_choice_that_is_held_is_not_kept_for_more_requests_than_its_passes_were_captured_for(
    target: Target, tiny_drafter: Drafter, prompts: list[tuple[int, ...]]
) -> None:
    engine = round_engine(target, tiny_drafter, options(max_num_seqs=6, max_model_len=256, max_depth=5))
    ahead = engine.capture_graphs()
    tree, choose, grown = engine.core.runner.shapes.trees[0], engine.controller.choose, list[int]()

    def choose_trees(rows: Sequence[RowFacts], *, after: int = 1) -> Choice:
        choice = choose(rows, after=after)
        if len(rows) > CAPTURED_TREE_ROWS:
            return choice
        grown.append(len(rows))
        return replace(choice, depths=(tree.depth,) * len(rows), shape=tree, holds=100, rests=False)

    engine.controller.choose = choose_trees  # type: ignore[method-assign]
    asked = [request(prompt, max_new_tokens=30, speculation=Speculation()) for prompt in prompts[:5]]
    keys = [engine.submit(one) for one in asked[:CAPTURED_TREE_ROWS]]
    answers: dict[int, list[int]] = {key: [] for key in keys}
    while engine.busy:
        for delta in engine.step():
            answers.setdefault(delta.key, []).extend(delta.tokens)
        if CAPTURED_TREE_ROWS in grown and len(keys) == CAPTURED_TREE_ROWS:
            keys.append(engine.submit(asked[-1]))
    assert len(keys) == 5, "the fifth came while trees of four were held"
    plainly = tokens_of(run(Engine(target, config=options()), asked))
    assert [tuple(answers[key]) for key in keys] == [tuple(tokens) for tokens in plainly]
    assert len(graphs_of(engine)) == ahead


def test_steps_of_very_many_rows_are_captured_ahead_for_shallow_drafts(target: Target, tiny_drafter: Drafter) -> None:
    engine = round_engine(target, tiny_drafter, options(max_num_seqs=100, max_model_len=64, max_num_batched_tokens=800))
    engine.capture_graphs()
    shapes = {(int(str(key[1])), int(str(key[2]))) for key in graphs_of(engine)._made if key[0] == "verify"}
    assert {rows for rows, _ in shapes} == {1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 100}
    assert {depth for rows, depth in shapes if rows == 64} == {0, 1, 2, 3, 5, 7}
    assert {depth for rows, depth in shapes if rows == 100} == {0, 1, 2, 3, 5}


@pytest.mark.parametrize("usual", [512, 2])
def test_longer_requests_than_usual_have_tables_of_their_own(
    target: Target, tiny_drafter: Drafter, prompts: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch, usual: int
) -> None:
    monkeypatch.setattr(round_runner, "USUAL_BLOCKS", usual)
    asked = [request(prompt, speculation=at_depth(3)) for prompt in prompts]
    manner = options(max_model_len=64, block_size=4)
    engine = round_engine(target, tiny_drafter, manner)
    assert tokens_of(run(engine, asked)) == tokens_of(run(Engine(target, tiny_drafter, config=manner), asked))
    widths = {key[3] for key in graphs_of(engine)._made if key[0] == "verify"}
    assert widths == ({16} if usual == 512 else {8, 32}), "no wider than what may come, but for the steps between"


def test_what_cannot_be_captured_is_told_and_runs_eagerly(
    target: Target,
    tiny_drafter: Drafter,
    prompts: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked = [request(prompt, speculation=at_depth(3)) for prompt in prompts]
    theirs = run(Engine(target, tiny_drafter, config=options()), asked)

    def refuse(*_: object) -> None:
        raise RuntimeError("not while capturing")

    monkeypatch.setattr(GraphCapture, "_capture", refuse)
    for enabled in (True, False):
        capture = GraphCapture(device=torch.device("cpu"), enabled=enabled)
        device = RoundDevice(capture=capture, queue=LateQueue())
        engine = Engine(target, tiny_drafter, config=options(), device=device)
        assert tokens_of(run(engine, asked)) == tokens_of(theirs)
        told = [line for line in caplog.messages if "runs eagerly: not while capturing" in line]
        assert len(told) == len(graphs_of(engine).refused) == (4 if enabled else 0), "once for each kind of pass"
        caplog.clear()
