"""Logs as JSON lines, for machines that collect them. They never hold a prompt or an answer.

Invariant: values are numbers, ids and text of our own. The exceptions are the client's address, the `user` that a
request names and, of refused requests, the first 100 letters of an unknown path, Host or Origin.
"""

import json
import logging
import sys
import time
from typing import Any

LOGGERS = {"eyas": logging.INFO, "uvicorn.error": logging.WARNING}
"""What is logged once the server serves: all of eyas, and what the HTTP server complains about."""


def log_json_lines(level: int = logging.INFO) -> None:
    """From now on, write these loggers to stderr as JSON lines and nowhere else: eyas from this level on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    for name, least in LOGGERS.items():
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level if name == "eyas" else max(least, level))


def log_event(logger: logging.Logger, event: str, *, level: int = logging.INFO, **fields: Any) -> None:
    """Log an event with fields; fields that are None are left out."""
    logger.log(level, event, extra={"fields": {name: value for name, value in fields.items() if value is not None}})


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object: an event with its fields, or any other message as a notice."""

    def format(self, record: logging.LogRecord) -> str:
        """The line of a record, our own or a library's."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        line: dict[str, Any] = {"time": stamp, "level": record.levelname.lower()}
        fields = getattr(record, "fields", None)
        if fields is None:
            line |= {"event": "notice", "logger": record.name, "message": record.getMessage()}
        else:
            line |= {"event": record.getMessage()} | fields
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)
