"""Rounds with a step in flight on a late device give what steps give that land at once."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from each import each
from engine.common import (
    OFF,
    SAMPLINGS,
    Build,
    Prompts,
    at_depth,
    bytes_for,
    depths_of,
    options,
    request,
    requests,
    run,
    run_preempted,
    tokens_of,
)
from engine.late_queue import LateQueue
from engine.round_engines import graphs_of, live_through, make_moody, round_engine
from engine.test_grammar import SHORT, guidance, letters  # noqa: F401  fixtures are used by name
from engine.test_grammar import requests as grammar_requests
from engine.test_swap import run_with_swaps
from eyas.drafter.model import Drafter
from eyas.engine import drift_probe
from eyas.engine.engine import Engine
from eyas.engine.output import RequestOutput
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
"""Devices, by how late they finish."""


@pytest.fixture(params=[*QUEUES, "synchronous", "exact, by chance"])
def build(request: pytest.FixtureRequest) -> Build:
    """Makes engines of one device; they are compared with engines whose steps are exact and land at once."""

    def made(target: Target, drafter: Drafter | None, **changes: Any) -> Engine:
        if request.param == "synchronous":
            return round_engine(target, drafter, options(**changes), ImmediateQueue(), synchronous=True)
        if request.param == "exact, by chance":
            return round_engine(target, drafter, options(**changes), QUEUES["by chance"](), exact=True)
        return round_engine(target, drafter, options(**changes), QUEUES[request.param]())

    return made


def assert_drafts_alike(
    build: Build, target: Target, drafter: Drafter, asked: Sequence[Request], **changes: Any
) -> list[RequestOutput]:
    """Answers and drafts are those of steps that land at once."""
    ours = run(build(target, drafter, **changes), asked)
    theirs = run(Engine(target, drafter, config=options(**changes)), asked)
    assert tokens_of(ours) == tokens_of(theirs)
    assert depths_of(ours) == depths_of(theirs)
    return ours


@pytest.mark.slow
@each("depth", [0, 1, 3, 5])
@each("rows", [1, 3, 8])
def test_chains_of_every_depth(
    build: Build, target: Target, tiny_drafter: Drafter, prompts: Prompts, depth: int, rows: int
) -> None:
    asked = requests(prompts, speculation=at_depth(depth) if depth else OFF)
    assert_drafts_alike(build, target, tiny_drafter, asked, max_num_seqs=rows, max_num_batched_tokens=256)


@each(("chance", "accepted"), [(0.0, 0), (1.0, 3)])
def test_a_coin_may_decide_acceptance(
    target: Target, tiny_drafter: Drafter, prompts: Prompts, chance: float, accepted: int
) -> None:
    """Benchmarks measure at a given acceptance this way."""
    engine = round_engine(target, tiny_drafter, options(), chance=chance)
    asked = requests(prompts[:3], speculation=at_depth(3), max_new_tokens=13)
    for answer in run(engine, asked):
        # The first token follows the prompt; then come rounds of drafts and one token of the target.
        assert list(answer.depths) == [0, *([*range(1, accepted + 1), 0] * 12)][:13]


def test_without_a_drafter(build: Build, target: Target, prompts: Prompts) -> None:
    asked = requests(prompts)
    assert tokens_of(run(build(target, None), asked)) == tokens_of(run(Engine(target, config=options()), asked))


def test_unwanted_texts_are_not_made(build: Build, target: Target, tiny_drafter: Drafter, prompts: Prompts) -> None:
    asked = [request(prompt, speculation=at_depth(3), detokenize=bool(n % 2)) for n, prompt in enumerate(prompts)]
    ours = run(build(target, tiny_drafter), asked)
    theirs = run(Engine(target, tiny_drafter, config=options()), [replace(one, detokenize=True) for one in asked])
    assert tokens_of(ours) == tokens_of(theirs)
    assert [answer.text for answer in ours] == [a.text if n % 2 else "" for n, a in enumerate(theirs)]
    with pytest.raises(UserError, match="detokenize"):
        request(prompts[0], stop_strings=("x",), detokenize=False)


def test_masks_are_made_with_a_swapped_drafter_too(target: Target, tiny_drafter: Drafter, prompts: Prompts) -> None:
    usual = run(Engine(target, config=options()), requests(prompts[:3]))
    # Words that each answer would have after the swap: only a mask keeps them out.
    asked = [
        request(prompt, bad_words=(answer.tokens[6:8],), speculation=at_depth(2))
        for prompt, answer in zip(prompts, usual, strict=False)
    ]
    expected = tokens_of(run(Engine(target, config=options()), [replace(one, speculation=OFF) for one in asked]))
    assert expected != tokens_of(usual)
    engine = round_engine(target, tiny_drafter, options())
    assert run_with_swaps(engine, asked, {2: random_drafter(drafter_config(), seed=5)}) == expected


@each("sampling", SAMPLINGS)
def test_every_sampling_among_greedy_ones(
    target: Target, tiny_drafter: Drafter, prompts: Prompts, sampling: Any
) -> None:
    asked = [
        request(prompt, seed=seed, speculation=at_depth(3), **({"sampling": sampling} if seed % 3 else {}))
        for seed, prompt in enumerate(prompts)
    ]

    def late(target: Target, drafter: Drafter, **changes: Any) -> Engine:
        return round_engine(target, drafter, options(**changes))

    assert_drafts_alike(late, target, tiny_drafter, asked, max_num_batched_tokens=256)


def test_logprobs_ends_and_shortest_lengths(
    build: Build, target: Target, tiny_drafter: Drafter, prompts: Prompts
) -> None:
    stops = frozenset({5, 9})
    asked = requests(prompts, speculation=at_depth(4), logprobs=2, stop_ids=stops, min_new_tokens=6)
    ours = run(build(target, tiny_drafter), asked)
    theirs = run(Engine(target, tiny_drafter, config=options()), asked)
    assert [(answer.tokens, answer.finished) for answer in ours] == [(a.tokens, a.finished) for a in theirs]
    for a, b in zip(ours, theirs, strict=True):
        assert a.logprobs is not None
        assert b.logprobs is not None
        assert [(x.token, x.rank) for x in a.logprobs] == [(x.token, x.rank) for x in b.logprobs]
        assert [x.logprob for x in a.logprobs] == pytest.approx([x.logprob for x in b.logprobs], abs=1e-4)
        assert [[t for t, _ in x.top] for x in a.logprobs] == [[t for t, _ in x.top] for x in b.logprobs]


@each("changes", [{"prefix_cache": False}, {"max_num_batched_tokens": 9}, {"block_size": 1}, {"block_size": 64}])
def test_chunks_blocks_and_prefixes(
    build: Build, target: Target, tiny_drafter: Drafter, prompts: Prompts, changes: dict[str, Any]
) -> None:
    asked = requests([*prompts, *prompts], speculation=at_depth(4))
    ours = run(build(target, tiny_drafter, **changes), asked)
    assert tokens_of(ours) == tokens_of(run(Engine(target, tiny_drafter, config=options(**changes)), asked))


def test_prefixes_found_later_are_right(build: Build, target: Target, tiny_drafter: Drafter, prompts: Prompts) -> None:
    """Cached prefixes that a request leaves, the drafter's entries included, serve the next one."""
    engine, asked = build(target, tiny_drafter, max_num_seqs=3, max_num_batched_tokens=256), prompts[3:6]
    first = run(engine, requests(asked, speculation=at_depth(4)))
    # The rest is long enough for what the drafter lacks to be read at once.
    longer = [
        request((*prompt, *answer.tokens, *prompts[2]), speculation=at_depth(4))
        for prompt, answer in zip(asked, first, strict=True)
    ]
    ours = run(engine, longer)
    assert all(answer.num_cached_tokens > len(prompt) for answer, prompt in zip(ours, asked, strict=True))
    theirs = run(Engine(target, tiny_drafter, config=options(prefix_cache=False, max_num_batched_tokens=256)), longer)
    assert tokens_of(ours) == tokens_of(theirs)
    assert depths_of(ours) == depths_of(theirs)


