"""Where the words of the packages below go: what they log is shown on stderr, a line each, as `report` shows ours."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

LOGGER = logging.getLogger("eyas")


class _ToStderr(logging.Handler):
    """Writes to what `sys.stderr` is at that moment: tests and terminals replace it."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write the message alone."""
        print(record.getMessage(), file=sys.stderr, flush=True)


@contextmanager
def shown_logs() -> Iterator[None]:
    """Let users of the command line read what eyas logs; as a library it keeps to Python's own settings."""
    handler, level = _ToStderr(), LOGGER.level
    LOGGER.addHandler(handler)
    LOGGER.setLevel(logging.INFO)
    try:
        yield
    finally:
        LOGGER.removeHandler(handler)
        LOGGER.setLevel(level)
