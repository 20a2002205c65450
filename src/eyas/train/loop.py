"""The training loop: packs -> features -> every drafter learns -> step.

Several drafters may learn side by side from the same batches: the target runs once for all of them, and the comparison
between them is fair. Packs are a function of seed and epoch, so a run that is taken up at step n sees what it would
have seen; nothing random happens elsewhere.

Shapes: S depths.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import torch

from eyas.errors import UserError
from eyas.train import resume
from eyas.train.batch import TrainingBatch
from eyas.train.estimate import RoundCounts, walk_rounds
from eyas.train.features import FeatureSource
from eyas.train.ranks import Ranks
from eyas.train.schedule import learning_rate_share
from eyas.train.trainee import Trainee


@dataclass(frozen=True, kw_only=True)
class PlannedBatch:
    """One pack of the run: which it is, and how to build it."""

    name: str
    build: Callable[[], TrainingBatch]


class Packs(Protocol):
    """The packs of a run, epoch after epoch."""

    def epoch(self, number: int) -> Sequence[PlannedBatch]:
        """All packs of one epoch, in order."""
        ...


@dataclass(frozen=True, kw_only=True)
class LoopPlan:
    """How long, how often, where."""

    steps: int
    packs_per_step: int
    schedule: str
    warmup: float
    decay: float
    final_lr: float
    log_every: int
    eval_every: int
    save_every: int
    folder: Path
    same: dict[str, Any]
    """What must not change between a run and its resumption."""


@dataclass(frozen=True, kw_only=True)
class DrafterReport:
    """How one drafter did over the steps since the last report."""

    loss: float
    accuracy: tuple[float, ...]
    """By depth: how often the drafter's most likely token is the target's, over every position that counts."""
    overlap: tuple[float, ...]
    """By depth: the mean probability that a drawn draft is accepted."""
    gradient_norm: float


@dataclass(frozen=True, kw_only=True)
class Report:
    """Progress at a step."""

    step: int
    steps: int
    tokens: int
    """Tokens trained on since the start of this process."""
    tokens_per_second: float
    seconds_left: float
    """At the pace since the last report."""
    lr_share: float
    drafters: dict[str, DrafterReport]


class Observer(Protocol):
    """Who is told how it goes."""

    def progressed(self, report: Report) -> None:
        """Every `log_every` steps and at the end."""
        ...

    def estimated(self, step: int, counts: dict[str, RoundCounts]) -> None:
        """Acceptance by walking the held-out text."""
        ...

    def saved(self, step: int, place: Path) -> None:
        """A checkpoint was written."""
        ...


class DivergedError(UserError):
    """The loss or its gradient is not a number."""


def train(
    trainees: Sequence[Trainee],
    packs: Packs,
    held_out: Sequence[PlannedBatch],
    source: FeatureSource,
    plan: LoopPlan,
    *,
    observer: Observer,
    ranks: Ranks = Ranks(),  # noqa: B008 - frozen, and alone is the common case
    stop: Callable[[], bool] = lambda: False,
) -> int:
    """Train from the newest checkpoint, or from the start, to the last step; return the step reached."""
    if plan.packs_per_step % ranks.world:
        raise UserError(
            f"train.packs_per_step {plan.packs_per_step} cannot be shared by {ranks.world} processes; "
            "make it a multiple of their number"
        )
    checkpoints = plan.folder / "checkpoints"
    start = 0
    if (place := resume.newest(checkpoints)) is not None:
        start = resume.restore(place, trainees, same=plan.same)
    device = trainees[0].drafter.fc.weight.device
    depths = max(trainee.regime.depths for trainee in trainees)
    window = _Window(trainees, start)
    with ThreadPoolExecutor(1) as builder:
        steps = _prefetched(_steps(packs, plan, ranks, start), builder)
        for step, planned, batches in steps:
            counts = _sum(ranks, batches, depths, device)
            for batch in batches:
                features = source(batch)
                for trainee in trainees:
                    trainee.learn(batch, features, counts)
            share = learning_rate_share(
                step, plan.steps, schedule=plan.schedule, warmup=plan.warmup, decay=plan.decay, final=plan.final_lr
            )
            norms = _gradient_norms(trainees, ranks)
            for trainee, norm in zip(trainees, norms, strict=True):
                if not torch.isfinite(norm):
                    _stop_diverged(trainees, trainee, planned, source, checkpoints, step, plan, ranks)
                window.add(trainee, norm, counts)
                trainee.move(norm, share)
            done = step + 1
            window.tokens += sum(len(batch.ids_T) for batch in batches) * ranks.world
            last = done == plan.steps
            stopping = ranks.agree(stop(), device)
            if ranks.leads and (last or stopping or done % plan.log_every == 0):
                observer.progressed(window.report(done, plan.steps, share))
            if held_out and (last or (plan.eval_every and done % plan.eval_every == 0)):
                observed = estimate(trainees, held_out, source, depths=depths)
                if ranks.leads:
                    observer.estimated(done, observed)
            if last or stopping or (plan.save_every and done % plan.save_every == 0):
                if ranks.leads:
                    observer.saved(done, resume.save(checkpoints, trainees, step=done, same=plan.same))
                ranks.wait()
            if stopping:
                return done
    return plan.steps


def estimate(
    trainees: Sequence[Trainee], held_out: Sequence[PlannedBatch], source: FeatureSource, *, depths: int
) -> dict[str, RoundCounts]:
    """Acceptance length of each drafter on text it does not learn from, walking rounds as decoding does."""
    found = {trainee.name: RoundCounts(rounds=0, accepted_at=(0,) * depths) for trainee in trainees}
    for planned in held_out:
        batch = planned.build()
        features = source(batch)
        for trainee in trainees:
            hit_SM = trainee.judge(batch, features, depths=depths).hit_SM
            found[trainee.name] += walk_rounds(batch, hit_SM)
    return found


class _Window:
    """Sums over the steps since the last report. They stay on the device until then."""

    def __init__(self, trainees: Sequence[Trainee], start: int) -> None:
        self._trainees = trainees
        self.tokens = 0
        self._last = (time.perf_counter(), 0, start)
        self._clear()

    def _clear(self) -> None:
        self._sums = {t.name: torch.zeros_like(t.sums_3S) for t in self._trainees}
        self._counts = {t.name: torch.zeros(t.regime.depths, dtype=torch.int64) for t in self._trainees}
        self._norms: dict[str, float] = {}

    def add(self, trainee: Trainee, norm: torch.Tensor, counts: Sequence[int]) -> None:
        self._sums[trainee.name] += trainee.sums_3S
        self._counts[trainee.name] += torch.tensor(counts[: trainee.regime.depths])
        self._norms[trainee.name] = float(norm)

    def report(self, step: int, steps: int, share: float) -> Report:
        now = time.perf_counter()
        (since, tokens, before), self._last = self._last, (now, self.tokens, step)
        seconds = max(1e-9, now - since)
        drafters = {}
        for trainee in self._trainees:
            loss_S, hit_S, overlap_S = (
                self._sums[trainee.name].cpu() / self._counts[trainee.name].clamp(min=1)
            ).tolist()
            raw = [trainee.regime.gamma**depth for depth in range(trainee.regime.depths)]
            drafters[trainee.name] = DrafterReport(
                loss=sum(w * x for w, x in zip(raw, loss_S, strict=True)) / sum(raw),
                accuracy=tuple(hit_S),
                overlap=tuple(overlap_S),
                gradient_norm=self._norms[trainee.name],
            )
        self._clear()
        return Report(
            step=step,
            steps=steps,
            tokens=self.tokens,
            tokens_per_second=(self.tokens - tokens) / seconds,
            seconds_left=seconds / max(1, step - before) * (steps - step),
            lr_share=share,
            drafters=drafters,
        )


_PlannedStep = tuple[int, list[PlannedBatch]]


def _steps(packs: Packs, plan: LoopPlan, ranks: Ranks, start: int) -> Iterator[_PlannedStep]:
    """Which packs this process takes at each step, from `start` on."""

    def endless() -> Iterator[PlannedBatch]:
        number = 0
        while True:
            epoch = packs.epoch(number)
            if not epoch:
                raise UserError("there is no pack to train on; give more data")
            yield from epoch
            number += 1

    stream = islice(endless(), start * plan.packs_per_step, None)
    for step in range(start, plan.steps):
        planned = list(islice(stream, plan.packs_per_step))
        yield step, planned[ranks.rank :: ranks.world]


def _prefetched(
    steps: Iterator[_PlannedStep], builder: ThreadPoolExecutor
) -> Iterator[tuple[int, list[PlannedBatch], list[TrainingBatch]]]:
    """Build the next step's batches while this one runs."""

    def build() -> tuple[int, list[PlannedBatch], list[TrainingBatch]] | None:
        following = next(steps, None)
        return None if following is None else (*following, [planned.build() for planned in following[1]])

    waiting = builder.submit(build)
    while (ready := waiting.result()) is not None:
        waiting = builder.submit(build)
        yield ready


