"""A run can be stopped, resumed and shared between processes without changing the result."""

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import tiny
from each import each
from eyas.drafter.checkpoint import load_drafter
from eyas.target.model import Target
from eyas.target.parts import TargetParts
from eyas.train import resume
from eyas.train.batch import CorpusPacks, TrainingBatch
from eyas.train.corpus.corpus import Corpus
from eyas.train.estimate import RoundCounts
from eyas.train.features import Features
from eyas.train.init import config_for, init_drafter
from eyas.train.loop import DivergedError, LoopConfig, LoopResult, TrainMetrics, train
from eyas.train.ranks import Ranks
from eyas.train.recipe import DrafterSettings, TrainSettings
from eyas.train.schedule import LearningRateSchedule, RunLength
from eyas.train.sources.live import LiveSource
from eyas.train.state import TrainState

pytestmark = pytest.mark.slow

STEPS = 6


class Diary:
    """Records what the loop reports."""

    def __init__(self) -> None:
        self.reports: list[TrainMetrics] = []
        self.estimates: dict[int, dict[str, RoundCounts]] = {}
        self.places: list[Path] = []

    def progressed(self, report: TrainMetrics) -> None:
        self.reports.append(report)

    def estimated(self, step: int, counts: dict[str, RoundCounts]) -> None:
        self.estimates[step] = counts

    def saved(self, step: int, place: Path) -> None:
        self.places.append(place)

    def losses(self, name: str = "drafter") -> list[float]:
        return [report.drafters[name].loss for report in self.reports]


def corpus_of(documents: int, *, seed: int = 0, length: int = 24) -> Corpus:
    """Texts of the tiny language; the first four tokens are the prompt."""
    ids = tiny.language(documents, length, torch.Generator().manual_seed(seed)).numpy().astype(np.int32)
    mask = np.tile(np.arange(length) >= 4, documents)
    return Corpus(ids=ids.reshape(-1), mask=mask, offsets=np.arange(documents + 1) * length)


def packs_of(corpus: Corpus, *, length: int = 100) -> CorpusPacks:
    return CorpusPacks(corpus=corpus, length=length, seed=0, device=torch.device("cpu"), padded=False)


def train_state_of(target: Target, name: str = "drafter", noise: float = 0.0, **flags: bool) -> TrainState:
    flags = {"norm_output": False, **flags} if flags else {}
    parts = TargetParts.of(target)
    config = config_for(
        parts, DrafterSettings(aux_layer_ids=tiny.AUX_IDS, draft_vocab_size=80, **flags), dtype="float32"
    )
    drafter = init_drafter(parts, config, torch.arange(80), seed=0)
    return TrainState(name, drafter, TrainSettings(depths=3, lr=4e-3, weight_decay=0.01, chunk=64, noise=noise))


def loop_config_of(folder: Path, **changes: object) -> LoopConfig:
    plan = LoopConfig(
        length=RunLength(steps=STEPS),
        packs_per_step=2,
        schedule=LearningRateSchedule(name="cosine", warmup=0.1, decay=0.2, final=0.02),
        compiled=False,
        log_every=1,
        eval_every=0,
        save_every=0,
        folder=folder,
        same={"seed": 0},
    )
    return replace(plan, **changes)  # type: ignore[arg-type]


def run(
    target: Target,
    plan: LoopConfig,
    *,
    stop: Callable[[], bool] = lambda: False,
    ranks: Ranks | None = None,
    noise: float = 0.0,
) -> tuple[Diary, TrainState]:
    diary, state = Diary(), train_state_of(target, noise=noise)
    source = LiveSource(target, tiny.AUX_IDS)
    train([state], packs_of(corpus_of(24)), [], source, plan, observer=diary, stop=stop, ranks=ranks or Ranks())
    return diary, state


