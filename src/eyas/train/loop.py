"""The training loop: packs -> features -> every drafter learns -> step.

Several drafters may learn side by side from the same batches: the target runs once for all of them, and the comparison
between them is fair. Packs are a function of seed and epoch, so a run that is taken up at step n sees what it would
have seen; noise on states is a function of seed and pack (noise.py), and nothing random happens elsewhere. Where a run
ends after so much time, the main process's clock counts for all, and the learning rate follows it: by when a step
begins, as it is steps begun that it goes by otherwise.

Shapes: S depths.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, count, islice, repeat
from pathlib import Path
from typing import Any, Protocol

import torch

from eyas.errors import UserError
from eyas.train import resume
from eyas.train.batch import TrainingBatch
from eyas.train.estimate import RoundCounts, walk_rounds
from eyas.train.features import FeatureSource, FetchingSource, InterruptedWaitError
from eyas.train.ranks import Ranks
from eyas.train.schedule import LearningRateSchedule, RunLength
from eyas.train.state import TrainState

logger = logging.getLogger(__name__)

FETCHED_STEPS = 8
"""Steps whose batches a source that fetches ahead is told of; how many bytes it then fetches is its own matter."""
FIRST_STEP_PAUSES = (10.0, 20.0, 30.0)
"""Seconds between words about a first step that takes long; a minute after these."""


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
class LoopConfig:
    """How long, how often, where."""

    length: RunLength
    packs_per_step: int
    schedule: LearningRateSchedule
    compiled: bool
    """Whether the first step compiles: it then takes minutes that do not count as training."""
    log_every: int
    eval_every: int
    save_every: int
    folder: Path
    same: dict[str, Any]
    """What must not change between a run and its resumption."""


@dataclass(frozen=True, kw_only=True)
class DrafterMetrics:
    """How one drafter did over the steps since the last report."""

    loss: float
    accuracy: tuple[float, ...]
    """By depth: how often the drafter's most likely token is the target's, over every position that counts."""
    overlap: tuple[float, ...]
    """By depth: the mean probability that a drawn draft is accepted."""
    gradient_norm: float


@dataclass(frozen=True, kw_only=True)
class TrainMetrics:
    """Progress at a step."""

    step: int
    length: RunLength
    tokens: int
    """Tokens trained on since the start of this process."""
    tokens_per_second: float
    seconds: float
    """Of training since the start of the run."""
    seconds_left: float | None
    """At the pace since the last report; None behind a first step, whose pace says nothing."""
    lr_share: float
    drafters: dict[str, DrafterMetrics]


class Observer(Protocol):
    """Who is told how it goes."""

    def progressed(self, metrics: TrainMetrics) -> None:
        """After the first step, every `log_every` steps and at the end."""
        ...

    def estimated(self, step: int, counts: dict[str, RoundCounts]) -> None:
        """Acceptance by walking the held-out text."""
        ...

    def saved(self, step: int, place: Path) -> None:
        """A checkpoint was written."""
        ...


@dataclass(frozen=True, kw_only=True)
class LoopResult:
    """How far a run has come."""

    step: int
    finished: bool
    seconds: float
    """Of training, over all processes that the run had one after another."""
    first_step_seconds: float | None
    """What the first step of this process took, compiling included; None: it made none."""


class DivergedError(UserError):
    """The loss or its gradient is not a number."""


def train(
    states: Sequence[TrainState],
    packs: Packs,
    held_out: Sequence[PlannedBatch],
    source: FeatureSource,
    config: LoopConfig,
    *,
    observer: Observer,
    ranks: Ranks = Ranks(),  # noqa: B008 - frozen, and alone is the common case
    stop: Callable[[], bool] = lambda: False,
    on_first_step: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> LoopResult:
    """Train from the newest checkpoint, or from the start, to the end of the run.

    `stop` is asked after every step; `on_first_step` is told when the first one is done, from when on there is
    something to save. `clock` gives seconds.
    """
    checkpoints = config.folder / "checkpoints"
    start, before = 0, 0.0
    if (place := resume.newest(checkpoints)) is not None:
        point = resume.restore(place, states, same=config.same)
        start, before = point.step, point.seconds
    if config.length.reached(start, before):
        return LoopResult(step=start, finished=True, seconds=before, first_step_seconds=None)
    device = states[0].drafter.fc.weight.device
    depths = max(state.settings.depths for state in states)
    window = _MetricsWindow(states, start, config.length)
    watch, first_step_seconds = _Stopwatch(clock, before), None
    if config.compiled:
        logger.info("compiling: the first step takes minutes, and packs of another shape may compile once more")

    def save(step: int) -> Path:
        point = resume.ResumePoint(step=step, seconds=watch.seconds(), planned=config.length)
        return resume.save(checkpoints, states, point, same=config.same)

    done, last, seconds = start, False, before
    with _first_step_watched() as first_step_done, ThreadPoolExecutor(1) as builder:
        steps = _prefetched(_steps(packs, config, ranks, start), builder, source)
        for step, planned, built in steps:
            batches, interrupted = _available(source, built)
            *counts, interruptions = ranks.sum_counts([*_counts(batches, depths), int(interrupted)], device)
            if interruptions:  # the step under way was not begun: what is saved is what was before it
                if ranks.is_main:
                    observer.saved(done, save(done))
                ranks.barrier()
                break
            for number, batch in enumerate(batches):
                features = source(batch)
                pack = step * config.packs_per_step + ranks.rank + number * ranks.world
                last_among = ranks if number + 1 == len(batches) else None
                for state in states:
                    state.backward(batch, features, counts, pack=pack, last_among=last_among)
            norms = _gradient_norms(states, ranks)
            # Of this step's time no step is counted yet: by time as by steps, a run stands where the last one left it.
            share = config.schedule.share(*config.length.position(step, seconds))
            first = step == start
            if first:
                first_step_seconds = watch.seconds() - before
                if config.compiled:
                    logger.info(f"compiled: the first step took {first_step_seconds:.0f} s, which do not count")
                    watch = _Stopwatch(clock, before)
            seconds = watch.seconds()
            if config.length.minutes is not None:
                seconds = ranks.from_main(seconds, device)
            for state, norm in zip(states, norms, strict=True):
                if not torch.isfinite(norm):
                    _stop_diverged(states, state, planned, source, checkpoints, step, save, ranks)
                window.add(state, norm, counts)
                state.optimizer_step(norm, share)
            done = step + 1
            window.tokens += sum(len(batch.ids_T) for batch in batches) * ranks.world
            if first:
                first_step_done.set()
                on_first_step()
            last = config.length.reached(done, seconds)
            stopping = ranks.any_true(stop(), device)
            if ranks.is_main and (first or last or stopping or done % config.log_every == 0):
                observer.progressed(window.metrics(done, seconds, share, first=first and not last))
            if held_out and (last or (config.eval_every and done % config.eval_every == 0)):
                observed = estimate(states, held_out, source, depths=depths, ranks=ranks)
                stopping = stopping or observed is None
                if ranks.is_main and observed is not None:
                    observer.estimated(done, observed)
                ranks.barrier()
            if last or stopping or (config.save_every and done % config.save_every == 0):
                if ranks.is_main:
                    observer.saved(done, save(done))
                ranks.barrier()
            if last or stopping:
                break
    return LoopResult(step=done, finished=last, seconds=watch.seconds(), first_step_seconds=first_step_seconds)


def estimate(
    states: Sequence[TrainState],
    held_out: Sequence[PlannedBatch],
    source: FeatureSource,
    *,
    depths: int,
    ranks: Ranks = Ranks(),  # noqa: B008 - frozen, and alone is the common case
) -> dict[str, RoundCounts] | None:
    """Acceptance length of each drafter on text it does not learn from, walking rounds as decoding does.

    Processes share the packs out. None: the run is to stop, and not all could be had.
    """
    found = {state.name: RoundCounts(rounds=0, accepted_at=(0,) * depths) for state in states}
    built, interrupted = [planned.build() for planned in held_out[ranks.rank :: ranks.world]], False
    if isinstance(source, FetchingSource):
        for batch in built:
            source.prefetch(batch)
    for each in built:
        batches, interrupted = _available(source, [each])
        if interrupted:
            break
        (batch,) = batches
        features = source(batch)
        for state in states:
            hit_SM = state.forward_loss(batch, features, depths=depths).hit_SM
            found[state.name] += walk_rounds(batch, hit_SM)
    numbers = [number for counts in found.values() for number in (counts.rounds, *counts.accepted_at)]
    *numbers, interruptions = ranks.sum_counts([*numbers, int(interrupted)], states[0].drafter.fc.weight.device)
    if interruptions:
        return None
    pooled = iter(numbers)
    return {name: RoundCounts(rounds=next(pooled), accepted_at=tuple(islice(pooled, depths))) for name in found}


def _available(source: FeatureSource, batches: Sequence[TrainingBatch]) -> tuple[list[TrainingBatch], bool]:
    """The batches as far as the source has them, and whether waiting for them was given up."""
    if not isinstance(source, FetchingSource):
        return list(batches), False
    try:
        return [source.available(batch) for batch in batches], False
    except InterruptedWaitError:
        return list(batches), True


@contextmanager
def _first_step_watched() -> Iterator[threading.Event]:
    """Say now and then that the first step is under way, until the event is set: on a CPU it can take minutes."""
    done = threading.Event()

    def speak() -> None:
        waited = 0.0
        for pause in chain(FIRST_STEP_PAUSES, repeat(60.0)):
            if done.wait(pause):
                return
            waited += pause
            logger.info(f"the first step is under way for {waited:.0f} s")

    threading.Thread(target=speak, daemon=True).start()
    try:
        yield done
    finally:
        done.set()


class _Stopwatch:
    """Seconds of training, those before this process included."""

    def __init__(self, clock: Callable[[], float], before: float) -> None:
        self._clock, self._began, self._before = clock, clock(), before

    def seconds(self) -> float:
        return self._before + self._clock() - self._began


class _MetricsWindow:
    """Sums over the steps since the last report. They stay on the device until then."""

    def __init__(self, states: Sequence[TrainState], start: int, length: RunLength) -> None:
        self._states, self._length = states, length
        self.tokens = 0
        self._last = (time.perf_counter(), 0, start, 0.0)
        self._clear()

    def _clear(self) -> None:
        self._sums = {t.name: torch.zeros_like(t.metrics_3S) for t in self._states}
        self._counts = {t.name: torch.zeros(t.settings.depths, dtype=torch.int64) for t in self._states}
        self._norms: dict[str, float] = {}

    def add(self, state: TrainState, norm: torch.Tensor, counts: Sequence[int]) -> None:
        self._sums[state.name] += state.metrics_3S
        self._counts[state.name] += torch.tensor(counts[: state.settings.depths])
        self._norms[state.name] = float(norm)

    def metrics(self, step: int, trained: float, share: float, *, first: bool) -> TrainMetrics:
        now = time.perf_counter()
        (since, tokens, before, earlier), self._last = self._last, (now, self.tokens, step, trained)
        seconds = max(1e-9, now - since)
        ends = []
        if self._length.minutes is not None:
            # A run that keeps to a share of its device takes longer than it trains.
            longer = seconds / max(1e-9, trained - earlier)
            ends.append(longer * max(0.0, 60 * self._length.minutes - trained))
        if self._length.steps is not None:
            ends.append(seconds / max(1, step - before) * (self._length.steps - step))
        left = min(ends)
        drafters = {}
        for state in self._states:
            loss_S, hit_S, overlap_S = (self._sums[state.name].cpu() / self._counts[state.name].clamp(min=1)).tolist()
            drafters[state.name] = DrafterMetrics(
                loss=sum(w * x for w, x in zip(state.depth_weights, loss_S, strict=True)),
                accuracy=tuple(hit_S),
                overlap=tuple(overlap_S),
                gradient_norm=self._norms[state.name],
            )
        self._clear()
        return TrainMetrics(
            step=step,
            length=self._length,
            tokens=self.tokens,
            tokens_per_second=(self.tokens - tokens) / seconds,
            seconds=trained,
            seconds_left=None if first else left,
            lr_share=share,
            drafters=drafters,
        )


_PlannedStep = tuple[int, list[PlannedBatch]]


def _steps(packs: Packs, config: LoopConfig, ranks: Ranks, start: int) -> Iterator[_PlannedStep]:
    """Which packs this process takes at each step, from `start` on."""

    def endless() -> Iterator[PlannedBatch]:
        number = 0
        while True:
            epoch = packs.epoch(number)
            if not epoch:
                raise UserError("there is no pack to train on; give more data")
            yield from epoch
            number += 1

    stream = islice(endless(), start * config.packs_per_step, None)
    for step in count(start) if config.length.steps is None else range(start, config.length.steps):
        planned = list(islice(stream, config.packs_per_step))
        yield step, planned[ranks.rank :: ranks.world]


def _prefetched(
    steps: Iterator[_PlannedStep], builder: ThreadPoolExecutor, source: FeatureSource
) -> Iterator[tuple[int, list[PlannedBatch], list[TrainingBatch]]]:
    """Build the batches of the next step while this one runs; those of more steps, where their source fetches ahead."""
    fetching = isinstance(source, FetchingSource)

    def build() -> tuple[int, list[PlannedBatch], list[TrainingBatch]] | None:
        following = next(steps, None)
        if following is None:
            return None
        batches = [planned.build() for planned in following[1]]
        if isinstance(source, FetchingSource):
            for batch in batches:
                source.prefetch(batch)
        return (*following, batches)

    waiting = deque(builder.submit(build) for _ in range(FETCHED_STEPS if fetching else 1))
    while (ready := waiting.popleft().result()) is not None:
        waiting.append(builder.submit(build))
        yield ready


def _counts(batches: Sequence[TrainingBatch], depths: int) -> list[int]:
    """Predictions that count at each depth, over all batches of the step."""
    return [sum(n) for n in zip(*(batch.counts(depths) for batch in batches), strict=True)]


def _gradient_norms(states: Sequence[TrainState], ranks: Ranks) -> list[torch.Tensor]:
    """Norms of the summed gradients, on the host: the one wait of a step."""
    for state in states:
        state.wait_for_sum(ranks)
    return list(torch.stack([state.gradient_norm() for state in states]).cpu())


def _stop_diverged(
    states: Sequence[TrainState],
    diverged: TrainState,
    planned: Sequence[PlannedBatch],
    source: FeatureSource,
    checkpoints: Path,
    step: int,
    save: Callable[[int], Path],
    ranks: Ranks,
) -> None:
    """Save what was good before this step, find the pack that did it, and say so."""
    for state in states:
        state.zero_grad()
    place = checkpoints / f"step-{step:06d}"
    if ranks.is_main and not place.exists():
        save(step)
    culprits = [p.name for p in planned if not _finite(diverged, p.build(), source)] or [p.name for p in planned]
    raise DivergedError(
        f"the loss of {diverged.name} is not a number at step {step + 1}, in {'; '.join(culprits)}; the weights before "
        f"that step are in {place}: look at that data, and start from them (drafter.init_from) in another "
        f"output.folder with a lower train.lr (now {diverged.settings.lr:g}) or train.clip"
    )


def _finite(state: TrainState, batch: TrainingBatch, source: FeatureSource) -> bool:
    scores = state.forward_loss(batch, source(batch), depths=state.settings.depths)
    return bool(torch.isfinite(scores.loss_S).all())
