"""Checkpoints of a run: every drafter as servers load it, and beside it what an exact resumption needs.

    checkpoints/step-000500/NAME/          config.json, model.safetensors: loads in vLLM as it is
    checkpoints/step-000500/state/NAME.safetensors   float32 master weights and the optimizer's moments
    checkpoints/step-000500/state.json     step, seconds of training, planned length, and the settings that must not
                                           change for the rest of the run

A checkpoint appears whole or not at all, and the newest two are kept.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from eyas.atomic import new_folder
from eyas.drafter.checkpoint import checkpoint_of, write_checkpoint
from eyas.errors import UserError
from eyas.train.schedule import RunLength
from eyas.train.state import TrainState

KEPT = 2


@dataclass(frozen=True, kw_only=True)
class ResumePoint:
    """Progress of a run at a checkpoint."""

    step: int
    seconds: float
    """Seconds of training so far."""
    planned: RunLength
    """Length that the run was planned for; a resumed run may be longer."""


def save(folder: Path, states: Sequence[TrainState], point: ResumePoint, *, same: Mapping[str, Any]) -> Path:
    """Write a checkpoint; `same` are the settings that must not change when the run is resumed."""
    place = folder / f"step-{point.step:06d}"
    with new_folder(place, replace=True) as staging:
        (staging / "state").mkdir()
        for state in states:
            write_checkpoint(checkpoint_of(state.drafter), staging / state.name)
            tensors = {name: tensor.cpu().contiguous() for name, tensor in state.state_dict().items()}
            try:
                save_file(tensors, staging / "state" / f"{state.name}.safetensors")
            except SafetensorError as error:  # a full disk, for one
                raise OSError(str(error)) from error
        (staging / "state.json").write_text(json.dumps({**asdict(point), "same": same}, indent=1))
    for old in _oldest_first(folder)[:-KEPT]:
        shutil.rmtree(old, ignore_errors=True)
    return place


def newest(folder: Path) -> Path | None:
    """Newest checkpoint, if there is one."""
    return next(reversed(_oldest_first(folder)), None)


def restore(place: Path, states: Sequence[TrainState], *, same: Mapping[str, Any]) -> ResumePoint:
    """Load a checkpoint into the states and return its progress; refuse one of another run."""
    point = read_point(place, same=same)
    try:
        tensors = {state.name: load_file(place / "state" / f"{state.name}.safetensors") for state in states}
    except (OSError, ValueError, SafetensorError) as error:
        raise _unreadable(place, error) from error
    for state in states:
        state.load_state_dict(tensors[state.name])
    return point


def read_point(place: Path, *, same: Mapping[str, Any]) -> ResumePoint:
    """Read the progress of a checkpoint; refuse one of another run."""
    try:
        stored = json.loads((place / "state.json").read_text())
        before = stored["same"]
        point = ResumePoint(
            step=int(stored["step"]), seconds=float(stored["seconds"]), planned=RunLength(**stored["planned"])
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _unreadable(place, error) from error
    now = json.loads(json.dumps(same))
    for key in (*now, *(key for key in before if key not in now)):
        if before.get(key) != now.get(key):
            raise UserError(
                f"the run in {place.parent.parent} had {key} = {before.get(key)!r} and now it is {now.get(key)!r}; "
                "go on with the same recipe and data, or choose another output.folder"
            )
    return point


def step_of(place: Path) -> int:
    """Step after which a checkpoint was written."""
    return int(place.name.partition("-")[2])


def _unreadable(place: Path, error: Exception) -> UserError:
    return UserError(
        f"the checkpoint {place} cannot be read ({error}); remove it to resume from an earlier one or from the start"
    )


def _oldest_first(folder: Path) -> list[Path]:
    places = [place for place in folder.glob("step-*") if place.is_dir() and place.name[5:].isdecimal()]
    return sorted(places, key=step_of)
