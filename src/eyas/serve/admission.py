"""Admission control: the number of answers that the server accepts at once.

When the engine and the queue are full, a client gets 429 with Retry-After instead of an endless wait. A count is
enough, because the scheduler decides which answers run.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from math import ceil
from time import monotonic

from eyas.serve.api_error import ApiError

MAX_RETRY_SECONDS = 60
"""The longest Retry-After; a longer estimate would be a guess."""
DECAY = 0.1
"""Weight of the newest answer in the mean duration."""


class AdmissionController:
    """Counts answers in flight. It is used on the event loop only."""

    def __init__(self, *, max_num_seqs: int, queue: int) -> None:
        self.capacity = max_num_seqs + queue
        self.in_flight = 0
        self.draining = False
        self._max_num_seqs = max_num_seqs
        self._mean_seconds = 1.0

    def check_capacity(self, count: int = 1) -> None:
        """Raise an error if `count` more answers cannot be accepted."""
        if self.draining:
            raise ApiError(503, "the server is shutting down; try another one", code="shutting_down", retry=1)
        if count > self.capacity:
            message = f"{count} answers were asked for at once, above the {self.capacity} there is room for"
            raise ApiError(400, f"{message}; ask for fewer")
        if self.in_flight + count > self.capacity:
            retry = self.retry_after
            message = f"{self.in_flight} of {self.capacity} places are taken and {count} are needed"
            raise ApiError(429, f"{message}; try again in {retry} s", code="queue_full", retry=retry)

    @property
    def retry_after(self) -> int:
        """Estimated seconds until half of the answers in flight are done."""
        rounds = self.in_flight / self._max_num_seqs
        return max(1, min(MAX_RETRY_SECONDS, ceil(self._mean_seconds * rounds / 2)))

    @contextmanager
    def admit(self, count: int) -> Iterator[None]:
        """Count `count` answers as in flight while the block runs."""
        self.check_capacity(count)
        self.in_flight += count
        started = monotonic()
        try:
            yield
            # Not for requests that were refused or failed: they say nothing about the time of an answer.
            self._mean_seconds += DECAY * (monotonic() - started - self._mean_seconds)
        finally:
            self.in_flight -= count

    def drain(self) -> None:
        """Accept no more answers."""
        self.draining = True