def test_preempted_requests(build: Build, target: Target, tiny_drafter: Drafter, prompts: Prompts) -> None:
    asked = requests(prompts, speculation=at_depth(3))
    engine = build(target, tiny_drafter, max_model_len=64, memory=bytes_for(30, target, tiny_drafter))
    theirs = run(Engine(target, tiny_drafter, config=options()), asked)
    assert tokens_of(run_preempted(engine, asked)) == tokens_of(theirs)


def test_depths_that_change_and_requests_that_come_and_go(
    build: Build, target: Target, tiny_drafter: Drafter, prompts: Prompts
) -> None:
    """States wait in plain steps, deep drafts follow shallow ones, users leave midway: answers do not show it."""
    expected = tokens_of(run(Engine(target, config=options()), requests(prompts, max_new_tokens=60)))
    engine = build(target, tiny_drafter, max_num_seqs=6, max_model_len=256)
    tokens, depths = live_through(engine, prompts)
    for key, made in tokens.items():
        assert tuple(made) == expected[key][: len(made)]
        assert len(made) == 60 or key in (2, 7)
    assert sum(depth > 0 for row in depths.values() for depth in row) > 100


def test_long_rests_are_caught_up_on(build: Build, target: Target, tiny_drafter: Drafter, prompts: Prompts) -> None:
    """After many plain steps the drafter drafts as if it had read along: no state is overwritten unread."""
    asked = requests(prompts[:4], max_new_tokens=90, speculation=Speculation())
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


