"""What a run leaves behind to be read: a line per report, and at the end a record from which anyone can repeat it.

`log.jsonl` grows while the run goes on, and a run that is taken up again drops the lines behind its checkpoint, so the
file always tells one story. The plot is made from it.
"""

import json
import platform
import sys
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from eyas.atomic import new_file
from eyas.errors import UserError
from eyas.train.estimate import RoundCounts
from eyas.train.loop import TrainMetrics

Line = dict[str, Any]


class Journal:
    """Writes log.jsonl, one line per drafter and metrics."""

    def __init__(self, folder: Path, *, from_step: int) -> None:
        self._path = folder / "log.jsonl"
        kept = [line for line in read_log(self._path) if line["step"] <= from_step]
        write_text(self._path, "".join(json.dumps(line) + "\n" for line in kept))

    def progressed(self, metrics: TrainMetrics) -> None:
        """A line of losses."""
        shared = {
            "step": metrics.step,
            "seconds": round(metrics.seconds, 1),
            "tokens": metrics.tokens,
            "tokens_per_second": round(metrics.tokens_per_second),
            "lr_share": metrics.lr_share,
        }
        self._write([{"drafter": name, **shared, **asdict(own)} for name, own in metrics.drafters.items()])

    def estimated(self, step: int, counts: dict[str, RoundCounts]) -> None:
        """A line of acceptance on held-out text."""
        self._write([{"drafter": name, "step": step, "held_out": counts_as_json(own)} for name, own in counts.items()])

    def saved(self, step: int, place: Path) -> None:
        """Nothing to add: the checkpoint speaks for itself."""

    def _write(self, lines: list[Line]) -> None:
        try:
            with self._path.open("a", encoding="utf-8") as log:
                log.writelines(json.dumps(line) + "\n" for line in lines)
        except OSError as error:
            raise UserError(f"cannot write {self._path}: {error.strerror}; free space and run again") from error


def counts_as_json(counts: RoundCounts) -> Line:
    """Rounds as JSON."""
    return {
        "acceptance_length": counts.acceptance_length,
        "rounds": counts.rounds,
        "accepted_at": list(counts.accepted_at),
    }


def read_log(path: Path) -> list[Line]:
    """The lines of a log that are whole; a run that was killed may have torn its last one."""
    lines: list[Line] = []
    if path.exists():
        for text in path.read_text(encoding="utf-8").splitlines():
            try:
                lines.append(json.loads(text))
            except ValueError:
                break
    return lines


def write_record(folder: Path, record: Mapping[str, Any]) -> None:
    """record.json: what was done with what, and what came of it."""
    write_text(folder / "record.json", json.dumps({"versions": versions(), **record}, indent=1))


def write_text(path: Path, text: str) -> None:
    """Write a file whole, or leave the one that is there."""
    with new_file(path) as staging:
        staging.write_text(text, encoding="utf-8")


def versions() -> dict[str, str | None]:
    """What ran."""
    import torch

    found: dict[str, str | None] = {"python": sys.version.split()[0], "platform": platform.platform()}
    for package in ("eyas", "torch", "transformers", "numpy", "safetensors"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    found["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    return found
