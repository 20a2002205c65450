"""One line of JSON for each event, for machines that collect logs. Never what users wrote or were told.

Invariant: fields are numbers, ids and words of our own; the two exceptions are the `user` a client named itself by and
its address.
"""

import json
import logging
import time
from typing import Any

LOGGER = logging.getLogger("eyas.serve")


def log(event: str, *, level: int = logging.INFO, **fields: Any) -> None:
    """Write a line; fields that are None are left out."""
    known = {name: value for name, value in fields.items() if value is not None}
    LOGGER.log(level, event, extra={"fields": known})


def warn(message: str) -> None:
    """Something an operator should know."""
    log("notice", level=logging.WARNING, message=message)


class JsonFormatter(logging.Formatter):
    """A record as one JSON object."""

    def format(self, record: logging.LogRecord) -> str:
        """The line of a record, our own or a library's."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        line: dict[str, Any] = {"time": stamp, "level": record.levelname.lower(), "event": record.getMessage()}
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)
