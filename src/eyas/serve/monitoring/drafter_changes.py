"""Which drafters came to work since the start, when and why: for /status, and marks in the page's plots.

Whoever swaps drafters notes it here, a request as well as what learns from traffic: all changes are in one list.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

MOST = 64
"""Changes that are told of: the latest."""

ChangeKind = Literal["swap", "rollback"]
"""rollback: the one before came back because the new one was worse."""


@dataclass(frozen=True, kw_only=True)
class DrafterChange:
    """Another drafter, or none, from a moment on."""

    at: float
    """By the monotonic clock."""
    kind: ChangeKind
    drafter: str | None
    """By the name that clients see; None: nobody drafts any more."""


class DrafterChanges:
    """The latest changes, the oldest first."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changes: deque[DrafterChange] = deque(maxlen=MOST)

    def note(self, drafter: str | None, kind: ChangeKind = "swap") -> None:
        """This drafter serves from now on."""
        self._changes.append(DrafterChange(at=self._clock(), kind=kind, drafter=drafter))

    def as_json(self, started: float) -> list[dict[str, Any]]:
        """For /status, with times since the server's start."""
        return [
            {"at_seconds": round(change.at - started, 3), "kind": change.kind, "drafter": change.drafter}
            for change in self._changes
        ]
