"""When the next adaptation may begin, and how the last one ended: the interval, doubled behind failures in a row.

Times are of the monotonic clock, so that a wall clock that jumps changes nothing.
"""

import logging
from collections.abc import Callable
from typing import Any, Literal

from eyas.serve.learning.adaptation_record import TRAFFIC
from eyas.serve.learning.learner import AttemptOutcome, AttemptResult
from eyas.serve.monitoring.metrics import ServerMetrics

logger = logging.getLogger(__name__)
MOST_BACKOFF = 6
"""Doublings of the interval."""
LEAST_BACKOFF = 1.0
"""Seconds that a failure counts for at least, whatever the interval is."""

AskedBy = Literal["answers", "alarm"]
SettledOutcome = Literal[AttemptOutcome, "refused", "superseded"]
"""refused: it would be better, and must not serve; superseded: the drafter that it began with was changed meanwhile."""


class AttemptSchedule:
    """Attempts of the learner, one after the other."""

    def __init__(self, interval: float, metrics: ServerMetrics, clock: Callable[[], float]) -> None:
        """`interval` is that between two attempts at least, in seconds."""
        self.clock = clock
        self.attempts = self.failures = 0
        """So far, and in a row."""
        self.last: dict[str, Any] | None = None
        """How the last one ended, in words that every user may read."""
        self._interval, self._metrics = interval, metrics
        self._asked_by: AskedBy = "answers"
        self._not_before = clock()

    @property
    def wait(self) -> float:
        """Seconds until the next may begin."""
        return max(0.0, self._not_before - self.clock())

    @property
    def backing_off(self) -> bool:
        """Whether it waits because of failures."""
        return self.failures > 0 and self.wait > 0

    def begin(self, asked_by: AskedBy) -> int:
        """Count an attempt; its number."""
        self.attempts += 1
        self._asked_by = asked_by
        return self.attempts

    def settle(self, outcome: SettledOutcome, reason: str, result: AttemptResult | None = None) -> None:
        """Write down how an attempt ended, and when the next may begin."""
        traffic = None if result is None or result.record is None else result.record.changes.get(TRAFFIC)
        self.last = {
            "attempt": self.attempts,
            "asked_by": self._asked_by,
            "outcome": outcome,
            "reason": reason,
            "answers": 0 if result is None else result.answers,
            "seconds": 0.0 if result is None else round(result.seconds, 1),
            "gate": None if traffic is None else traffic.model_dump(),
        }
        self._metrics.learn_attempts.labels(outcome).inc()
        logger.warning(f"adaptation {self.attempts}: {outcome}: {reason}")
        if outcome in ("failed", "refused"):
            self.back_off()
        elif outcome != "superseded":  # which says nothing of what the next one will come to
            self.failures, self._not_before = 0, self.clock() + self._interval

    def back_off(self) -> None:
        """Wait longer, the more failures there were in a row; a drafter that was sent back counts as one."""
        self.failures += 1
        wait = max(LEAST_BACKOFF, self._interval) * 2 ** min(self.failures, MOST_BACKOFF)
        self._not_before = self.clock() + wait
