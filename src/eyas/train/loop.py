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
from eyas.train.recipe import ScheduleName
from eyas.train.schedule import learning_rate_share
from eyas.train.state import TrainState
from eyas.train.unroll import depth_weights


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

    steps: int
    packs_per_step: int
    schedule: ScheduleName
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
    steps: int
    tokens: int
    """Tokens trained on since the start of this process."""
    tokens_per_second: float
    seconds_left: float
    """At the pace since the last report."""
    lr_share: float
    drafters: dict[str, DrafterMetrics]


class Observer(Protocol):
    """Who is told how it goes."""

    def progressed(self, metrics: TrainMetrics) -> None:
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
    states: Sequence[TrainState],
    packs: Packs,
    held_out: Sequence[PlannedBatch],
    source: FeatureSource,
    config: LoopConfig,
    *,
    observer: Observer,
    ranks: Ranks = Ranks(),  # noqa: B008 - frozen, and alone is the common case
    stop: Callable[[], bool] = lambda: False,
) -> int:
    """Train from the newest checkpoint, or from the start, to the last step; return the step reached."""
    if config.packs_per_step % ranks.world:
        raise UserError(
            f"train.packs_per_step {config.packs_per_step} cannot be shared by {ranks.world} processes; "
            "make it a multiple of their number"
        )
    checkpoints = config.folder / "checkpoints"
    start = 0
    if (place := resume.newest(checkpoints)) is not None:
        start = resume.restore(place, states, same=config.same)
    device = states[0].drafter.fc.weight.device
    depths = max(state.settings.depths for state in states)
    window = _MetricsWindow(states, start)
    with ThreadPoolExecutor(1) as builder:
        steps = _prefetched(_steps(packs, config, ranks, start), builder)
        for step, planned, batches in steps:
            counts = _sum(ranks, batches, depths, device)
            for batch in batches:
                features = source(batch)
                for state in states:
                    state.backward(batch, features, counts)
            share = learning_rate_share(
                step,
                config.steps,
                schedule=config.schedule,
                warmup=config.warmup,
                decay=config.decay,
                final=config.final_lr,
            )
            norms = _gradient_norms(states, ranks)
            for state, norm in zip(states, norms, strict=True):
                if not torch.isfinite(norm):
                    _stop_diverged(states, state, planned, source, checkpoints, step, config, ranks)
                window.add(state, norm, counts)
                state.optimizer_step(norm, share)
            done = step + 1
            window.tokens += sum(len(batch.ids_T) for batch in batches) * ranks.world
            last = done == config.steps
            stopping = ranks.any_true(stop(), device)
            if ranks.is_main and (last or stopping or done % config.log_every == 0):
                observer.progressed(window.metrics(done, config.steps, share))
            if held_out and (last or (config.eval_every and done % config.eval_every == 0)):
                observed = estimate(states, held_out, source, depths=depths)
                if ranks.is_main:
                    observer.estimated(done, observed)
            if last or stopping or (config.save_every and done % config.save_every == 0):
                if ranks.is_main:
                    observer.saved(done, resume.save(checkpoints, states, step=done, same=config.same))
                ranks.barrier()
            if stopping:
                return done
    return config.steps


def estimate(
    states: Sequence[TrainState], held_out: Sequence[PlannedBatch], source: FeatureSource, *, depths: int
) -> dict[str, RoundCounts]:
    """Acceptance length of each drafter on text it does not learn from, walking rounds as decoding does."""
    found = {state.name: RoundCounts(rounds=0, accepted_at=(0,) * depths) for state in states}
    for planned in held_out:
        batch = planned.build()
        features = source(batch)
        for state in states:
            hit_SM = state.forward_loss(batch, features, depths=depths).hit_SM
            found[state.name] += walk_rounds(batch, hit_SM)
    return found


class _MetricsWindow:
    """Sums over the steps since the last report. They stay on the device until then."""

    def __init__(self, states: Sequence[TrainState], start: int) -> None:
        self._states = states
        self.tokens = 0
        self._last = (time.perf_counter(), 0, start)
        self._clear()

    def _clear(self) -> None:
        self._sums = {t.name: torch.zeros_like(t.metrics_3S) for t in self._states}
        self._counts = {t.name: torch.zeros(t.settings.depths, dtype=torch.int64) for t in self._states}
        self._norms: dict[str, float] = {}

    def add(self, state: TrainState, norm: torch.Tensor, counts: Sequence[int]) -> None:
        self._sums[state.name] += state.metrics_3S
        self._counts[state.name] += torch.tensor(counts[: state.settings.depths])
        self._norms[state.name] = float(norm)

    def metrics(self, step: int, steps: int, share: float) -> TrainMetrics:
        now = time.perf_counter()
        (since, tokens, before), self._last = self._last, (now, self.tokens, step)
        seconds = max(1e-9, now - since)
        drafters = {}
        for state in self._states:
            loss_S, hit_S, overlap_S = (self._sums[state.name].cpu() / self._counts[state.name].clamp(min=1)).tolist()
            weights = depth_weights(state.settings.depths, state.settings.gamma)
            drafters[state.name] = DrafterMetrics(
                loss=sum(w * x for w, x in zip(weights, loss_S, strict=True)),
                accuracy=tuple(hit_S),
                overlap=tuple(overlap_S),
                gradient_norm=self._norms[state.name],
            )
        self._clear()
        return TrainMetrics(
            step=step,
            steps=steps,
            tokens=self.tokens,
            tokens_per_second=(self.tokens - tokens) / seconds,
            seconds_left=seconds / max(1, step - before) * (steps - step),
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
    for step in range(start, config.steps):
        planned = list(islice(stream, config.packs_per_step))
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


def _gradient_norms(states: Sequence[TrainState], ranks: Ranks) -> list[torch.Tensor]:
    """Norms of the summed gradients, on the host: the one wait of a step."""
    for state in states:
        ranks.sum_tensors([*state.gradients(), state.metrics_3S])
    return list(torch.stack([state.gradient_norm() for state in states]).cpu())


def _stop_diverged(
    states: Sequence[TrainState],
    diverged: TrainState,
    planned: Sequence[PlannedBatch],
    source: FeatureSource,
    checkpoints: Path,
    step: int,
    config: LoopConfig,
    ranks: Ranks,
) -> None:
    """Save what was good before this step, find the pack that did it, and say so."""
    for state in states:
        state.zero_grad()
    place = checkpoints / f"step-{step:06d}"
    if ranks.is_main and not place.exists():
        resume.save(checkpoints, states, step=step, same=config.same)
    culprits = [p.name for p in planned if not _finite(diverged, p.build(), source)] or [p.name for p in planned]
    raise DivergedError(
        f"the loss of {diverged.name} is not a number at step {step + 1}, in {'; '.join(culprits)}; the weights before "
        f"that step are in {place}: look at that data, and start from them (drafter.init_from) in another "
        f"output.folder with a lower train.lr (now {diverged.settings.lr:g}) or train.clip"
    )


def _finite(state: TrainState, batch: TrainingBatch, source: FeatureSource) -> bool:
    scores = state.forward_loss(batch, source(batch), depths=state.settings.depths)
    return bool(torch.isfinite(scores.loss_S).all())
