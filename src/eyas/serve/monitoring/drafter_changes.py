"""Which drafters came to work since the start, when and why: for /status, and marks in the page's plots.

Whoever swaps drafters notes it here, a request as well as what learns from traffic: all changes are in one list.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

MOST = 64
"""Changes that are told of: the latest."""

ChangeKind = Literal["swap", "rollback"]
"""rollback: the one before came back because the new one was worse."""


@dataclass(kw_only=True)
class DrafterChange:
    """Another drafter, or none, from a moment on."""

    at: float
    """By the monotonic clock."""
    kind: ChangeKind
    drafter: str | None
    """By the name that clients see; None: nobody drafts any more."""
    reason: str | None = None
    """Why, if what learns from traffic did it; None: a request asked for it."""
    before: float | None = None
    after: float | None = None
    """Acceptance lengths of the drafter before and of this one in real answers, as far as somebody watches them."""


class DrafterChanges:
    """The latest changes, the oldest first."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changes: deque[DrafterChange] = deque(maxlen=MOST)

    def note(self, drafter: str | None, kind: ChangeKind = "swap", reason: str | None = None) -> None:
        """This drafter serves from now on."""
        self._changes.append(DrafterChange(at=self._clock(), kind=kind, drafter=drafter, reason=reason))

    def note_seen(self, before: float, after: float) -> None:
        """What real answers say of the drafter at work."""
        if self._changes:
            self._changes[-1].before, self._changes[-1].after = round(before, 4), round(after, 4)

    def as_json(self, started: float) -> list[dict[str, Any]]:
        """For /status, with times since the server's start."""
        told = [asdict(change) for change in self._changes]
        return [{"at_seconds": round(one.pop("at") - started, 3), **one} for one in told]
