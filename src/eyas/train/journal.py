"""Observers of a run, and the files that they leave: a log, the best drafters, other people's dashboards, a record.

log.jsonl        grows while the run goes on; a resumed run drops the lines after its checkpoint. training.png shows it
best/NAME/       the weights with the longest acceptance on held-out text, as vLLM loads them, and evaluation.json: the
                 step and the acceptance length. Both are replaced together, so they match whatever interrupts the run
record.json      what was done with what, and what came of it: enough to repeat the run
"""

import json
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from eyas.atomic import new_file
from eyas.drafter.checkpoint import checkpoint_of, write_checkpoint
from eyas.errors import UserError
from eyas.train.estimate import RoundCounts, acceptance_file
from eyas.train.loop import Observer, TrainMetrics
from eyas.train.recipe import TrackerName
from eyas.train.state import TrainState

Line = dict[str, Any]


class Observers:
    """Passes everything on to several observers, and remembers the last of it."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = observers
        self.last: TrainMetrics | None = None
        self.estimates: dict[str, RoundCounts] = {}

    def progressed(self, metrics: TrainMetrics) -> None:
        self.last = metrics
        for observer in self._observers:
            observer.progressed(metrics)

    def estimated(self, step: int, counts: dict[str, RoundCounts]) -> None:
        self.estimates = counts
        for observer in self._observers:
            observer.estimated(step, counts)

    def saved(self, step: int, place: Path) -> None:
        for observer in self._observers:
            observer.saved(step, place)


class Journal:
    """Writes log.jsonl, one line per drafter and metrics."""

    def __init__(self, folder: Path, *, from_step: int) -> None:
        self._path = folder / "log.jsonl"
        kept = [line for line in read_log(self._path) if line["step"] <= from_step]
        write_text(self._path, "".join(json.dumps(line) + "\n" for line in kept))

    def progressed(self, metrics: TrainMetrics) -> None:
        shared = {
            "step": metrics.step,
            "seconds": round(metrics.seconds, 1),
            "tokens": metrics.tokens,
            "tokens_per_second": round(metrics.tokens_per_second),
            "lr_share": metrics.lr_share,
        }
        self._write([{"drafter": name, **shared, **asdict(own)} for name, own in metrics.drafters.items()])

    def estimated(self, step: int, counts: dict[str, RoundCounts]) -> None:
        self._write([{"drafter": name, "step": step, "held_out": own.as_json()} for name, own in counts.items()])

    def saved(self, step: int, place: Path) -> None:
        """No-op."""

    def _write(self, lines: list[Line]) -> None:
        try:
            with self._path.open("a", encoding="utf-8") as log:
                log.writelines(json.dumps(line) + "\n" for line in lines)
        except OSError as error:
            raise UserError(f"cannot write {self._path}: {error.strerror}; free space and run again") from error


class BestDrafters:
    """Writes the current weights whenever an estimate is better than all before."""

    def __init__(self, folder: Path, states: Sequence[TrainState]) -> None:
        self._folder = folder / "best"
        self._states = states

    def estimated(self, step: int, counts: dict[str, RoundCounts]) -> None:
        for state in self._states:
            length = counts[state.name].acceptance_length
            if length <= float(self._evaluation(state.name).get("acceptance_length", 0.0)):
                continue
            evaluation = json.dumps({"step": step, "acceptance_length": length}) + "\n"
            beside = {"evaluation.json": evaluation, **acceptance_file(counts[state.name])}
            write_checkpoint(checkpoint_of(state.drafter), self._folder / state.name, replace=True, beside=beside)

    def progressed(self, metrics: TrainMetrics) -> None:
        """No-op."""

    def saved(self, step: int, place: Path) -> None:
        """No-op."""

    def record(self) -> dict[str, dict[str, Any]]:
        """Folder, step and acceptance length of the best drafters; empty if nothing was held out."""
        found = {state.name: self._evaluation(state.name) for state in self._states}
        return {name: {"folder": str(self._folder / name), **own} for name, own in found.items() if own}

    def _evaluation(self, name: str) -> dict[str, Any]:
        try:
            found = json.loads((self._folder / name / "evaluation.json").read_text())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}


class Tracker:
    """Passes numbers on to a dashboard."""

    def __init__(self, log: Callable[[dict[str, float], int], None]) -> None:
        self._log = log

    def progressed(self, metrics: TrainMetrics) -> None:
        numbers = {"tokens_per_second": metrics.tokens_per_second, "lr_share": metrics.lr_share}
        for name, own in metrics.drafters.items():
            numbers |= {f"{name}/loss": own.loss, f"{name}/gradient_norm": own.gradient_norm}
            numbers |= {f"{name}/accuracy_{depth + 1}": value for depth, value in enumerate(own.accuracy)}
        self._log(numbers, metrics.step)

    def estimated(self, step: int, counts: dict[str, RoundCounts]) -> None:
        self._log({f"{name}/acceptance_length": own.acceptance_length for name, own in counts.items()}, step)

    def saved(self, step: int, place: Path) -> None:
        """No-op."""


def open_tracker(name: TrackerName, folder: Path, settings: dict[str, Any]) -> Tracker:
    """Tracker by its name in the recipe; its library is an extra of eyas."""
    if name == "tensorboard":
        writer = _library("torch.utils.tensorboard", "tensorboard").SummaryWriter(str(folder / "tensorboard"))

        def log(numbers: dict[str, float], step: int) -> None:
            for metric, value in numbers.items():
                writer.add_scalar(metric, value, step)
            writer.flush()

        return Tracker(log)
    library = _library(name, name)  # trackio has the interface of wandb
    library.init(project="eyas", name=folder.name, config=settings)
    return Tracker(lambda numbers, step: library.log(numbers, step=step))


def _library(module: str, extra: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise UserError(
            f"output.trackers names {extra}, which is not installed; `pip install 'eyas[{extra}]'` or leave it out"
        ) from error


def read_log(path: Path) -> list[Line]:
    """Whole lines of a log; the last one may be torn if the run was killed."""
    lines: list[Line] = []
    if path.exists():
        for text in path.read_text(encoding="utf-8").splitlines():
            try:
                lines.append(json.loads(text))
            except ValueError:
                break
    return lines


def write_record(folder: Path, record: Mapping[str, Any]) -> None:
    """Write record.json, with the versions of what ran."""
    write_text(folder / "record.json", json.dumps({"versions": versions(), **record}, indent=1))


def write_text(path: Path, text: str) -> None:
    """Write a file whole, or leave the one that is there."""
    with new_file(path) as staging:
        staging.write_text(text, encoding="utf-8")


def versions() -> dict[str, str | None]:
    """Versions of Python, the platform and the packages that matter, and the device."""
    found: dict[str, str | None] = {"python": sys.version.split()[0], "platform": platform.platform()}
    for package in ("eyas", "torch", "transformers", "numpy", "safetensors"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    found["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    return found
