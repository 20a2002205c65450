"""The changes of drafter since the start, when and why: for /status, and marks in the page's plots.

All changes are in one list, whether a request or the learner made them.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

MOST = 64
"""The latest changes are kept, up to this many."""

ChangeKind = Literal["swap", "rollback"]


class DrafterChange(BaseModel):
    """A drafter, or none, that serves from a moment on."""

    model_config = ConfigDict(extra="forbid")

    at_seconds: float
    kind: ChangeKind = Field(description="rollback: the new one was worse.")
    drafter: str | None
    reason: str | None = Field(description="Of the learner; null: it was asked for.")
    before: float | None = Field(default=None, description="Acceptance length of the drafter before.")
    after: float | None = Field(default=None, description="Of this one, as of the latest look.")


class DrafterChanges:
    """The latest changes, the oldest first. Times are by the monotonic clock."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changes: deque[DrafterChange] = deque(maxlen=MOST)

    def note(self, drafter: str | None, kind: ChangeKind = "swap", reason: str | None = None) -> None:
        """Add a change: this drafter serves from now on."""
        self._changes.append(DrafterChange(at_seconds=self._clock(), kind=kind, drafter=drafter, reason=reason))

    def note_seen(self, before: float, after: float) -> None:
        """Set the acceptance lengths of the newest change, as real answers show them."""
        if self._changes:
            self._changes[-1].before, self._changes[-1].after = round(before, 4), round(after, 4)

    def since(self, started: float) -> list[DrafterChange]:
        """The changes, with times since the server's start."""
        return [one.model_copy(update={"at_seconds": round(one.at_seconds - started, 3)}) for one in self._changes]
