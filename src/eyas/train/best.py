"""The best drafter of a run, kept beside its last one: the weights with the longest acceptance on held-out text.

    best/NAME/                    config.json, model.safetensors: loads in vLLM as it is
    best/NAME/evaluation.json     at which step, and how long the acceptance was

Weights and figure are replaced together, so they belong to each other whatever interrupts the run.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eyas.drafter.checkpoint import checkpoint_of, write_checkpoint
from eyas.train.estimate import RoundCounts, acceptance_file
from eyas.train.loop import TrainMetrics
from eyas.train.state import TrainState

FOLDER = "best"
_EVALUATION = "evaluation.json"


class BestDrafters:
    """An observer that writes the weights of the moment when an estimate is better than all before."""

    def __init__(self, folder: Path, states: Sequence[TrainState]) -> None:
        self._folder = folder / FOLDER
        self._states = states

    def estimated(self, step: int, counts: dict[str, RoundCounts]) -> None:
        """Keep who did better than ever."""
        for state in self._states:
            length = counts[state.name].acceptance_length
            if length <= float(self._evaluation(state.name).get("acceptance_length", 0.0)):
                continue
            evaluation = json.dumps({"step": step, "acceptance_length": length}) + "\n"
            place = self._folder / state.name
            beside = {_EVALUATION: evaluation, **acceptance_file(counts[state.name])}
            write_checkpoint(checkpoint_of(state.drafter), place, replace=True, beside=beside)

    def progressed(self, metrics: TrainMetrics) -> None:
        """Nothing to keep."""

    def saved(self, step: int, place: Path) -> None:
        """Nothing to keep."""

    def record(self) -> dict[str, dict[str, Any]]:
        """Where the best are, of which step, with which acceptance length; none where nothing was held out."""
        found = {state.name: self._evaluation(state.name) for state in self._states}
        return {name: {"folder": str(self._folder / name), **own} for name, own in found.items() if own}

    def _evaluation(self, name: str) -> dict[str, Any]:
        try:
            found = json.loads((self._folder / name / _EVALUATION).read_text())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}
