"""The drafters that were learnt from traffic: FOLDER/drafters/NNNN, each a checkpoint that vLLM loads, with its story.

`record.json` beside the weights is what `eyas adapt` wrote (from which drafter, on which data, by which figures it was
kept), and under `service` what became of it here: which number it has, which drafter it took over from, when, whether
it is watched, confirmed or rejected, and what the watch saw.

Invariants: a folder that has its number is whole; the shelf holds `KEPT` drafters at most, beside those that are in
service or to be gone back to; a rejected one is never taken up again, nor one whose weights are not those that came to
work. Whatever cannot be read is passed over. Only the user who runs the server can read any of it.
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
    """What became of a learnt drafter in service."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    number: int
    parent: int | None
    """The drafter that it took over from; None for the one that the server was started with."""
    root: str
    """SHA-256 of the weights of the drafter that the server was started with."""
    target_fingerprint: str
    fingerprint: str | None = None
    """SHA-256 of its weights; None in stories of earlier releases."""
    swapped_at: str
    """By the wall clock, for people: nothing is decided by it."""
    state: DrafterState
    reason: str | None = None
    """Why it was confirmed or rejected."""
    before: list[dict[str, float]] = []
    """Acceptance lengths of the drafter before, by depth, which the watch goes by."""
    watch: dict[str, Any] | None = None
    """What the latest look saw."""


class DrafterShelf:
    """The folder of learnt drafters. One process at a time uses it, whoever has the folder's lock."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def place(self, number: int) -> Path:
        """The folder of a drafter."""
        return self.folder / f"{number:04d}"

    def stories(self) -> list[ServiceStory]:
        """Of all drafters whose story can be read, the oldest first."""
        found = []
        for place in self._places():
            try:
                found.append(ServiceStory.model_validate(_read(place)["service"]))
            except (OSError, ValueError, KeyError, TypeError) as error:
                logger.warning(f"the story of {place} cannot be read and the drafter is passed over: {_words(error)}")
        return found

    def good(self, *, root: str, target_fingerprint: str) -> list[ServiceStory]:
        """Drafters of this descent and for this target that were not rejected, the newest first."""
        return [
            story
            for story in reversed(self.stories())
            if story.state != "rejected" and (story.root, story.target_fingerprint) == (root, target_fingerprint)
        ]

    def require_whole(self, story: ServiceStory) -> None:
        """Raise an error for a drafter whose weights are gone, or others than those that came to work."""
        if story.fingerprint is not None and fingerprint_drafter(str(self.place(story.number))) != story.fingerprint:
            raise UserError(f"the weights in {self.place(story.number)} are not those that were learnt; delete it")

    @property
    def next_number(self) -> int:
        """The number of the next drafter; numbers are never used again."""
        return max((int(place.name) for place in self._places()), default=0) + 1

    def add(self, made: Path, story: ServiceStory, *, needed: Collection[int]) -> Path:
        """Move a drafter that was made on this disk to its place, and let old ones go that nobody needs.

        If that fails (OSError, UserError) the shelf is as it was.
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
        """Write down what has become of a drafter; a disk that is full costs the note, and the log says so.

        If a rejection cannot be written down, the weights go: that takes no room, and nobody takes them up again.
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
    """A record of this or another process; OSError or ValueError if it cannot be had."""
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
