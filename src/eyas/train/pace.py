"""A share of a device's time: work a little, wait for the device, rest in proportion.

Whoever learns beside a server may have F of the device's time. All time that is not a rest counts as work, whatever was
done in it, so nothing is forgotten: loading, passes of the target, gradients, judging, the doctor. Where work can be
interrupted, `rest` is called. It waits until the device has done what it was given, and then for (1 - F) / F of the
time since the last rest.

Law: in any window of time, work takes F of it at most, and (1 - F) of one piece, which is what lies between two rests.
A rest that lasted too long is not made up for. The clock is monotonic, so setting the time of day changes nothing; a
process that was stopped in the middle of a piece (by a signal, with its machine) counts it as `LONGEST_PIECE` at most.
"""

import time
from collections.abc import Callable
from typing import Any

from eyas.errors import UserError

SHORTEST_PIECE = 0.01
"""Seconds of work that are worth a rest: less is gathered."""
LONGEST_PIECE = 60.0
"""Seconds that a piece of work counts at most: longer is nothing here, unless the process did not run."""
LONGEST_SLEEP = 0.25
"""Seconds after which a rest looks whether the run is to stop."""


class Pace:
    """Keeps one process to a share of its device."""

    def __init__(
        self,
        share: float = 1.0,
        *,
        before: float = 0.0,
        synchronize: Callable[[], None] = lambda: None,
        hurry: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`before` are seconds of work that come first and have had no rest yet; `synchronize` waits for the device.

        Where `hurry` says that a run is to save and end, it does not rest.
        """
        if not 0 < share <= 1:
            raise UserError(f"the share of the device is {share:g}, and must be above 0 and at most 1; 1 takes it all")
        self.share = share
        self._synchronize, self._hurry, self._clock, self._sleep = synchronize, hurry, clock, sleep
        self._began = clock() - before
        self._since: float | None = self._began  # None while resting
        self._worked = 0.0

    def rest(self) -> None:
        """Between two pieces of work."""
        if self.share == 1 or self._piece() < SHORTEST_PIECE:
            return
        self._synchronize()
        piece = self._piece()
        self._worked, self._since = self._worked + piece, None
        until = self._clock() + piece * (1 - self.share) / self.share
        while (left := until - self._clock()) > 0 and not self._hurry():
            self._sleep(min(left, LONGEST_SLEEP))
        self._since = self._clock()

    def seconds_worked(self) -> float:
        """A clock that stands still while resting: seconds of work since the start."""
        return self._worked + self._piece()

    @property
    def taken(self) -> float:
        """The share of the time since the start that was work."""
        return min(1.0, self.seconds_worked() / max(1e-9, self._clock() - self._began))

    def as_json(self) -> dict[str, Any]:
        """For a record: what was asked, what was taken, and of how long."""
        return {
            "asked": self.share,
            "taken": round(self.taken, 4),
            "worked_seconds": round(self.seconds_worked(), 1),
            "seconds": round(self._clock() - self._began, 1),
        }

    def _piece(self) -> float:
        """Seconds since the last rest, as far as they count."""
        gone = 0.0 if self._since is None else self._clock() - self._since
        return gone if self.share == 1 else min(gone, LONGEST_PIECE)


def threads_of(share: float, most: int) -> int:
    """Threads for a share of a processor, of as many as a whole one is worth: that share of them, and one at least."""
    return max(1, int(share * most))
