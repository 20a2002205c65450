"""How many answers are taken on at once, and the end of taking on.

Beyond the engine's own places and a queue, a client is told to come back rather than left to wait for nothing. A count
is enough: who waits for what is the scheduler's affair.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from math import ceil
from time import monotonic

from eyas.serve.api_error import ApiError

MAX_RETRY_SECONDS = 60
"""Seconds; what is further away nobody can tell."""
DECAY = 0.1
"""Of the newest answer in the mean duration."""


class AdmissionController:
    """Counts answers under way. All of it happens on the event loop."""

    def __init__(self, *, max_num_seqs: int, queue: int) -> None:
        self.capacity = max_num_seqs + queue
        self.in_flight = 0
        self.draining = False
        self._max_num_seqs = max_num_seqs
        self._mean_seconds = 1.0

    def check_capacity(self, count: int = 1) -> None:
        """Refuse where so many more cannot be taken on."""
        if self.draining:
            raise ApiError(503, "the server is shutting down; try another one", code="shutting_down", retry=1)
        if count > self.capacity:
            raise ApiError(
                400,
                f"{count} answers were asked for at once, above the {self.capacity} there is room for; ask for fewer",
            )
        if self.in_flight + count > self.capacity:
            retry = self.retry_after
            message = (
                f"{self.in_flight} of {self.capacity} places are taken and {count} are needed; try again in {retry} s"
            )
            raise ApiError(429, message, code="queue_full", retry=retry)

    @property
    def retry_after(self) -> int:
        """Seconds until about half of those under way are done."""
        rounds = self.in_flight / self._max_num_seqs
        return max(1, min(MAX_RETRY_SECONDS, ceil(self._mean_seconds * rounds / 2)))

    @contextmanager
    def admit(self, count: int) -> Iterator[None]:
        """Hold so many places."""
        self.check_capacity(count)
        self.in_flight += count
        started = monotonic()
        try:
            yield
        finally:
            self.in_flight -= count
            self._mean_seconds += DECAY * (monotonic() - started - self._mean_seconds)

    def drain(self) -> None:
        """Take on nothing more."""
        self.draining = True
