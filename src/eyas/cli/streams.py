"""Standard output and error that outlive their reader: `eyas check ... | head -1` exits as `eyas check ...` does.

A command whose reader has left goes on without one: what it returns, and the files that it writes, stay the same.
"""

import io
import os
import stat
import sys
from typing import Any


def keep_writing() -> None:
    """Let both streams take what nobody reads any more; to be called once, before anything is printed."""
    sys.stdout = _patient(sys.stdout)
    sys.stderr = _patient(sys.stderr)


def _patient(stream: Any) -> Any:
    """A stream into a pipe that swallows what is written once the pipe is broken; any other stream as it is."""
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
