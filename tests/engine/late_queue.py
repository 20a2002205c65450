"""A device that runs everything as late as possible: when waited for, or earlier by chance."""

import random
from collections import deque
from collections.abc import Callable


class LateQueue:
    """Runs functions in order, as late as possible."""

    def __init__(self, seed: int = 0, haste: float = 0.0) -> None:
        self._waiting: deque[Callable[[], object]] = deque()
        self._chance, self._haste = random.Random(seed), haste
        self.done = self.told = 0
        self.behind = 0
        """The most functions that were waiting at once."""

    def run(self, function: Callable[[], object]) -> None:
        self._waiting.append(function)
        self.told += 1
        self.behind = max(self.behind, len(self._waiting))
        while self._waiting and self._chance.random() < self._haste:
            self._run_one()

    def mark(self) -> "LateMark":
        return LateMark(self, self.told)

    def run_to(self, count: int) -> None:
        while self.done < count:
            self._run_one()

    def _run_one(self) -> None:
        self._waiting.popleft()()
        self.done += 1


class LateMark:
    """A position in the queue."""

    def __init__(self, queue: LateQueue, at: int) -> None:
        self._queue, self._at = queue, at

    def wait(self) -> None:
        self._queue.run_to(self._at)

    def seconds_since(self, earlier: "LateMark") -> float:
        assert self._queue.done >= self._at, "must be waited for first"
        return 1e-3 * (self._at - earlier._at)
