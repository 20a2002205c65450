"""Suffix drafts in rounds on a late device: the host looks them up one step behind, and answers do not show it."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from each import each
from engine.common import (
    AUTO,
    OFF,
    Prompts,
    at_depth,
    bytes_for,
    request,
    requests,
    run,
    run_preempted,
    tokens_of,
)
from engine.late_queue import LateQueue
from engine.round_engines import make_moody, round_engine
from engine.test_suffix_drafts import FORCED, SAMPLINGS, SUFFIX, quoting, with_suffix
from eyas.drafter.model import Drafter
from eyas.engine.engine import Engine
from eyas.engine.output import OutputDelta
from eyas.engine.proposer import DraftPlan
from eyas.engine.request import Request, SequenceState, Speculation
from eyas.engine.scheduler import SchedulerOutput
from eyas.engine.speculation.captured_shapes import OFFERED_ROWS
from eyas.engine.speculation.draft import MOST_IN_CHAIN, MOST_IN_TREE
from eyas.engine.speculation.suffix_choice import SuffixChoice
from eyas.engine.suffix.config import MOST_DRAFTS, SuffixConfig
from eyas.engine.suffix.drafts import SuffixDrafts
from eyas.engine.suffix.lookup_gate import LookupGate
from eyas.plan.shapes import OFFERED, offered
from eyas.target.model import Target

__all__ = ["quoting"]


@each("changes", SAMPLINGS.values())
@pytest.mark.parametrize("drafter", [False, True], ids=["alone", "beside a drafter"])
def test_rounds_with_suffix_drafts_give_the_answers_without(
    target: Target, tiny_drafter: Drafter, quoting: Prompts, changes: dict[str, Any], drafter: bool
) -> None:
    made = tiny_drafter if drafter else None
    asked = requests(quoting[:4], max_new_tokens=30, speculation=OFF, **changes)
    expected = run(Engine(target, None, config=with_suffix(suffix=None)), asked)
    for speculation in (FORCED, AUTO):
        engine = round_engine(target, made, with_suffix(), LateQueue(seed=1, haste=0.3))
        for again in (False, True):
            answers = run(engine, [replace(one, speculation=speculation) for one in asked])
            for answer, plain in zip(answers, expected, strict=True):
                assert (answer.tokens, answer.text, answer.finished) == (plain.tokens, plain.text, plain.finished)
            if speculation is FORCED and again:  # now the answers themselves can be drafted
                assert sum(answer.stats.suffix_accepted for answer in answers) > 0


@each("synchronous", [True, False])
def test_suffix_drafts_are_counted_as_the_device_verified_them(
    target: Target, quoting: Prompts, synchronous: bool
) -> None:
    """The host infers from the tokens whether an offer was used, and must agree with the device."""
    engine = round_engine(target, None, with_suffix(), synchronous=synchronous)
    state, verified = engine.core.runner.state, 0
    placing = engine.core.runner.graphs.placing

    def place(rows: int, depth: int, own_depth: int) -> Any:
        captured = placing(rows, depth, own_depth)

        def counting() -> None:
            nonlocal verified
            captured()
            real = state.row_slot[:rows] != state.nobody
            verified += int((state.depth_R[:rows] * real).sum())

        return counting

    engine.core.runner.graphs.placing = place  # type: ignore[method-assign]
    run(engine, requests(quoting[:1], max_new_tokens=30, speculation=FORCED))
    counted = engine.stats.suffix_drafted
    # A step launched for an answer that the previous step ended is not counted.
    assert 0 < counted <= verified <= counted + 6


LOOP = (5, 9, 5, 9, 5, 9, 5, 9)
LOOPING = replace(request(LOOP).sampling, allowed_tokens=frozenset({5}))
DEEP = Speculation(mode="fixed", depth=15, method="suffix")


def test_a_loop_is_drafted_at_full_depth_although_the_host_is_a_step_behind(target: Target) -> None:
    lengths = []
    for synchronous in (True, False):
        engine = round_engine(target, None, with_suffix(), synchronous=synchronous)
        run(engine, [request(LOOP, max_new_tokens=60, speculation=FORCED, sampling=LOOPING)])
        lengths.append(engine.stats.tokens_per_pass)
    assert min(lengths) > 4
    assert lengths[1] > 0.8 * lengths[0]


@each("synchronous", [True, False])
def test_rounds_of_suffix_drafts_go_deeper_than_a_drafter_may(target: Target, synchronous: bool) -> None:
    """For few requests: 15 deep where a drafter goes 3 deep."""
    engine = round_engine(target, None, with_suffix(max_depth=3), synchronous=synchronous)
    (answer,) = run(engine, [request(LOOP, max_new_tokens=120, speculation=DEEP, sampling=LOOPING)])
    assert answer.tokens == (5,) * 120
    assert engine.stats.tokens_per_pass > 8


@each(
    ("speculation", "most"),
    [
        (at_depth(MOST_IN_CHAIN), MOST_IN_CHAIN),
        (Speculation(mode="fixed", depth=MOST_DRAFTS, method="suffix"), OFFERED),
        (AUTO, 0),
    ],
)
def test_rounds_of_the_deepest_chains_give_the_same_answers(
    target: Target, tiny_drafter: Drafter, quoting: Prompts, speculation: Speculation, most: int
) -> None:
    asked = requests(quoting[:4], max_new_tokens=60, speculation=OFF)
    expected = run(Engine(target, None, config=with_suffix(suffix=None)), asked)
    suffix = SuffixConfig(num_speculative_tokens=MOST_DRAFTS, max_spec_factor=48.0)
    settings = with_suffix(suffix=suffix, max_depth=MOST_IN_CHAIN, max_num_batched_tokens=512)
    engine, drafted = round_engine(target, tiny_drafter, settings), list[int]()
    asked = [replace(one, speculation=speculation) for one in asked]
    answers = engine.generate(asked, on_piece=lambda delta: drafted.append(delta.drafted))
    assert tokens_of(answers) == tokens_of(expected)
    assert max(drafted) >= most
    assert max(MOST_IN_CHAIN, MOST_DRAFTS) < MOST_IN_TREE


def test_many_requests_draft_no_deeper_than_a_drafter_may(target: Target, quoting: Prompts) -> None:
    engine = round_engine(target, None, with_suffix(max_depth=3))
    for one in requests(quoting[:6], max_new_tokens=40, speculation=DEEP):
        engine.submit(one)
    most = 0
    while engine.busy:
        many = len(engine.scheduler.running) > OFFERED_ROWS and not engine.scheduler.waiting
        drafted = [piece.drafted for piece in engine.step()]
        most = max(most, *drafted) if many and len(drafted) > OFFERED_ROWS else most
    assert most == 3


def extend_every_round(monkeypatch: pytest.MonkeyPatch, engine: Engine, *, over_drafter: float = 100.0) -> None:
    """Let the drafter draft for all; suffix drafts extend its chains where they agree.

    They replace chains where they promise more than `over_drafter` times as much.
    """
    source = random.Random(6)
    make_moody(engine, lambda: source.choice([1, 2, 3]))
    monkeypatch.setattr("eyas.engine.suffix.proposer.OVER_DRAFTER", over_drafter)
    monkeypatch.setattr(SuffixChoice, "round_depth", lambda *_: 0)
    monkeypatch.setattr(
        SuffixChoice, "round_beyond", lambda self, rows, depth, *_: max(self.shapes.offered_for(rows), default=depth)
    )


@each("exact", [False, True])
@each("changes", SAMPLINGS.values())
def test_rounds_in_which_the_text_continues_a_drafters_chain_give_the_answers_without(
    target: Target,
    tiny_drafter: Drafter,
    quoting: Prompts,
    changes: dict[str, Any],
    exact: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = requests(quoting[:4], max_new_tokens=30, speculation=OFF, **changes)
    expected = run(Engine(target, None, config=with_suffix(suffix=None)), asked)
    engine = round_engine(target, tiny_drafter, with_suffix(max_depth=3), LateQueue(seed=1, haste=0.3), exact=exact)
    extend_every_round(monkeypatch, engine)
    deltas = list[OutputDelta]()
    for _ in range(2):  # the second time the answers can be drafted
        answers = engine.generate([replace(one, speculation=AUTO) for one in asked], on_piece=deltas.append)
        engine.scheduler.check()
        assert tokens_of(answers) == tokens_of(expected)
    assert all(len(delta.sources) == len(delta.tokens) for delta in deltas)
    if len(expected[0].tokens) == 30:  # short answers rarely repeat themselves
        assert any(delta.drafted > delta.suffix_drafted > 0 for delta in deltas)
        assert any({"drafter", "suffix"} <= set(delta.sources) for delta in deltas)
    assert engine.controller.acceptance.rounds > 0, "the drafter's own drafts are learned from"


def served(engine: Engine, asked: Sequence[Request], source: random.Random, arrivals: float) -> Prompts:
    """Answers of requests that come at random, in their order."""
    left, tokens = list(asked), dict[int, list[int]]()
    while left or engine.busy:
        if left and source.random() < arrivals:
            tokens[engine.submit(left.pop(0))] = []
        for delta in engine.step():
            assert len(delta.sources) == len(delta.tokens)
            tokens[delta.key] += delta.tokens
        engine.scheduler.check()
    return [tuple(tokens[key]) for key in sorted(tokens)]


@each("exact", [False, True])
@each("over_drafter", [0.0, 1.0])
def test_users_come_and_go_while_the_text_continues_chains_and_replaces_them(
    target: Target,
    tiny_drafter: Drafter,
    quoting: Prompts,
    over_drafter: float,
    exact: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source, preempted = random.Random(9), set[int]()
    asked = [
        request(source.choice(quoting), max_new_tokens=source.randrange(20, 60), speculation=AUTO) for _ in range(10)
    ]
    plain = [replace(one, speculation=OFF) for one in asked]
    expected = tokens_of(run(Engine(target, None, config=with_suffix(suffix=None)), plain))
    memory = bytes_for(60, target, tiny_drafter, with_suffix())
    config = with_suffix(max_depth=3, max_model_len=128, memory=memory)
    engine = round_engine(target, tiny_drafter, config, LateQueue(seed=3, haste=0.4), exact=exact)
    extend_every_round(monkeypatch, engine, over_drafter=over_drafter)
    plan = engine.scheduler.plan

    def watched(*given: Any) -> SchedulerOutput:
        output = plan(*given)
        preempted.update(seq.key for seq in output.preempted)
        return output

    monkeypatch.setattr(engine.scheduler, "plan", watched)
    assert served(engine, asked, source, 0.9) == expected
    assert engine.stats.suffix_accepted > 0
    assert preempted


@each("exact", [False, True])
def test_requests_in_all_modes_get_the_answers_they_get_alone(
    target: Target, tiny_drafter: Drafter, quoting: Prompts, exact: bool
) -> None:
    source = random.Random(4)
    modes = [SUFFIX, FORCED, AUTO, OFF, at_depth(3), Speculation(method="eagle3")]
    asked = [
        request(source.choice(quoting), max_new_tokens=source.randrange(1, 50), speculation=source.choice(modes))
        for _ in range(16)
    ]
    plain = [replace(one, speculation=OFF) for one in asked]
    expected = tokens_of(run(Engine(target, None, config=with_suffix(suffix=None)), plain))
    engine = round_engine(target, tiny_drafter, with_suffix(), LateQueue(seed=2, haste=0.5), exact=exact)
    assert served(engine, asked, source, 0.4) == expected
    assert engine.stats.suffix_accepted > 0
    assert engine.stats.accepted > engine.stats.suffix_accepted


@each("exact", [False, True])
def test_preemption_does_not_show_in_rounds(
    target: Target, tiny_drafter: Drafter, quoting: Prompts, exact: bool
) -> None:
    asked = requests(quoting, max_new_tokens=50, speculation=FORCED)
    expected = run(Engine(target, None, config=with_suffix()), asked)
    memory = bytes_for(60, target, tiny_drafter, with_suffix())
    engine = round_engine(target, tiny_drafter, with_suffix(max_model_len=128, memory=memory), exact=exact)
    assert tokens_of(run_preempted(engine, asked)) == tokens_of(expected)


def test_capturing_ahead_times_steps_of_suffix_drafts_alone(target: Target) -> None:
    engine = round_engine(target, None, with_suffix())
    engine.capture_graphs()
    depths = engine.core.runner.shapes.offered_for(1)
    assert max(depths) == OFFERED
    assert {offered(depth) for depth in depths} <= set(engine.controller.costs._rehearsed)


def test_a_round_of_suffix_drafts_keeps_the_drafters_choice(
    target: Target, tiny_drafter: Drafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the controller would choose again around each, which takes the host longer than a small pass."""
    engine = round_engine(target, tiny_drafter, with_suffix())
    chosen, choose = list[bool](), engine.controller.choose

    def counted(*rows: Any, **options: Any) -> Any:
        chosen.append(True)
        return choose(*rows, **options)

    monkeypatch.setattr(engine.controller, "choose", counted)
    monkeypatch.setattr(SuffixChoice, "round_depth", lambda *_: 3)
    monkeypatch.setattr(LookupGate, "is_open", lambda *_: True)
    monkeypatch.setattr(LookupGate, "due", lambda *_: True)  # otherwise some rounds are the drafter's
    run(engine, [request(LOOP, max_new_tokens=80, sampling=LOOPING)])
    assert engine.stats.suffix_accepted > 40
    assert not chosen


