"""A drift check-up sees what serving drafts and what the doctor measures, and does not affect serving."""

from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from default_drafter import training_prompts
from each import each
from engine.common import OFF, SAMPLINGS, Prompts, at_depth, depths_of, options, request, requests, run, tokens_of
from engine.noted_drafts import Drafted, note_drafts
from engine.round_engines import round_engine
from eyas.doctor.rounds import run_rounds
from eyas.doctor.transcripts import Transcript
from eyas.drafter.attention_mass import REGIONS, AttentionProbe
from eyas.drafter.checkpoint import build_drafter, checkpoint_of, load_drafter
from eyas.drafter.model import Drafter
from eyas.drafter.shipped import DEFAULT_DRAFTER
from eyas.engine import drift_probe
from eyas.engine.config import EngineConfig
from eyas.engine.drafter_proposer import DrafterProposer
from eyas.engine.drift_probe import Draw, DriftSample
from eyas.engine.engine import Engine
from eyas.engine.request import SequenceState
from eyas.engine.runner.drafter import DrafterRunner
from eyas.engine.speculation.draft import Tree
from eyas.engine.speculation.drift import FEWEST_CHECKUPS
from eyas.target.model import Target
from tiny import AUX_IDS, language

DEPTH = 5


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    rows = language(8, 47, torch.Generator().manual_seed(22)).tolist()
    return [tuple(row[: 5 + 6 * i]) for i, row in enumerate(rows)]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[int, ...], int, DriftSample]]:
    """Check-ups in every step whatever they cost, with the tokens and the slot that each started from."""
    found: list[tuple[tuple[int, ...], int, DriftSample]] = []
    look = drift_probe.examine

    def examine(drafter: DrafterRunner, seq: SequenceState, states_TX: Tensor, depth: int, draw: Draw) -> DriftSample:
        one = look(drafter, seq, states_TX, depth, draw)
        found.append((tuple(seq.tokens), seq.target_length - 1, one))
        return one

    monkeypatch.setattr(drift_probe, "examine", examine)
    monkeypatch.setattr(drift_probe, "EVERY", 1)
    return found


def engine_of(target: Target, drafter: Drafter, *, recorded: bool = False, **changes: Any) -> Engine:
    """An engine that can afford a check-up in every step: its clock counts how often it is read."""
    settings = options(**{"max_depth": DEPTH, "drift_share": 0.99, **changes})
    clock = partial(next, count())
    if recorded:
        return round_engine(target, drafter, settings, clock=clock)
    return Engine(target, drafter, config=settings, clock=clock)


class Served:
    """The drafts of every step, by the tokens before them."""

    def __init__(self, engine: Engine) -> None:
        self.drafts: dict[tuple[int, ...], Drafted] = {}
        note_drafts(engine, self._note)

    def _note(self, drafted: Drafted) -> None:
        self.drafts[drafted.behind] = drafted


@each("recorded", [False, True])
@each("window", [None, 9])
def test_it_drafts_what_serving_drafts(
    target: Target, tiny_drafter: Drafter, prompts: Prompts, seen: Any, recorded: bool, window: Any
) -> None:
    seen.clear()
    engine = engine_of(target, tiny_drafter, recorded=recorded, drafter_window=window, drafter_sinks=2)
    served = Served(engine)
    run(engine, requests(prompts, max_new_tokens=40, speculation=at_depth(DEPTH)))
    compared = 0
    for tokens, _, one in seen:
        drafts = served.drafts[tokens].drafts  # fewer near the end of an answer
        assert one.tokens[: len(drafts)] == drafts
        compared += len(drafts)
    assert compared > 40


def test_it_drafts_for_sampled_requests_as_serving_does(
    target: Target, tiny_drafter: Drafter, prompts: Prompts, seen: Any
) -> None:
    engine = engine_of(target, tiny_drafter)
    served = Served(engine)
    how: dict[str, Any] = {"max_new_tokens": 30, "speculation": at_depth(DEPTH)}
    asked = [
        request(prompt, seed=seed, sampling=SAMPLINGS[seed % len(SAMPLINGS)], **how)
        for seed, prompt in enumerate(prompts)
    ]
    run(engine, asked)
    assert len(seen) > 8
    assert all(one.tokens[: len(served.drafts[at].drafts)] == served.drafts[at].drafts for at, _, one in seen)


