"""Training loop: packs -> features -> every drafter learns -> step.

Several drafters may learn side by side from the same batches: the target runs once for all of them, and the comparison
between them is fair. Packs are a function of seed and epoch, noise on states one of seed and pack, and nothing else is
random, so a run resumed at step n sees what it would have seen. If a run's length is a time, the main process's clock
counts for all processes. The learning rate follows the progress of the run when a step begins.

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
from eyas.train.batch import CorpusPacks, PlannedBatch, TrainingBatch
from eyas.train.estimate import RoundCounts, walk_rounds
from eyas.train.features import FeatureSource, FetchingSource, InterruptedWaitError
from eyas.train.ranks import Ranks
from eyas.train.schedule import LearningRateSchedule, RunLength
from eyas.train.state import TrainState

logger = logging.getLogger(__name__)

FETCHED_STEPS = 8
"""Steps whose batches are announced to a source that fetches ahead; the source limits the bytes itself."""
FIRST_STEP_PAUSES = (10.0, 20.0, 30.0)
"""Seconds between log lines about a slow first step; then a minute each."""


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """Settings of the loop."""

    length: RunLength
    packs_per_step: int
    schedule: LearningRateSchedule
    compiled: bool
    """Whether the first step compiles, which takes minutes that do not count as training."""
    log_every: int
    eval_every: int
    save_every: int
    folder: Path
    same: dict[str, Any]
    """Settings that must not change when a run is resumed."""


@dataclass(frozen=True, kw_only=True)
class DrafterMetrics:
    """Metrics of one drafter over the steps since the last report."""

    loss: float
    accuracy: tuple[float, ...]
    """By depth: share of positions at which the drafter's most likely token is the target's."""
    overlap: tuple[float, ...]
    """By depth: mean probability that a token drawn from the drafter is accepted."""
    gradient_norm: float


@dataclass(frozen=True, kw_only=True)
class TrainMetrics:
    """Progress at a step."""

    step: int
    length: RunLength
    tokens: int
    """Tokens trained on in this process."""
    tokens_per_second: float
    seconds: float
    """Seconds of training since the start of the run."""
    seconds_left: float | None
    """Estimate from the speed since the last report; None after the first step, whose speed is not typical."""
    lr_share: float
    drafters: dict[str, DrafterMetrics]


class Observer(Protocol):
    """Receives the progress of a run."""

    def progressed(self, metrics: TrainMetrics) -> None:
        """Called after the first step, every `log_every` steps and at the end."""

    def estimated(self, step: int, counts: dict[str, RoundCounts]) -> None:
        """Called after an evaluation on the held-out text."""

    def saved(self, step: int, place: Path) -> None:
        """Called after a checkpoint."""


@dataclass(frozen=True, kw_only=True)
class LoopResult:
    """Progress of a run."""

    step: int
    finished: bool
    seconds: float
    """Seconds of training, including those before the run was resumed."""
    first_step_seconds: float | None
    """Time of this process's first step, with compilation; None: it made no step."""


class DivergedError(UserError):
    """Raised when the loss or its gradient is not a number."""


def train(
    states: Sequence[TrainState],
    packs: CorpusPacks,
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

    `stop` is asked after every step; `on_first_step` is called when the first one is done and there is something to
    save. `clock` gives seconds.
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
    began, first_step_seconds = clock(), None
    if config.compiled:
        logger.info("compiling: the first step takes minutes, and packs of another shape may compile once more")

    def seconds_trained() -> float:
        return before + clock() - began

    def save(step: int) -> Path:
        point = resume.ResumePoint(step=step, seconds=seconds_trained(), planned=config.length)
        return resume.save(checkpoints, states, point, same=config.same)

    done, last, seconds = start, False, before
    with _first_step_watched() as first_step_done, ThreadPoolExecutor(1) as builder:
        steps = _prefetched(_steps(packs, config, ranks, start), builder, source)
        for step, planned, built in steps:
            batches, interrupted = _available(source, built)
            own_counts = [sum(n) for n in zip(*(batch.counts(depths) for batch in batches), strict=True)]
            *counts, interruptions = ranks.sum_counts([*own_counts, int(interrupted)], device)
            if interruptions:  # nothing of this step was done yet
                if ranks.is_main:
                    observer.saved(done, save(done))
                ranks.barrier()
                break
            for number, batch in enumerate(batches):
                features = source(batch)
                pack = step * config.packs_per_step + ranks.rank + number * ranks.world
                for state in states:
                    state.backward(batch, features, counts, pack=pack)
            for state in states:
                state.sum_gradients(ranks)
            norms = torch.stack([state.gradient_norm() for state in states]).cpu()  # the one synchronisation of a step
            # Progress is that of the last step, by time as by steps.
            share = config.schedule.share(*config.length.position(step, seconds))
            first = step == start
            if first:
                first_step_seconds = clock() - began
                if config.compiled:
                    logger.info(f"compiled: the first step took {first_step_seconds:.0f} s, which do not count")
                    began = clock()
            seconds = seconds_trained()
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
    return LoopResult(step=done, finished=last, seconds=seconds_trained(), first_step_seconds=first_step_seconds)


def estimate(
    states: Sequence[TrainState],
    held_out: Sequence[PlannedBatch],
    source: FeatureSource,
    *,
    depths: int,
    ranks: Ranks = Ranks(),  # noqa: B008 - frozen, and alone is the common case
) -> dict[str, RoundCounts] | None:
    """Acceptance length of each drafter on held-out text, by walking rounds as decoding does.

    Packs are shared among the processes. None: the run is to stop, and not all packs could be fetched.
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
    """The batches as far as the source has them, and whether the wait for them was interrupted."""
    if not isinstance(source, FetchingSource):
        return list(batches), False
    try:
        return [source.available(batch) for batch in batches], False
    except InterruptedWaitError:
        return list(batches), True


@contextmanager
def _first_step_watched() -> Iterator[threading.Event]:
    """Log now and then that the first step is running, until the event is set: on a CPU it can take minutes."""
    done = threading.Event()

    def speak() -> None:
        waited = 0.0
        for pause in chain(FIRST_STEP_PAUSES, repeat(60.0)):
            if done.wait(pause):
                return
            waited += pause
            logger.info(f"the first step has been running for {waited:.0f} s")

    threading.Thread(target=speak, daemon=True).start()
    try:
        yield done
    finally:
        done.set()


class _MetricsWindow:
    """Sums of metrics since the last report, kept on the device until then."""

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
            # A run that keeps to a share of its device also rests.
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


def _steps(packs: CorpusPacks, config: LoopConfig, ranks: Ranks, start: int) -> Iterator[_PlannedStep]:
    """Packs of this process at each step, from `start` on."""

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
    """Build the batches of the next step while this one runs, or of more steps if the source fetches ahead."""
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
    """Save the weights from before this step, find the pack that diverged, and raise."""
    for state in states:
        state.zero_grad()
    place = checkpoints / f"step-{step:06d}"
    if ranks.is_main and not place.exists():
        save(step)

    def finite(batch: TrainingBatch) -> bool:
        scores = diverged.forward_loss(batch, source(batch), depths=diverged.settings.depths)
        return bool(torch.isfinite(scores.loss_S).all())

    culprits = [p.name for p in planned if not finite(p.build())] or [p.name for p in planned]
    raise DivergedError(
        f"the loss of {diverged.name} is not a number at step {step + 1}, in {'; '.join(culprits)}; the weights before "
        f"that step are in {place}: look at that data, and start from them (drafter.init_from) in another "
        f"output.folder with a lower train.lr (now {diverged.settings.lr:g}) or train.clip"
    )
