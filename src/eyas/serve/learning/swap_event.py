"""A change of drafters by the learner, as /status tells it."""

from dataclasses import asdict, dataclass
from typing import Any

from eyas.serve.learning.watch import LookResult
from eyas.serve.monitoring.drafter_changes import ChangeKind


@dataclass(kw_only=True)
class SwapEvent:
    """When, which and why; what the watch sees is added while it looks."""

    at: float
    """By the monotonic clock."""
    kind: ChangeKind
    drafter: int
    """The one that came to work; 0 is the one that the server was started with."""
    reason: str
    before: float | None = None
    after: float | None = None
    """Acceptance lengths before and after, as deep as both are known."""

    def note_seen(self, seen: LookResult) -> None:
        """Take what a look saw."""
        self.before = round(seen.before.acceptance_length, 4)
        self.after = round(seen.after.acceptance_length, 4)

    def as_json(self, started: float) -> dict[str, Any]:
        """For /status, with times since the start."""
        told = asdict(self)
        return {"at_seconds": round(told.pop("at") - started, 3), **told}