def test_it_measures_what_the_doctor_measures(
    target: Target, tiny_drafter: Drafter, prompts: Prompts, seen: Any
) -> None:
    engine = engine_of(target, tiny_drafter)
    answers = run(engine, requests(prompts, max_new_tokens=30, speculation=at_depth(DEPTH)))
    whole = [(*prompt, *answer.tokens) for prompt, answer in zip(prompts, answers, strict=True)]
    assert len(seen) > 8
    for tokens, start, one in seen:
        number = next(i for i, ids in enumerate(whole) if ids[: len(tokens)] == tokens)
        aux_TX = target.forward(torch.tensor([whole[number]]), AUX_IDS).aux_hidden_BTX[0]
        size = len(prompts[number])
        transcript = Transcript(
            key=0,
            ids=whole[number],
            prompt_length=size,
            answer_length=len(whole[number]) - size,
            aux_TX=aux_TX,
            layer_ids=AUX_IDS,
        )
        probe = AttentionProbe(torch.tensor([start]), prompt_length=size, depth=DEPTH)
        rounds = run_rounds(tiny_drafter, transcript, depth=DEPTH, layer_ids=AUX_IDS, watcher=probe, starts=[start])
        assert rounds is not None
        assert one.tokens == tuple(rounds.token_SR[:, 0])
        assert np.allclose(one.rms, rounds.rms_SR[:, 0], rtol=1e-4)
        seen = probe.statistics()
        for region in REGIONS:
            assert np.allclose(one.mass[region], seen.mass[region][:, 0], atol=1e-5)
        assert np.allclose(sum(np.array(mass) for mass in one.mass.values()), 1.0, atol=1e-5)


@each("recorded", [False, True])
def test_answers_and_drafts_are_the_same_with_and_without(
    target: Target, tiny_drafter: Drafter, prompts: Prompts, seen: Any, recorded: bool
) -> None:
    seen.clear()
    asked = requests(prompts, max_new_tokens=30, speculation=at_depth(4))
    ours = run(engine_of(target, tiny_drafter, recorded=recorded), asked)
    assert len(seen) > 8
    watched = len(seen)
    theirs = run(engine_of(target, tiny_drafter, recorded=recorded, drift_share=0.0), asked)
    assert len(seen) == watched, "share 0 is off"
    assert tokens_of(ours) == tokens_of(theirs)
    assert depths_of(ours) == depths_of(theirs)


def test_drafts_of_a_check_up_are_followed_to_their_end(
    target: Target, tiny_drafter: Drafter, prompts: Prompts, seen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drift_probe, "EVERY", 4)  # the next check-up ends the previous one
    engine = engine_of(target, tiny_drafter)
    told: list[tuple[int, int]] = []
    engine.drift.observe_round = lambda *fate: told.append(fate[:2])  # type: ignore[method-assign]
    (answer,) = run(engine, [request(prompts[3], max_new_tokens=90, speculation=at_depth(1))])
    whole = (*prompts[3], *answer.tokens)
    expected = []
    for tokens, _, one in seen:
        came = whole[len(tokens) : len(tokens) + DEPTH]
        true = next((i for i, (a, b) in enumerate(zip(one.tokens, came, strict=False)) if a != b), len(came))
        expected.append((len(came), true))
    beyond = [(drafted, accepted) for drafted, accepted in told if accepted > 1]
    assert beyond, "deeper than serving drafts"
    assert all(any(accepted == true for _, true in expected) for _, accepted in beyond)


# --- what it costs -------------------------------------------------------------------------------------------------


