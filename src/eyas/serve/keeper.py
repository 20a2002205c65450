"""Ends a session of processes when the process that started them has ended: `python keeper.py SESSION`.

Its standard input is a pipe from that process, which the system closes in any case. It imports nothing of eyas, so that
it takes little memory beside a server that runs for months.
"""

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path


def end_session(session: int) -> None:
    """Kill every process of a session; without /proc, its first process group."""
    members = [int(one.name) for one in Path("/proc").glob("[0-9]*") if _session_of(one) == session]
    for pid in members:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    if not members:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(session, signal.SIGKILL)


def _session_of(process: Path) -> int:
    try:
        # pid (name, which may hold anything) state ppid pgrp session
        return int((process / "stat").read_text(errors="replace").rpartition(")")[2].split()[3])
    except (OSError, IndexError, ValueError):
        return -1


if __name__ == "__main__":
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # only the end of the pipe counts
    sys.stdin.buffer.read()
    end_session(int(sys.argv[1]))
