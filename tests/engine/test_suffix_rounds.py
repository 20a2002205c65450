"""Suffix drafts in rounds on a device that runs late: the host looks them up a step behind, and no answer shows it."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from each import each
from engine.late_queue import LateQueue
from engine.round_engines import make_moody, round_engine
from engine.test_engine import OFF, at_depth, request, run
from engine.test_suffix_drafts import AUTO, FORCED, SAMPLINGS, SUFFIX, quoting, with_suffix
from eyas.drafter.model import Drafter
from eyas.engine.engine import Engine
from eyas.engine.proposer import DraftPlan
from eyas.engine.request import SequenceState, Speculation
from eyas.engine.speculation.captured_shapes import OFFERED_ROWS
from eyas.engine.speculation.draft import MOST_IN_CHAIN, MOST_IN_TREE
from eyas.engine.speculation.suffix_choice import SuffixChoice
from eyas.engine.suffix.config import MOST_DRAFTS, SuffixConfig
from eyas.engine.suffix.drafts import SuffixDrafts
from eyas.engine.suffix.lookup_gate import LookupGate
from eyas.plan.shapes import OFFERED, offered
from eyas.target.model import Target

__all__ = ["quoting"]


@pytest.mark.parametrize("changes", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("drafter", [False, True], ids=["alone", "beside a drafter"])
def test_rounds_with_suffix_drafts_give_the_answers_without(
    target: Target, tiny_drafter: Drafter, quoting: list[tuple[int, ...]], changes: dict[str, Any], drafter: bool
) -> None:
    made = tiny_drafter if drafter else None
    wanted = [request(prompt, max_new_tokens=30, speculation=OFF, **changes) for prompt in quoting[:4]]
    expected = run(Engine(target, None, config=with_suffix(suffix=None)), wanted)
    for speculation in (FORCED, AUTO):
        engine = round_engine(target, made, with_suffix(), LateQueue(seed=1, haste=0.3))
        for again in (False, True):
            answers = run(engine, [replace(one, speculation=speculation) for one in wanted])
            assert [(a.tokens, a.text, a.finished) for a in answers] == [
                (a.tokens, a.text, a.finished) for a in expected
            ]
            if speculation is FORCED and again:  # now the answers themselves are there to be drafted
                assert sum(answer.stats.suffix_accepted for answer in answers) > 0


@pytest.mark.parametrize("synchronous", [True, False])
def test_what_is_counted_as_drafted_is_what_the_device_verified(
    target: Target, quoting: list[tuple[int, ...]], synchronous: bool
) -> None:
    """The host finds out whether an offer stood by the tokens alone, and must come to what the device found."""
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
    run(engine, [request(prompt, max_new_tokens=30, speculation=FORCED) for prompt in quoting[:1]])
    counted = engine.stats.suffix_drafted
    # A step that was launched for an answer which the one before it ended counts for nobody.
    assert 0 < counted <= verified <= counted + 6


def test_copying_goes_on_at_full_depth_although_the_host_is_a_step_behind(target: Target) -> None:
    """An answer that loops is drafted as deep in flight as it is without."""
    prompt = (5, 9, 5, 9, 5, 9, 5, 9)
    sampling = {"max_new_tokens": 60, "speculation": FORCED}
    bias = {"sampling": replace(request(prompt).sampling, allowed_tokens=frozenset({5}))}
    lengths = []
    for synchronous in (True, False):
        engine = round_engine(target, None, with_suffix(), synchronous=synchronous)
        run(engine, [request(prompt, **sampling, **bias)])
        lengths.append(engine.stats.tokens_per_pass)
    assert min(lengths) > 4
    assert lengths[1] > 0.8 * lengths[0]


@pytest.mark.parametrize("synchronous", [True, False])
def test_rounds_of_suffix_drafts_go_deeper_than_a_drafter_may(target: Target, synchronous: bool) -> None:
    """For few requests: fifteen deep where a drafter goes three deep, a step behind or not."""
    prompt = (5, 9, 5, 9, 5, 9, 5, 9)
    looping = replace(request(prompt).sampling, allowed_tokens=frozenset({5}))
    deep = Speculation(mode="fixed", depth=15, method="suffix")
    engine = round_engine(target, None, with_suffix(max_depth=3), synchronous=synchronous)
    (answer,) = run(engine, [request(prompt, max_new_tokens=120, speculation=deep, sampling=looping)])
    assert answer.tokens == (5,) * 120
    assert engine.stats.tokens_per_pass > 8


@pytest.mark.parametrize(
    ("speculation", "most"),
    [
        (at_depth(MOST_IN_CHAIN), MOST_IN_CHAIN),
        (Speculation(mode="fixed", depth=MOST_DRAFTS, method="suffix"), OFFERED),
        (AUTO, 0),
    ],
    ids=["drafter", "suffix", "auto"],
)
def test_rounds_of_the_deepest_chains_give_the_same_answers(
    target: Target, tiny_drafter: Drafter, quoting: list[tuple[int, ...]], speculation: Speculation, most: int
) -> None:
    wanted = [request(prompt, max_new_tokens=60, speculation=OFF) for prompt in quoting[:4]]
    expected = run(Engine(target, None, config=with_suffix(suffix=None)), wanted)
    suffix = SuffixConfig(num_speculative_tokens=MOST_DRAFTS, max_spec_factor=48.0)
    settings = with_suffix(suffix=suffix, max_depth=MOST_IN_CHAIN, max_num_batched_tokens=512)
    engine, drafted = round_engine(target, tiny_drafter, settings), list[int]()
    answers = engine.generate(
        [replace(one, speculation=speculation) for one in wanted], on_piece=lambda piece: drafted.append(piece.drafted)
    )
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in expected]
    assert max(drafted) >= most
    assert max(MOST_IN_CHAIN, MOST_DRAFTS) < MOST_IN_TREE


def test_many_requests_draft_no_deeper_than_a_drafter_may(target: Target, quoting: list[tuple[int, ...]]) -> None:
    engine = round_engine(target, None, with_suffix(max_depth=3))
    deep = Speculation(mode="fixed", depth=15, method="suffix")
    for prompt in quoting[:6]:
        engine.submit(request(prompt, max_new_tokens=40, speculation=deep))
    most = 0
    while engine.busy:
        many = len(engine.scheduler.running) > OFFERED_ROWS and not engine.scheduler.waiting
        drafted = [piece.drafted for piece in engine.step()]
        most = max(most, *drafted) if many and len(drafted) > OFFERED_ROWS else most
    assert most == 3


def extend_every_round(monkeypatch: pytest.MonkeyPatch, engine: Engine, *, over_drafter: float = 100.0) -> None:
    """From now on the drafter drafts for all, and what was looked up goes on behind its chains where it says the same.

    It takes their place where it promises more than so many times what they do.
    """
    source = random.Random(6)
    make_moody(engine, lambda: source.choice([1, 2, 3]))
    monkeypatch.setattr("eyas.engine.suffix.proposer.OVER_DRAFTER", over_drafter)
    monkeypatch.setattr(SuffixChoice, "round_depth", lambda *_: 0)
    monkeypatch.setattr(
        SuffixChoice, "round_beyond", lambda self, rows, depth, *_: max(self.shapes.offered_for(rows), default=depth)
    )


@each("exact", [False, True])
@pytest.mark.parametrize("changes", SAMPLINGS.values(), ids=SAMPLINGS)
def test_rounds_in_which_the_text_continues_a_drafters_chain_give_the_answers_without(
    target: Target,
    tiny_drafter: Drafter,
    quoting: list[tuple[int, ...]],
    changes: dict[str, Any],
    exact: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted = [request(prompt, max_new_tokens=30, speculation=OFF, **changes) for prompt in quoting[:4]]
    expected = run(Engine(target, None, config=with_suffix(suffix=None)), wanted)
    engine = round_engine(target, tiny_drafter, with_suffix(max_depth=3), LateQueue(seed=1, haste=0.3), exact=exact)
    extend_every_round(monkeypatch, engine)
    continued = confirmed = 0
    for _ in range(2):  # the second time the answers are there to be drafted
        keys = [engine.submit(replace(one, speculation=AUTO)) for one in wanted]
        tokens: dict[int, list[int]] = {key: [] for key in keys}
        while engine.busy:
            for piece in engine.step():
                tokens[piece.key] += piece.tokens
                assert len(piece.sources) == len(piece.tokens)
                continued += piece.drafted > piece.suffix_drafted > 0
                confirmed += {"drafter", "suffix"} <= set(piece.sources)
            engine.scheduler.check()
        assert [tuple(tokens[key]) for key in keys] == [answer.tokens for answer in expected]
    if len(expected[0].tokens) == 30:  # answers of a few tokens hardly repeat themselves
        assert continued
        assert confirmed
    assert engine.controller.acceptance.rounds > 0, "the drafter's own drafts teach as ever"


@each("exact", [False, True])
@pytest.mark.parametrize("over_drafter", [0.0, 1.0])
def test_users_come_and_go_while_the_text_continues_chains_and_replaces_them(
    target: Target,
    tiny_drafter: Drafter,
    quoting: list[tuple[int, ...]],
    over_drafter: float,
    exact: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = random.Random(9)
    wanted = [request(source.choice(quoting), max_new_tokens=source.randrange(20, 60)) for _ in range(10)]
    plain = [replace(one, speculation=OFF) for one in wanted]
    expected = [answer.tokens for answer in run(Engine(target, None, config=with_suffix(suffix=None)), plain)]
    per_block = Engine(target, tiny_drafter, config=with_suffix()).budget.bytes_per_block
    config = with_suffix(max_depth=3, max_model_len=128, memory=60 * per_block)
    engine = round_engine(target, tiny_drafter, config, LateQueue(seed=3, haste=0.4), exact=exact)
    extend_every_round(monkeypatch, engine, over_drafter=over_drafter)
    left, tokens, preempted = list(wanted), dict[int, list[int]](), set[int]()
    while left or engine.busy:
        if left and source.random() < 0.9:
            tokens[engine.submit(replace(left.pop(0), speculation=AUTO))] = []
        for piece in engine.step():
            tokens[piece.key] += piece.tokens
        engine.scheduler.check()
        preempted |= {seq.key for seq in engine.scheduler.requests if seq.preemptions}
    assert [tuple(tokens[key]) for key in sorted(tokens)] == expected
    assert engine.stats.suffix_accepted > 0
    assert preempted


@each("exact", [False, True])
def test_requests_in_all_modes_get_what_they_would_alone(
    target: Target, tiny_drafter: Drafter, quoting: list[tuple[int, ...]], exact: bool
) -> None:
    source = random.Random(4)
    modes = [SUFFIX, FORCED, AUTO, OFF, at_depth(3), Speculation(method="eagle3")]
    wanted = [
        request(source.choice(quoting), max_new_tokens=source.randrange(1, 50), speculation=source.choice(modes))
        for _ in range(16)
    ]
    plain = [request(one.prompt, max_new_tokens=one.max_new_tokens, speculation=OFF) for one in wanted]
    expected = [answer.tokens for answer in run(Engine(target, None, config=with_suffix(suffix=None)), plain)]
    engine = round_engine(target, tiny_drafter, with_suffix(), LateQueue(seed=2, haste=0.5), exact=exact)
    left, tokens = list(wanted), dict[int, list[int]]()
    while left or engine.busy:
        if left and source.random() < 0.4:
            tokens[engine.submit(left.pop(0))] = []
        for piece in engine.step():
            assert len(piece.sources) == len(piece.tokens)
            tokens[piece.key] += piece.tokens
        engine.scheduler.check()
    assert [tuple(tokens[key]) for key in sorted(tokens)] == expected
    assert engine.stats.suffix_accepted > 0
    assert engine.stats.accepted > engine.stats.suffix_accepted


@each("exact", [False, True])
def test_preemption_does_not_show_in_rounds(
    target: Target, tiny_drafter: Drafter, quoting: list[tuple[int, ...]], exact: bool
) -> None:
    wanted = [request(prompt, max_new_tokens=50, speculation=FORCED) for prompt in quoting]
    expected = run(Engine(target, None, config=with_suffix()), wanted)
    per_block = Engine(target, tiny_drafter, config=with_suffix()).budget.bytes_per_block
    manner = with_suffix(max_model_len=128, memory=60 * per_block)
    engine = round_engine(target, tiny_drafter, manner, exact=exact)
    preempted, tokens = set[int](), dict[int, list[int]]()
    keys = [engine.submit(one) for one in wanted]
    while engine.busy:
        for piece in engine.step():
            tokens.setdefault(piece.key, []).extend(piece.tokens)
        engine.scheduler.check()
        preempted |= {seq.key for seq in engine.scheduler.requests if seq.preemptions}
    assert preempted
    assert [tuple(tokens[key]) for key in keys] == [answer.tokens for answer in expected]


def test_steps_captured_ahead_time_steps_of_suffix_drafts_alone(target: Target) -> None:
    engine = round_engine(target, None, with_suffix())
    engine.capture_graphs()
    depths = engine.core.runner.shapes.offered_for(1)
    assert max(depths) == OFFERED
    assert {offered(depth) for depth in depths} <= set(engine.controller.costs._rehearsed)


def test_a_round_of_suffix_drafts_leaves_the_drafters_choice_as_it_is(
    target: Target, tiny_drafter: Drafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the controller would choose anew before and behind each, which takes the host longer than a small pass."""
    engine = round_engine(target, tiny_drafter, with_suffix())
    chosen, choose = list[bool](), engine.controller.choose

    def counted(*rows: Any, **options: Any) -> Any:
        chosen.append(True)
        return choose(*rows, **options)

    monkeypatch.setattr(engine.controller, "choose", counted)
    monkeypatch.setattr(SuffixChoice, "round_depth", lambda *_: 3)
    monkeypatch.setattr(LookupGate, "is_open", lambda *_: True)
    monkeypatch.setattr(LookupGate, "due", lambda *_: True)  # or some rounds are the drafter's
    looping = replace(request((5, 9)).sampling, allowed_tokens=frozenset({5}))
    run(engine, [request((5, 9, 5, 9, 5, 9, 5, 9), max_new_tokens=80, sampling=looping)])
    assert engine.stats.suffix_accepted > 40
    assert not chosen


