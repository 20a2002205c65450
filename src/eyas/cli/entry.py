"""The console script: from the first import on, Ctrl-C is one line and exit code 130.

A reader that leaves does not end a command: `eyas check ... | head -1` exits as `eyas check ...` does, and writes the
same files.
"""

import io
import os
import signal
import stat
import sys
from types import FrameType
from typing import Any


def main() -> None:
    """Run the command line."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:  # a shell has background jobs ignore Ctrl-C
        # Raised within an import, an interruption could be swallowed there. Nothing is lost yet, so it ends at once.
        signal.signal(signal.SIGINT, _end)
    from eyas.cli.app import main as run

    signal.signal(signal.SIGINT, before)
    try:
        _keep_writing()
        run()
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one must not interrupt this
        print("eyas: interrupted", file=sys.stderr)
        sys.exit(130)


def _end(number: int, frame: FrameType | None) -> None:
    print("eyas: interrupted", file=sys.stderr, flush=True)
    os._exit(130)


def _keep_writing() -> None:
    """Let both streams outlive their readers; call it once, before anything is printed."""
    sys.stdout = _patient(sys.stdout)
    sys.stderr = _patient(sys.stderr)


def _patient(stream: Any) -> Any:
    """Wrap a stream into a pipe, so that it swallows what is written once the pipe is broken."""
    try:
        mode = os.fstat(stream.fileno()).st_mode
    except (OSError, ValueError, AttributeError):  # closed, none at all, or not a file
        return stream
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
        return stream
    return io.TextIOWrapper(
        io.BufferedWriter(_Pipe(stream.fileno(), "wb", closefd=False)),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


class _Pipe(io.FileIO):
    """A pipe's end that becomes /dev/null when the other end closes."""

    def write(self, data: Any, /) -> int:
        """Write, if there is a reader."""
        try:
            return super().write(data)
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            return memoryview(data).nbytes
