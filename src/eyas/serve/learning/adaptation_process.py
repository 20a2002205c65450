"""Runs `eyas adapt` as a process beside the server: niced, with its own log, ended with the server.

It runs in a session of its own, so that Ctrl-C is for the server, and a keeper ends that session if the server is
killed. Its output goes to its log; the last line of it describes a failure.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from eyas.serve import keeper
from eyas.serve.keeper import end_session

NICENESS = 10
STOP_SECONDS = 5.0
MOST_READ = 2**16
"""The bytes of the log that are read, from its end."""
MOST_WORDS = 400


class AdaptationProcess:
    """A running adaptation. Call `stop` if its end is not awaited any more."""

    def __init__(self, command: Sequence[str], log: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Start it with an empty log; OSError if that fails."""
        self._log, self._clock, self._began = log, clock, clock()
        self._released = False
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
                start_new_session=True,
                umask=0o077,  # its files come from private answers
            )
        try:
            self._keeper = subprocess.Popen(
                [sys.executable, "-S", "-E", str(keeper.__file__), str(self.pid)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        except OSError:
            self._process.kill()
            self._process.wait()
            raise
        if hasattr(os, "setpriority"):
            with suppress(OSError):  # it has ended already
                os.setpriority(os.PRIO_PROCESS, self.pid, NICENESS)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def seconds(self) -> float:
        return self._clock() - self._began

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        code = self._process.poll()
        if code is not None:
            self._release()
        return code

    def stop(self) -> None:
        """End it and its child processes, if that was not done yet."""
        if self._process.poll() is None:
            with suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_SECONDS)
        self._release()

    def last_line(self) -> str:
        try:
            with self._log.open("rb") as log:
                log.seek(max(0, self._log.stat().st_size - MOST_READ))
                lines = [line for line in log.read().decode("utf-8", "replace").splitlines() if line.strip()]
        except OSError:
            lines = []
        return lines[-1].strip()[:MOST_WORDS] if lines else "it said nothing"

    def _release(self) -> None:
        """End its child processes and the keeper now: later its process id may belong to another process."""
        if self._released:
            return
        self._released = True
        end_session(self.pid)
        self._process.wait()
        assert self._keeper.stdin is not None
        self._keeper.stdin.close()
        self._keeper.wait()
