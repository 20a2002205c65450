"""Stores the learnt drafters: FOLDER/drafters/NNNN, each a checkpoint that vLLM loads, with its history.

`record.json` beside the weights is the record of `eyas adapt` (the drafter it began with, the data, and the figures of
the gate). Its field `service` says how the drafter served: its number, the drafter before it, the time of the swap,
whether it is watched, confirmed or rejected, and the results of the watch.

Invariants: a folder under its number is whole; the shelf holds at most `KEPT` drafters beside those in service and
their fallbacks; a rejected drafter is never used again, nor one whose weights have changed since it served. Unreadable
folders are skipped. Only the user who runs the server can read the files.
"""

import json
import logging
import re
import shutil
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from eyas.atomic import new_file
from eyas.drafter.checkpoint import fingerprint_drafter
from eyas.errors import UserError

logger = logging.getLogger(__name__)
KEPT = 4
RECORD = "record.json"
MOST_RECORD_BYTES = 2**24
_NAME = re.compile(r"\d{4,}")

DrafterState = Literal["watching", "confirmed", "rejected"]


class ServiceStory(BaseModel):
    """The history of a learnt drafter in service."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    number: int
    parent: int | None
    """The drafter before it; None for the server's first one."""
    root: str
    """SHA-256 of the weights of the server's first drafter."""
    target_fingerprint: str
    fingerprint: str | None = None
    """SHA-256 of its weights; None in stories of earlier releases."""
    swapped_at: str
    """By the wall clock, for display only."""
    state: DrafterState
    reason: str | None = None
    """The reason why it was confirmed or rejected."""
    before: list[dict[str, float]] = []
    """Acceptance lengths of the previous drafter by depth, the watch's baseline."""
    watch: dict[str, Any] | None = None
    """The result of the latest look."""


class DrafterShelf:
    """The folder of learnt drafters. Only the process that holds the folder's lock uses it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def place(self, number: int) -> Path:
        return self.folder / f"{number:04d}"

    def stories(self) -> list[ServiceStory]:
        """The histories of all readable drafters, the oldest first."""
        found = []
        for place in self._places():
            try:
                found.append(ServiceStory.model_validate(_read(place)["service"]))
            except (OSError, ValueError, KeyError, TypeError) as error:
                logger.warning(f"the story of {place} cannot be read and the drafter is passed over: {_words(error)}")
        return found

    def good(self, *, root: str, target_fingerprint: str) -> list[ServiceStory]:
        """Drafters that descend from this first drafter, for this target, and were not rejected; the newest first."""
        return [
            story
            for story in reversed(self.stories())
            if story.state != "rejected" and (story.root, story.target_fingerprint) == (root, target_fingerprint)
        ]

    def require_whole(self, story: ServiceStory) -> None:
        """Raise an error for a drafter whose weights were deleted or changed since it served."""
        if story.fingerprint is not None and fingerprint_drafter(str(self.place(story.number))) != story.fingerprint:
            raise UserError(f"the weights in {self.place(story.number)} are not those that were learnt; delete it")

    @property
    def next_number(self) -> int:
        """The number of the next drafter; numbers are never used again."""
        return max((int(place.name) for place in self._places()), default=0) + 1

    def add(self, made: Path, story: ServiceStory, *, needed: Collection[int]) -> Path:
        """Move a new drafter to its folder, and delete old ones that are not needed.

        If that fails (OSError, UserError) the shelf has not changed.
        """
        record = _read(made) | {"service": story.model_dump()}
        _write(made, record)
        self.folder.mkdir(mode=0o700, exist_ok=True)
        place = self.place(story.number)
        made.rename(place)
        others = [one for one in self._places() if one != place and int(one.name) not in needed]
        for old in others[: max(0, len(self._places()) - KEPT)]:
            shutil.rmtree(old, ignore_errors=True)
        return place

    def amend(self, story: ServiceStory) -> None:
        """Update the history of a drafter. On a full disk the update is lost, and the log says so.

        If a rejection cannot be written, the weights are deleted, which needs no room, so that they are never used.
        """
        place = self.place(story.number)
        try:
            _write(place, _read(place) | {"service": story.model_dump()})
        except (OSError, UserError, ValueError) as error:
            logger.warning(f"what became of drafter {story.number} could not be written down: {_words(error)}")
            if story.state == "rejected":
                for weights in place.glob("*.safetensors"):
                    with suppress(OSError):
                        weights.unlink()

    def _places(self) -> list[Path]:
        with suppress(OSError):
            found = [one for one in self.folder.iterdir() if _NAME.fullmatch(one.name) and one.is_dir()]
            return sorted(found, key=lambda one: int(one.name))
        return []


def read_record(path: Path) -> dict[str, Any]:
    """Read the record of a drafter; OSError or ValueError if it cannot be read."""
    if path.stat().st_size > MOST_RECORD_BYTES:
        raise ValueError(f"{path.name} has more than {MOST_RECORD_BYTES:,} bytes")
    record = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(record, dict):
        raise ValueError(f"{path.name} is no JSON object")
    return record


def _read(place: Path) -> dict[str, Any]:
    return read_record(place / RECORD)


def _write(place: Path, record: dict[str, Any]) -> None:
    with new_file(place / RECORD) as staging:
        staging.touch(mode=0o600)
        staging.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _words(error: Exception) -> str:
    if isinstance(error, ValidationError):
        return f"{error.error_count()} fields are not as they should be"
    return str(getattr(error, "strerror", None) or error)