def test_extra_passes_are_counted(
    target: Target, tiny_drafter: Drafter, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = [0]
    step = Drafter.step

    def counted(self: Drafter, *arguments: Any) -> Any:
        steps[0] += 1
        return step(self, *arguments)

    monkeypatch.setattr(Drafter, "step", counted)
    asked = requests(prompts, max_new_tokens=60, speculation=at_depth(3))
    without = engine_of(target, tiny_drafter, drift_share=0.0)
    run(without, asked)
    plain, steps[0] = steps[0], 0
    engine = engine_of(target, tiny_drafter)
    run(engine, asked)
    assert 2 <= engine.drift.checkups <= engine.stats.drafts / drift_probe.EVERY
    assert steps[0] - plain == DEPTH * engine.drift.checkups


@each("share", [0.1, 0.03])
def test_check_ups_keep_to_their_share_of_time(
    target: Target, tiny_drafter: Drafter, prompts: Prompts, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    """With a clock by which a step takes a second and a check-up half a second."""
    now = [0.0]
    look = drift_probe.examine

    def examine(*arguments: Any) -> DriftSample:
        now[0] += 0.5
        return look(*arguments)

    monkeypatch.setattr(drift_probe, "examine", examine)
    monkeypatch.setattr(drift_probe, "EVERY", 1)
    settings = options(max_depth=DEPTH, drift_share=share)
    engine = Engine(target, tiny_drafter, config=settings, clock=lambda: now[0])
    for one in requests(prompts, max_new_tokens=70, speculation=at_depth(1)):
        engine.submit(one)
    while engine.busy:
        engine.step()
        now[0] += 1.0
    spent = 0.5 * engine.drift.checkups
    assert 0.5 * share * now[0] < spent <= share * now[0]
    assert engine.drift.report().seconds == pytest.approx(spent)


def test_steps_without_drafts_do_not_count_as_time(
    target: Target, tiny_drafter: Drafter, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two seconds of drafting after a thousand of plain decoding do not pay for a check-up of one."""
    now, examined = [0.0], list[float]()

    def examine(drafter: DrafterRunner, seq: SequenceState, *_: object) -> DriftSample:
        examined.append(now[0])
        now[0] += 1.0
        return DriftSample(rms=(1.0,) * DEPTH, mass={}, tokens=())

    monkeypatch.setattr(drift_probe, "examine", examine)
    monkeypatch.setattr(drift_probe, "EVERY", 1)
    engine = Engine(target, tiny_drafter, config=options(max_depth=DEPTH, drift_share=0.4), clock=lambda: now[0])

    def serve(depth: int, tokens: int) -> None:
        engine.submit(request(prompts[0], max_new_tokens=tokens, speculation=at_depth(depth) if depth else OFF))
        while engine.busy:
            engine.step()
            now[0] += 1.0

    for _ in range(20):
        serve(0, 50)
    serve(1, 6)
    assert not examined
    serve(1, 70)
    assert examined


# --- consequences --------------------------------------------------------------------------------------------------


def served_alarm(target: Target, drafter: Drafter, prompts: Prompts) -> Engine:
    engine = engine_of(target, drafter, max_depth=7)
    run(engine, requests(prompts, max_new_tokens=70, speculation=at_depth(7)))
    assert engine.drift.checkups >= 16
    return engine


def test_a_lost_norm_fires_and_a_healthy_drafter_does_not(
    target: Target, tiny_drafter: Drafter, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drift_probe, "EVERY", 4)
    assert served_alarm(target, tiny_drafter, prompts).controller.events() == []
    healthy = checkpoint_of(tiny_drafter)
    fault = replace(healthy, config=replace(healthy.config, norm_output=False))
    ill = build_drafter(fault).share_target(target.embedding(), target.head())
    engine = served_alarm(target, ill, prompts)
    assert engine.drift.report().firing
    assert engine.drift.deepest < 7
    assert any("drift alarm" in event for event in engine.controller.events())


def test_trees_of_requests_on_auto_grow_no_deeper_than_is_healthy(
    target: Target, tiny_drafter: Drafter, prompts: Prompts
) -> None:
    engine = engine_of(target, tiny_drafter, tree=Tree(depth=4, width=2, budget=8), drift_share=1e-9)
    for _ in range(FEWEST_CHECKUPS):
        engine.drift.observe_checkup([1.0, 1.0, 9.0, 9.0, 9.0], {})
    assert engine.drift.deepest == 2
    served = Served(engine)
    fixed = request(prompts[0], speculation=at_depth(4))
    run(engine, [fixed, *requests(prompts[1:], max_new_tokens=40)])
    run(engine, [fixed])  # among others it gets trees of their shape
    auto = [one.depth for tokens, one in served.drafts.items() if tokens[:5] != prompts[0][:5]]
    assert max(auto) == 2
    assert max(one.depth for tokens, one in served.drafts.items() if tokens[:5] == prompts[0][:5]) == 4


@each("served", [False, True])
def test_a_rehearsal_measures_a_check_up_and_leaves_nothing_behind(
    target: Target, tiny_drafter: Drafter, prompts: Prompts, served: bool
) -> None:
    """Before the first request there are no blocks; later they belong to requests and stay as they are."""
    engine = engine_of(target, tiny_drafter, recorded=True)
    asked = requests(prompts, speculation=at_depth(3))
    expected = tokens_of(run(engine, asked)) if served else None
    before = engine.drift.checkups
    engine.capture_graphs()
    assert isinstance(engine.proposer, DrafterProposer)
    assert engine.proposer.drift_probe._cost is not None
    assert engine.proposer.drift_probe._cost > 0
    assert engine.drift.checkups == before
    answers = tokens_of(run(engine, asked))
    assert expected is None or answers == expected
    assert engine.drift.checkups > before
    engine.scheduler.check()


@pytest.mark.slow
@pytest.mark.default
def test_the_shipped_drafter_is_silent_and_fires_without_its_norm(
    default_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drift_probe, "EVERY", 1)
    questions = training_prompts()
    chats = [tuple(default_target.encode_chat([{"role": "user", "content": text}])) for text in questions[:2]]
    bare = tuple(default_target.tokenizer(questions[2])["input_ids"])
    healthy = checkpoint_of(load_drafter(DEFAULT_DRAFTER["smollm2"]))
    lost = replace(healthy, config=replace(healthy.config, norm_output=False))
    reports = []
    for shipped, asked in ((healthy, [*chats, bare]), (lost, chats)):
        drafter = build_drafter(shipped).float().share_target(default_target.embedding(), default_target.head())
        engine = Engine(
            default_target, drafter, config=EngineConfig(max_num_seqs=3, max_model_len=512, drift_share=0.9)
        )
        engine.generate(requests(asked, max_new_tokens=18, speculation=at_depth(1)))
        reports.append(engine.drift.report())
        assert reports[-1].checkups >= FEWEST_CHECKUPS
        assert reports[-1].firing == bool(engine.controller.events()) == (shipped is lost)
    assert abs(reports[0].growth.value) < 0.02 < 0.2 < reports[1].growth.value