@each("noise", [0.0, 0.2])
def test_a_run_taken_up_again_has_the_losses_of_one_never_stopped(
    tiny_target: Target, tmp_path: Path, noise: float
) -> None:
    whole, uninterrupted = run(tiny_target, loop_config_of(tmp_path / "whole"), noise=noise)
    asked = iter([False, False, True])
    first, _ = run(tiny_target, loop_config_of(tmp_path / "parts"), stop=lambda: next(asked), noise=noise)
    assert [report.step for report in first.reports] == [1, 2, 3]
    second, resumed = run(tiny_target, loop_config_of(tmp_path / "parts"), noise=noise)
    assert [report.step for report in second.reports] == [4, 5, 6]
    assert first.losses() + second.losses() == whole.losses()  # bit for bit
    for name, master in uninterrupted.master_weights.items():
        assert torch.equal(master, resumed.master_weights[name]), name


def test_checkpoints_are_drafters_and_the_newest_two_stay(tiny_target: Target, tmp_path: Path) -> None:
    _, state = run(tiny_target, loop_config_of(tmp_path, save_every=2))
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step-000004", "step-000006"]
    drafter = load_drafter(str(tmp_path / "checkpoints" / "step-000006" / "drafter"))
    assert torch.equal(drafter.fc.weight, state.drafter.fc.weight)


def test_the_checkpoint_of_another_run_is_refused(tiny_target: Target, tmp_path: Path) -> None:
    run(tiny_target, loop_config_of(tmp_path, length=RunLength(steps=2)))
    with pytest.raises(Exception, match=r"had seed = 0 and now it is 1.*output.folder"):
        run(tiny_target, loop_config_of(tmp_path, length=RunLength(steps=3), same={"seed": 1}))


def test_a_drafter_learns_the_same_beside_another(tiny_target: Target, tmp_path: Path) -> None:
    alone, _ = run(tiny_target, loop_config_of(tmp_path / "alone"))
    diary = Diary()
    both = [train_state_of(tiny_target), train_state_of(tiny_target, "eagle3", fc_norm=False)]
    source = LiveSource(tiny_target, tiny.AUX_IDS)
    train(both, packs_of(corpus_of(24)), [], source, loop_config_of(tmp_path / "both"), observer=diary)
    assert diary.losses() == alone.losses()
    assert diary.losses("eagle3") != alone.losses()


class PoisonedSource:
    """Source that returns NaN for the fourth batch."""

    def __init__(self, source: LiveSource) -> None:
        self._source, self._bad, self._seen = source, torch.empty(0), 0

    def __call__(self, batch: TrainingBatch) -> Features:
        features = self._source(batch)
        self._seen += 1
        if self._seen == 4:
            self._bad = batch.ids_T
        if torch.equal(batch.ids_T, self._bad):
            return replace(features, aux_TX=features.aux_TX * float("nan"))
        return features


def test_a_loss_that_is_not_a_number_stops_the_run_and_names_the_pack(tiny_target: Target, tmp_path: Path) -> None:
    source = PoisonedSource(LiveSource(tiny_target, tiny.AUX_IDS))
    state, diary = train_state_of(tiny_target), Diary()
    with pytest.raises(DivergedError, match=r"step 2, in pack \d of epoch 1 \(conversations \d+.*train\.lr"):
        train([state], packs_of(corpus_of(24)), [], source, loop_config_of(tmp_path), observer=diary)
    kept = load_drafter(str(tmp_path / "checkpoints" / "step-000001" / "drafter"))
    assert bool(kept.fc.weight.isfinite().all())


def test_the_learning_rate_rises_and_falls() -> None:
    def shares(schedule: str) -> list[float]:
        curve = LearningRateSchedule(name=schedule, warmup=0.1, decay=0.2, final=0.1)  # type: ignore[arg-type]
        return [curve.share(step, 100) for step in range(100)]

    cosine, wsd = shares("cosine"), shares("wsd")
    for curve in (cosine, wsd):
        assert curve[0] == pytest.approx(0.1)
        assert max(curve) == pytest.approx(1.0)
        assert curve[-1] < 0.2
    assert cosine[55] == pytest.approx(0.55, abs=0.02)
    assert wsd[55] == 1.0
    assert wsd[90] == pytest.approx(0.55, abs=0.02)


