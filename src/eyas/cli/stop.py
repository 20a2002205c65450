"""SIGINT and SIGTERM in a run that can save its state.

Until there is something to save, a signal ends the process at once. After that the first one asks the run to save and
stop, and a later one ends it at once. "At once" is an exit that unwinds, so that half-written files go away; whatever
holds it up (a compiler, a collective that waits for another process) is ended with all children after a few seconds.
"""

import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

from eyas.cli.terminal import report


class StopRequest:
    """Handles the signals inside a `with` block."""

    MOMENT = 2.0
    """Seconds in which the same request may come twice: `timeout`, terminals and launchers signal a process and its
    group."""
    GRACE = 5.0
    """Seconds for an exit that unwinds."""

    def __init__(self) -> None:
        self._asked_at: float | None = None
        self._saves = False

    def asked(self) -> bool:
        """Whether the run is to save and stop."""
        return self._asked_at is not None

    def saves_from_now_on(self) -> None:
        """There is something to save: the next signal asks for it."""
        self._saves = True

    def __enter__(self) -> "StopRequest":
        self._before = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: object) -> None:
        now = time.monotonic()
        first = self._asked_at is None
        if self._asked_at is None:
            self._asked_at = now
        elif now - self._asked_at <= self.MOMENT:
            return
        if first and self._saves:
            report("saving after this step; once more stops at once")
            return
        report("stopped at once" if self._saves else "stopped before the first step, there is nothing to save yet")
        code = 128 + number
        threading.Thread(target=_end, args=(self.GRACE, code), daemon=True).start()
        raise SystemExit(code)


def _end(grace: float, code: int) -> None:
    """End this process and its children if it is still there after `grace` seconds."""
    time.sleep(grace)
    for child in children_of(os.getpid()):
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    os._exit(code)


def children_of(pid: int) -> list[int]:
    """The processes below this one, where the system tells (Linux)."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):
            # The name, in parentheses, may hold anything.
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for parent in found:
        found += [child for child, own in parents.items() if own == parent]
    return found[1:]