def test_many_requests_are_not_looked_up(target: Target, quoting: Prompts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eyas.engine.suffix.proposer.MOST_IN_A_ROUND", 2)
    engine = round_engine(target, None, with_suffix())
    plan, looked = engine.proposer.plan, dict[int, int]()

    def watched(decoding: Sequence[SequenceState]) -> DraftPlan:
        planned = plan(decoding)
        looked[len(decoding)] = looked.get(len(decoding), 0) + len(planned.offers)
        return planned

    monkeypatch.setattr(engine.proposer, "plan", watched)
    run(engine, [request(prompt, max_new_tokens=10 + 5 * number) for number, prompt in enumerate(quoting[:4])])
    assert looked[1] > 0
    assert looked[3] == looked[4] == 0


@pytest.fixture
def looked_up(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Collects the keys of requests that are looked up."""
    keys: list[int] = []
    offer = SuffixDrafts.offer

    def noted(drafts: SuffixDrafts, seq: SequenceState, *given: Any, **named: Any) -> Any:
        keys.append(seq.key)
        return offer(drafts, seq, *given, **named)

    monkeypatch.setattr(SuffixDrafts, "offer", noted)
    return keys


def test_requests_without_useful_offers_are_looked_up_ever_more_rarely(
    target: Target, quoting: Prompts, monkeypatch: pytest.MonkeyPatch, looked_up: list[int]
) -> None:
    engine = round_engine(target, None, with_suffix())
    monkeypatch.setattr(SuffixChoice, "round_depth", lambda *_: 0)  # nothing pays
    run(engine, requests(quoting[: OFFERED_ROWS + 2], max_new_tokens=40, speculation=AUTO))
    most = max(looked_up.count(key) for key in set(looked_up))
    assert 3 <= most <= 12


def test_where_look_ups_do_not_pay_there_are_none(
    target: Target, quoting: Prompts, monkeypatch: pytest.MonkeyPatch, looked_up: list[int]
) -> None:
    monkeypatch.setattr(LookupGate, "is_open", lambda *_: False)

    engine = round_engine(target, None, with_suffix())
    (answer,) = run(engine, [request(quoting[0], max_new_tokens=30, speculation=AUTO)])
    assert answer.stats.passes > 20
    assert not looked_up
    run(engine, [request(quoting[0], max_new_tokens=30, speculation=FORCED)])
    assert looked_up, "suffix drafts that are requested are looked up"