class Ticks:
    """Clock that advances a second whenever it is read."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        self.seconds += 1.0
        return self.seconds


@each("schedule", ["cosine", "wsd"])
def test_a_run_of_minutes_follows_the_clock(tiny_target: Target, tmp_path: Path, schedule: str) -> None:
    curve = LearningRateSchedule(name=schedule, warmup=0.1, decay=0.2, final=0.02)  # type: ignore[arg-type]
    plan = loop_config_of(tmp_path, length=RunLength(minutes=0.5), schedule=curve)
    diary, state = Diary(), train_state_of(tiny_target)
    source = LiveSource(tiny_target, tiny.AUX_IDS)
    packs = packs_of(corpus_of(24))
    asked = iter([False, False, False, True])
    parts, taken_up = list[LoopResult](), 0.0
    for _ in range(2):
        if (place := resume.newest(tmp_path / "checkpoints")) is not None:
            taken_up = resume.read_point(place, same=plan.same).seconds
        parts += [
            train([state], packs, [], source, plan, observer=diary, clock=Ticks(), stop=lambda: next(asked, False))
        ]
    assert [part.finished for part in parts] == [False, True]
    seconds = [report.seconds for report in diary.reports]
    assert parts[0].seconds < seconds[4] < 30.0 <= seconds[-1], "taken up where it stopped, over at its end"
    assert seconds == sorted(seconds)
    shares = [report.lr_share for report in diary.reports]
    begun = [0.0, *seconds[:-1]]
    begun[4] = taken_up
    assert shares == [curve.share(round(1000 * second), 30_000) for second in begun], "by when the step began"
    assert 0 < shares[0] < 1
    assert max(shares) == pytest.approx(1.0, abs=0.05)
    assert shares[-1] < 0.25
    again = train([state], packs, [], source, plan, observer=diary, clock=Ticks())
    assert (again.step, again.first_step_seconds) == (parts[1].step, None)


@each("compiled", [False, True])
def test_a_time_limit_that_is_not_reached_changes_no_learning_rate(
    tiny_target: Target, tmp_path: Path, *, compiled: bool
) -> None:
    def shares(length: RunLength) -> list[float]:
        diary, folder = Diary(), tmp_path / str(length)
        plan = loop_config_of(folder, length=length, compiled=compiled)
        source, packs = LiveSource(tiny_target, tiny.AUX_IDS), packs_of(corpus_of(24))
        asked = iter([False, False, True])
        for _ in range(2):  # stopped after the third step, and resumed
            states = [train_state_of(tiny_target)]
            train(states, packs, [], source, plan, observer=diary, clock=Ticks(), stop=lambda: next(asked, False))
        return [report.lr_share for report in diary.reports]

    by_steps = shares(RunLength(steps=STEPS))
    assert len(by_steps) == STEPS
    assert shares(RunLength(steps=STEPS, minutes=3.0)) == by_steps


def test_compiling_does_not_count_as_training(
    tiny_target: Target, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="eyas")
    clock, diary, told = Ticks(), Diary(), []

    class Slow:
        """Source whose first batch takes an hour."""

        def __init__(self) -> None:
            self._source = LiveSource(tiny_target, tiny.AUX_IDS)

        def __call__(self, batch: TrainingBatch) -> Features:
            if not told:
                clock.seconds = max(clock.seconds, 3600.0)
            return self._source(batch)

    plan = loop_config_of(tmp_path, length=RunLength(minutes=0.2), compiled=True)
    outcome = train(
        [train_state_of(tiny_target)],
        packs_of(corpus_of(24)),
        [],
        Slow(),
        plan,
        observer=diary,
        clock=clock,
        on_first_step=lambda: told.append(True),
    )
    assert told == [True]
    assert outcome.finished
    assert outcome.step > 3
    assert outcome.first_step_seconds == pytest.approx(3600, abs=5)
    assert outcome.seconds < 30
    assert caplog.messages[0].startswith("compiling: ")
    assert caplog.messages[1].startswith("compiled: the first step took 36")


def test_a_slow_first_step_is_logged(
    tiny_target: Target, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, logger="eyas")
    monkeypatch.setattr("eyas.train.loop.FIRST_STEP_PAUSES", (0.05, 0.1))
    source = LiveSource(tiny_target, tiny.AUX_IDS)

    def slow(batch: TrainingBatch) -> Features:
        for _ in range(200):  # until it is logged, on a busy machine too
            if any("has been running" in message for message in caplog.messages):
                break
            time.sleep(0.05)
        return source(batch)

    states, packs = [train_state_of(tiny_target)], packs_of(corpus_of(24))
    train(states, packs, [], slow, loop_config_of(tmp_path, length=RunLength(steps=1)), observer=Diary())
    assert caplog.messages[0] == "the first step has been running for 0 s"


def test_the_first_report_has_no_time_left(tiny_target: Target, tmp_path: Path) -> None:
    diary, _ = run(tiny_target, loop_config_of(tmp_path, log_every=4))
    assert [report.step for report in diary.reports] == [1, 4, 6]
    assert [report.seconds_left is None for report in diary.reports] == [True, False, False]


def test_a_tiny_drafter_learns_far_above_chance(tiny_target: Target, tmp_path: Path) -> None:
    """Train on the target's text until the drafter is mostly right; chance is 1 in 96."""
    state, diary = train_state_of(tiny_target), Diary()
    source = LiveSource(tiny_target, tiny.AUX_IDS)
    held_out = packs_of(corpus_of(16, seed=9)).epoch(0)
    train(
        [state],
        packs_of(corpus_of(400), length=256),
        held_out,
        source,
        loop_config_of(tmp_path, length=RunLength(steps=140), packs_per_step=1, eval_every=70),
        observer=diary,
    )
    before, after = diary.reports[0].drafters["drafter"], diary.reports[-1].drafters["drafter"]
    assert after.loss < before.loss / 1.5
    assert min(after.accuracy) > 0.4
    lengths = [counts["drafter"].acceptance_length for counts in diary.estimates.values()]
    assert lengths[-1] > 1.6


