"""Whether a server that hands out states is there, the right one, and of use: found out by one thread for all.

A server that goes away is tried again until it returns. One that is not the right one when it is first asked is set
aside for good. One that was the right one and is not any more is waited for, since somebody may mend it.
"""

import logging
import threading
import time
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from eyas.errors import UserError
from eyas.train.served.client import DocumentFailedError, ServerAwayError

logger = logging.getLogger(__name__)

PAUSES = (0.5, 30.0)
"""Seconds between tries to reach a server that is away: the first, and the longest."""
REMINDER_SECONDS = 60.0
MAX_FAULTS = 3
"""Documents in a row that a server refused and another one gave, before it is left alone for a while."""
REST_SECONDS = 300.0


class StateClient(Protocol):
    """What is asked of a server (client.py)."""

    url: str
    closed: bool

    def connect(self) -> None:
        """Find out whether it is there and the right one."""
        ...

    def probe(self) -> None:
        """Find out whether it is well."""
        ...

    def fetch(self, ids: Sequence[int]) -> Tensor:
        """The states of a document."""
        ...

    def close(self) -> None:
        """Break off whatever is under way."""
        ...


class ServerHealth:
    """One server, as all its threads see it."""

    def __init__(self, client: StateClient) -> None:
        self.client = client
        self.ready = False
        self.known = False
        """Whether it was ever there, and the right one."""
        self.refused: UserError | None = None
        """Why it is set aside for good."""
        self._asking = threading.Lock()
        self._lost_at = time.monotonic()
        self._reminded = 0.0
        self._next_try = 0.0
        self._pause = 0.0
        self._faults = 0

    def settled(self) -> bool:
        """Whether it is ready; if it is not, one thread tries and the others wait a moment.

        `UserError`, in every thread, if it is the wrong one.
        """
        if self.ready:
            return True
        if not self._asking.acquire(timeout=0.2):
            return False
        try:
            if self.ready:
                return True
            if self.refused is not None:
                raise self.refused
            if time.monotonic() < self._next_try:
                time.sleep(min(0.1, PAUSES[0]))
                return False
            try:
                self.client.connect()
            except (ServerAwayError, DocumentFailedError) as error:
                if self.client.closed:
                    return False
                self._pause = min(PAUSES[1], max(PAUSES[0], 2 * self._pause))
                self._next_try = time.monotonic() + self._pause
                self._remind(str(error))
                return False
            except UserError as error:
                if not self.known:
                    self.refused = error
                    raise
                # It was the right one once: whoever mends it is waited for.
                self._next_try = time.monotonic() + PAUSES[1]
                self._remind(str(error))
                return False
            away = time.monotonic() - self._lost_at
            logger.info(f"{self.client.url} is there" + (f" again, after {away:.0f} s" if self.known else ""))
            self.ready = self.known = True
            self._pause = 0.0
            return True
        finally:
            self._asking.release()

    def lose(self, reason: str) -> None:
        """It is away, or not well."""
        if self.ready:
            self.ready = False
            self._lost_at = time.monotonic()
            self._reminded = 0.0
            self._remind(reason)

    def gave(self) -> None:
        """A document that it was asked for."""
        self._faults = 0

    def was_at_fault(self, reason: str) -> None:
        """It refused a document that another server gave; if that goes on, it is left alone for a while."""
        self._faults += 1
        if self._faults >= MAX_FAULTS and self.ready:
            self._faults = 0
            self.ready = False
            self._lost_at = time.monotonic()
            self._next_try = self._lost_at + REST_SECONDS
            logger.warning(
                f"{self.client.url} is left alone for {REST_SECONDS:g} s: others gave {MAX_FAULTS} documents that it "
                f"refused, the last because {reason}"
            )

    def _remind(self, reason: str) -> None:
        now = time.monotonic()
        if not self._reminded or now - self._reminded > REMINDER_SECONDS:
            self._reminded = now
            logger.warning(f"waiting for {self.client.url}: {reason}")