def test_many_requests_are_not_looked_up(
    target: Target, quoting: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_requests_that_are_sent_nothing_are_looked_up_ever_more_rarely(
    target: Target, quoting: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = round_engine(target, None, with_suffix())
    looked_up: list[int] = []
    offer = SuffixDrafts.offer

    def counted(self: SuffixDrafts, seq: SequenceState, *given: Any, **named: Any) -> Any:
        looked_up.append(seq.key)
        return offer(self, seq, *given, **named)

    monkeypatch.setattr(SuffixDrafts, "offer", counted)
    monkeypatch.setattr(SuffixChoice, "round_depth", lambda *_: 0)  # nothing pays
    run(engine, [request(prompt, max_new_tokens=40, speculation=AUTO) for prompt in quoting[: OFFERED_ROWS + 2]])
    most = max(looked_up.count(key) for key in set(looked_up))
    assert 3 <= most <= 12


def test_where_look_ups_do_not_pay_nothing_is_looked_up(
    monkeypatch: pytest.MonkeyPatch, target: Target, quoting: list[tuple[int, ...]]
) -> None:
    monkeypatch.setattr(LookupGate, "is_open", lambda *_: False)
    looked_up = list[SequenceState]()
    offer = SuffixDrafts.offer

    def noted(drafts: SuffixDrafts, seq: SequenceState, *arguments: Any, **options: Any) -> Any:
        looked_up.append(seq)
        return offer(drafts, seq, *arguments, **options)

    monkeypatch.setattr(SuffixDrafts, "offer", noted)
    engine = round_engine(target, None, with_suffix())
    (answer,) = run(engine, [request(quoting[0], max_new_tokens=30, speculation=AUTO)])
    assert answer.stats.passes > 20
    assert not looked_up
    run(engine, [request(quoting[0], max_new_tokens=30, speculation=FORCED)])
    assert looked_up, "who asks for suffix drafts has them"
