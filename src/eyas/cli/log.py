"""Where the words of the packages below go: what they log is shown on stderr, a line each, as `report` shows ours."""

import logging
import sys

LOGGER = logging.getLogger("eyas")


class _ToStderr(logging.Handler):
    """Writes to what `sys.stderr` is at that moment: tests and terminals replace it."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write the message alone."""
        print(record.getMessage(), file=sys.stderr, flush=True)


def show_logs() -> None:
    """Let users of the command line read what eyas logs; as a library it keeps to Python's own settings."""
    if not any(isinstance(handler, _ToStderr) for handler in LOGGER.handlers):
        LOGGER.addHandler(_ToStderr())
    LOGGER.setLevel(logging.INFO)
