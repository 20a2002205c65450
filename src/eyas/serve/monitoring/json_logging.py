"""Logs as JSON lines, for machines that collect them. They never hold a prompt or an answer.

Invariant: values are numbers, ids and text of our own. The exceptions are the client's address, the `user` that a
request names and, of refused requests, the first 100 letters of an unknown path, Host or Origin. Messages that a client
can cause at will are rate-limited by kind.
"""

import json
import logging
import sys
import time
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, TextIO

LOGGERS = {
    "eyas": logging.INFO,
    "uvicorn.error": logging.WARNING,
    "asyncio": logging.WARNING,
    "py.warnings": logging.WARNING,
}
"""The loggers of a server and their levels: everything of eyas, and warnings of libraries."""
LIMIT_LINES = 5
LIMIT_SECONDS = 10.0
"""The time in which that many lines of a kind are written. Others are counted."""
MAX_KINDS = 256
"""The limit of kinds that are counted at once, which bounds the memory."""


def log_json_lines(level: int = logging.INFO) -> None:
    """Write these loggers to stderr as JSON lines and nowhere else; `level` is for eyas."""
    handler = RateLimitedHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    logging.captureWarnings(True)
    for name, least in LOGGERS.items():
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level if name == "eyas" else max(least, level))


def log_event(
    logger: logging.Logger, event: str, *, level: int = logging.INFO, limited_by: str | None = None, **fields: Any
) -> None:
    """Log an event with fields, without those that are None. Events with the same `limited_by` are one kind."""
    given = {name: value for name, value in fields.items() if value is not None}
    logger.log(level, event, extra={"fields": given, "limited_by": limited_by})


@dataclass
class _Kind:
    """The lines of one kind since its first."""

    first: logging.LogRecord
    lines: int = 0


class RateLimitedHandler(logging.StreamHandler[TextIO]):
    """Writes records, but only the first few per time of each kind of limited event and library message.

    The number that was left out is a line of its own, written before the next line after that time.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._kinds: dict[Hashable, _Kind] = {}

    def emit(self, record: logging.LogRecord) -> None:
        self._report_suppressed(before=record.created - LIMIT_SECONDS)
        key = _kind_of(record)
        if key is not None:
            if key not in self._kinds and len(self._kinds) >= MAX_KINDS:
                key = "other"
            kind = self._kinds.setdefault(key, _Kind(record))
            kind.lines += 1
            if kind.lines > LIMIT_LINES:
                return
        super().emit(record)

    def close(self) -> None:
        """Write the counts that are left."""
        self._report_suppressed(before=float("inf"))
        super().close()

    def _report_suppressed(self, *, before: float) -> None:
        for key, kind in list(self._kinds.items()):
            first = kind.first
            if first.created > before:
                continue
            del self._kinds[key]
            if kind.lines > LIMIT_LINES:
                told = {"logger": first.name, "message": _first_line(first), "code": getattr(first, "limited_by", None)}
                fields = {name: value for name, value in told.items() if value is not None}
                summary = logging.LogRecord(first.name, first.levelno, "", 0, "suppressed", None, None)
                summary.fields = fields | {"lines": kind.lines - LIMIT_LINES, "seconds": LIMIT_SECONDS}
                super().emit(summary)


def _kind_of(record: logging.LogRecord) -> Hashable | None:
    """The kind of a record; None if it is always written."""
    limited_by = getattr(record, "limited_by", None)
    if limited_by is not None:
        return record.getMessage(), limited_by
    if record.name.partition(".")[0] == "eyas":
        return None
    return record.name, record.levelno, _first_line(record)


def _first_line(record: logging.LogRecord) -> str:
    """The message up to its first line break: libraries put objects that differ each time below it."""
    return record.getMessage().partition("\n")[0]


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object: an event with its fields, or any other message as a notice."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        line: dict[str, Any] = {"time": stamp, "level": record.levelname.lower()}
        fields = getattr(record, "fields", None)
        if fields is None:
            line |= {"event": "notice", "logger": record.name, "message": _first_line(record)}
        else:
            line |= {"event": record.getMessage()} | fields
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)