@each("seed", range(3))
def test_everything_at_once(target: Target, tiny_drafter: Drafter, prompts: Prompts, seed: int) -> None:
    """Requests of all kinds come, are cancelled, stop and are preempted with steps in flight."""
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
    memory = bytes_for(40, target, tiny_drafter)
    settings = options(max_num_seqs=5, max_model_len=64, memory=memory)
    engine = round_engine(target, tiny_drafter, settings, LateQueue(seed, 0.3))
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
    build: Build,
    letters: Target,  # noqa: F811
    tiny_drafter: Drafter,
    guidance: LlGuidance,  # noqa: F811
) -> None:
    """Masks are computed while the step's passes run; rows without a grammar are not affected."""
    asked = grammar_requests(letters, guidance.json_schema(SHORT), (at_depth(1), at_depth(3), Speculation(), OFF))
    free = [replace(one, grammar=None) for one in asked[:3]]
    expected = Engine(letters, tiny_drafter, config=options()).generate([*asked, *free])
    for changes in ({}, {"max_num_batched_tokens": 11}):  # with the latter, rows get fewer drafts than planned
        answers = build(letters, tiny_drafter, **changes).generate([*asked, *free])
        assert tokens_of(answers) == tokens_of(expected)


def test_drafters_come_and_go(build: Build, target: Target, tiny_drafter: Drafter, prompts: Prompts) -> None:
    asked = requests(prompts, speculation=Speculation())
    other = random_drafter(drafter_config(), seed=5).to(target.device)
    engine = build(target, tiny_drafter)
    make_moody(engine, lambda: 3)
    got = run_with_swaps(engine, asked, {2: other, 4: None, 6: tiny_drafter, 9: other})
    assert got == tokens_of(run(Engine(target, config=options()), asked))


def test_drift_check_ups_change_nothing(
    build: Build, target: Target, tiny_drafter: Drafter, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drift_probe, "EVERY", 1)
    engine = build(target, tiny_drafter, drift_share=0.9)
    asked = requests(prompts, speculation=at_depth(3))
    expected = run(Engine(target, config=options()), [_plain(one) for one in asked])
    assert tokens_of(run(engine, asked)) == tokens_of(expected)
    # On a GPU the first check-up compiles kernels and uses up the time of many others.
    assert engine.drift.checkups > (0 if target.device.type == "cuda" else 3)


