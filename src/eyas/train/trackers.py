"""Other people's dashboards: each tracker is a few lines around a library that is an extra of eyas."""

from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from eyas.errors import UserError
from eyas.train.estimate import RoundCounts
from eyas.train.loop import TrainMetrics
from eyas.train.recipe import TrackerName


class _Sink(Protocol):
    def log(self, numbers: dict[str, float], step: int) -> None: ...


class Tracker:
    """An observer that passes numbers on."""

    def __init__(self, sink: _Sink) -> None:
        self._sink = sink

    def progressed(self, metrics: TrainMetrics) -> None:
        """Loss and accuracy by depth of every drafter."""
        numbers = {"tokens_per_second": metrics.tokens_per_second, "lr_share": metrics.lr_share}
        for name, own in metrics.drafters.items():
            numbers |= {f"{name}/loss": own.loss, f"{name}/gradient_norm": own.gradient_norm}
            numbers |= {f"{name}/accuracy_{depth + 1}": value for depth, value in enumerate(own.accuracy)}
        self._sink.log(numbers, metrics.step)

    def estimated(self, step: int, counts: dict[str, RoundCounts]) -> None:
        """Acceptance length on held-out text."""
        self._sink.log({f"{name}/acceptance_length": own.acceptance_length for name, own in counts.items()}, step)

    def saved(self, step: int, place: Path) -> None:
        """Nothing to track."""


class _Tensorboard:
    def __init__(self, folder: Path) -> None:
        writer: Any = _library("torch.utils.tensorboard", "tensorboard").SummaryWriter
        self._writer = writer(str(folder / "tensorboard"))

    def log(self, numbers: dict[str, float], step: int) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()


class _Wandb:
    """wandb, and trackio, which speaks the same language."""

    def __init__(self, library: str, folder: Path, settings: dict[str, Any]) -> None:
        self._library: Any = _library(library, library)
        self._library.init(project="eyas", name=folder.name, config=settings)

    def log(self, numbers: dict[str, float], step: int) -> None:
        self._library.log(numbers, step=step)


def open_tracker(name: TrackerName, folder: Path, settings: dict[str, Any]) -> Tracker:
    """A tracker by its name in the recipe."""
    return Tracker(_Tensorboard(folder) if name == "tensorboard" else _Wandb(name, folder, settings))


def _library(module: str, extra: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise UserError(
            f"output.trackers names {extra}, which is not installed; `pip install 'eyas[{extra}]'` or leave it out"
        ) from error