def _sum(ranks: Ranks, batches: Sequence[TrainingBatch], depths: int, device: torch.device) -> list[int]:
    """Predictions that count at each depth, over all batches of the step and all processes."""
    return ranks.sum_counts([sum(n) for n in zip(*(batch.counts(depths) for batch in batches), strict=True)], device)


def _gradient_norms(trainees: Sequence[Trainee], ranks: Ranks) -> list[torch.Tensor]:
    """Norms of the summed gradients, on the host: the one wait of a step."""
    for trainee in trainees:
        ranks.sum_tensors([*trainee.gradients(), trainee.sums_3S])
    return list(torch.stack([trainee.gradient_norm() for trainee in trainees]).cpu())


def _stop_diverged(
    trainees: Sequence[Trainee],
    sick: Trainee,
    planned: Sequence[PlannedBatch],
    source: FeatureSource,
    checkpoints: Path,
    step: int,
    plan: LoopPlan,
    ranks: Ranks,
) -> None:
    """Save what was good before this step, find the pack that did it, and say so."""
    for trainee in trainees:
        trainee.forget()
    place = checkpoints / f"step-{step:06d}"
    if ranks.leads and not place.exists():
        resume.save(checkpoints, trainees, step=step, same=plan.same)
    culprits = [p.name for p in planned if not _finite(sick, p.build(), source)] or [p.name for p in planned]
    raise DivergedError(
        f"the loss of {sick.name} is not a number at step {step + 1}, in {'; '.join(culprits)}; the weights before "
        f"that step are in {place}: look at that data, and start from them (drafter.init_from) in another "
        f"output.folder with a lower train.lr (now {sick.regime.lr:g}) or train.clip"
    )


def _finite(trainee: Trainee, batch: TrainingBatch, source: FeatureSource) -> bool:
    scores = trainee.judge(batch, source(batch), depths=trainee.regime.depths)
    return bool(torch.isfinite(scores.loss_S).all())
