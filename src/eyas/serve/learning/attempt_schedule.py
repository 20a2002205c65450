"""Schedules adaptations: an interval between attempts, doubled after each failure in a row.

Times are by the monotonic clock, so that jumps of the wall clock have no effect.
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
"""The least wait after a failure in seconds, for any interval."""

AskedBy = Literal["answers", "alarm"]
SettledOutcome = Literal[AttemptOutcome, "refused", "superseded"]
"""refused: better, but it must not serve; superseded: the drafter was changed during the attempt."""


class AttemptSchedule:
    """The learner's attempts, one at a time."""

    def __init__(self, interval: float, metrics: ServerMetrics, clock: Callable[[], float]) -> None:
        """`interval` is the least time between two attempts, in seconds."""
        self.clock = clock
        self.attempts = self.failures = 0
        """All attempts, and the failures in a row."""
        self.last: dict[str, Any] | None = None
        """The last result, without private texts: every user may read it."""
        self._interval, self._metrics = interval, metrics
        self._asked_by: AskedBy = "answers"
        self._not_before = clock()

    @property
    def wait(self) -> float:
        """Seconds until the next attempt may begin."""
        return max(0.0, self._not_before - self.clock())

    @property
    def backing_off(self) -> bool:
        return self.failures > 0 and self.wait > 0

    def begin(self, asked_by: AskedBy) -> int:
        """Count an attempt and return its number."""
        self.attempts += 1
        self._asked_by = asked_by
        return self.attempts

    def settle(self, outcome: SettledOutcome, reason: str, result: AttemptResult | None = None) -> None:
        """Record the result of an attempt and set the time of the next."""
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
        elif outcome != "superseded":  # which says nothing about the next one
            self.failures, self._not_before = 0, self.clock() + self._interval

    def back_off(self) -> None:
        """Wait longer after each failure in a row. A rolled-back drafter counts as a failure."""
        self.failures += 1
        wait = max(LEAST_BACKOFF, self._interval) * 2 ** min(self.failures, MOST_BACKOFF)
        self._not_before = self.clock() + wait