def test_after_a_failed_step_others_are_served(
    build: Build, target: Target, tiny_drafter: Drafter, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it failed: with nothing of it queued, with its drafts queued, or with the target's pass."""
    engine = build(target, tiny_drafter)
    asked = requests(prompts, speculation=at_depth(3))
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
    """Call a function, except that one call fails."""
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
    """A late device runs a step only after the next one was launched."""
    queue = LateQueue()
    engine = round_engine(target, tiny_drafter, options(), queue)
    engine.submit(request((1, 2, 3), speculation=at_depth(3)))
    assert engine.step() == [], "no step has landed"
    told = queue.told
    assert queue.done < told
    assert engine.step(), "the first token"
    assert told <= queue.done < queue.told


def test_drafters_of_two_layers(build: Build, target: Target, prompts: Prompts) -> None:
    """Such a drafter reads prompts with attention."""
    drafter = random_drafter(drafter_config(num_hidden_layers=2)).eval().to(target.device)
    assert_drafts_alike(build, target, drafter, requests(prompts, speculation=at_depth(3)))


def test_eagle1_drafters(build: Build, target: Target, tiny_eagle1: Drafter, prompts: Prompts) -> None:
    """They read the last state, and run by their own code."""
    asked = requests(prompts, speculation=at_depth(3))
    ours = assert_drafts_alike(build, target, tiny_eagle1, asked, max_num_batched_tokens=256)
    assert any(depth for answer in ours for depth in answer.depths), "some drafts were accepted"


@each("max_depth", [7, 5, 1])
def test_nothing_is_left_to_capture_after_capturing_ahead(
    target: Target, tiny_drafter: Drafter, prompts: Prompts, max_depth: int
) -> None:
    engine = round_engine(target, tiny_drafter, options(max_num_seqs=6, max_model_len=256, max_depth=max_depth))
    ahead = engine.capture_graphs()
    assert ahead == len(graphs_of(engine)) > 0
    rehearsed, shapes = engine.controller.costs._rehearsed, engine.core.runner.shapes
    assert set(rehearsed) == {0, *shapes.depths, *shapes.trees}
    assert all(rehearsed[depth][-1][0] == 6 for depth in (0, *shapes.depths_for(6))), "steps of every depth"
    asked = requests(prompts, max_new_tokens=40, speculation=Speculation())
    source = random.Random(5)
    make_moody(engine, lambda: source.randint(0, max_depth))
    ours = run(engine, asked)
    assert tokens_of(ours) == tokens_of(run(Engine(target, config=options()), asked))
    assert sum(answer.stats.accepted for answer in ours) > 0
    assert len(graphs_of(engine)) == ahead
    assert Engine(target, config=options()).capture_graphs() == 0, "without a GPU there is nothing to capture"


def test_a_held_choice_is_not_kept_for_more_requests_than_its_passes_were_captured_for(
    target: Target, tiny_drafter: Drafter, prompts: Prompts
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
    asked = requests(prompts[:5], max_new_tokens=30, speculation=Speculation())
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
    shapes = {(int(str(key[1])), int(str(key[2]))) for key in graphs_of(engine)._replays if key[0] == "verify"}
    assert {rows for rows, _ in shapes} == {1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 100}
    assert {depth for rows, depth in shapes if rows == 64} == {0, 1, 2, 3, 5, 7}
    assert {depth for rows, depth in shapes if rows == 100} == {0, 1, 2, 3, 5}


@each("usual", [512, 2])
def test_longer_requests_than_usual_have_wider_tables(
    target: Target, tiny_drafter: Drafter, prompts: Prompts, monkeypatch: pytest.MonkeyPatch, usual: int
) -> None:
    monkeypatch.setattr(round_runner, "USUAL_BLOCKS", usual)
    asked = requests(prompts, speculation=at_depth(3))
    manner = options(max_model_len=64, block_size=4)
    engine = round_engine(target, tiny_drafter, manner)
    assert tokens_of(run(engine, asked)) == tokens_of(run(Engine(target, tiny_drafter, config=manner), asked))
    widths = {key[3] for key in graphs_of(engine)._replays if key[0] == "verify"}
    assert widths == ({16} if usual == 512 else {8, 32}), "no wider than needed, in steps of 4"


def test_failed_captures_are_logged_and_run_eagerly(
    target: Target,
    tiny_drafter: Drafter,
    prompts: Prompts,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked = requests(prompts, speculation=at_depth(3))
    theirs = run(Engine(target, tiny_drafter, config=options()), asked)

    def refuse(*_: object) -> None:
        raise RuntimeError("not while capturing")

    monkeypatch.setattr(GraphCapture, "_capture", refuse)
    for enabled in (True, False):
        capture = GraphCapture(device=torch.device("cpu"), enabled=enabled)
        device = RoundDevice(capture=capture, queue=LateQueue())
        engine = Engine(target, tiny_drafter, config=options(), device=device)
        assert tokens_of(run(engine, asked)) == tokens_of(theirs)
        logged = [line for line in caplog.messages if "runs eagerly: not while capturing" in line]
        assert len(logged) == len(graphs_of(engine).refused) == (4 if enabled else 0), "once per kind of pass"
        caplog.clear()