WORKER = """
import json, sys, torch
from pathlib import Path
sys.path[:0] = sys.argv[2:]
from eyas.train.ranks import Ranks
from eyas.target.facts import facts_of
from eyas.target.model import Target
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase
from train.test_loop import loop_config_of, run
torch.set_num_threads(1)
model = LlamaForCausalLM.from_pretrained(Path(sys.argv[1]) / "target").eval().requires_grad_(False)
target = Target(facts=facts_of(model.config, "tiny"), model=model, tokenizer=PreTrainedTokenizerBase())
ranks = Ranks.join()
diary, state = run(target, loop_config_of(Path(sys.argv[1]) / "two"), ranks=ranks, noise=0.1)
if ranks.is_main:
    (Path(sys.argv[1]) / "losses.json").write_text(json.dumps(diary.losses()))
ranks.leave()
"""


def test_two_processes_learn_what_one_does(tiny_target: Target, tmp_path: Path) -> None:
    alone, _ = run(tiny_target, loop_config_of(tmp_path / "one"), noise=0.1)
    tiny_target.model.save_pretrained(tmp_path / "target")
    (tmp_path / "worker.py").write_text(WORKER)
    root = Path(__file__).parent.parent
    paths = [str(root), str(root.parent / "src")]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    subprocess.run(
        [*command, str(tmp_path / "worker.py"), str(tmp_path), *paths], check=True, env=environment, timeout=300
    )
    assert json.loads((tmp_path / "losses.json").read_text()) == pytest.approx(alone.losses(), rel=1e-4)
    one = load_drafter(str(tmp_path / "one" / "checkpoints" / f"step-{STEPS:06d}" / "drafter"))
    two = load_drafter(str(tmp_path / "two" / "checkpoints" / f"step-{STEPS:06d}" / "drafter"))
    torch.testing.assert_close(one.fc.weight, two.fc.weight, rtol=1e-3, atol=1e-5)
