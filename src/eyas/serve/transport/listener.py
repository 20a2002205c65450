"""Accept connections, never faster than they can be handled.

asyncio's own accept loop takes as many at once as the backlog holds, and when file descriptors run out it schedules one
retry per attempt: the process then only writes tracebacks. This one takes a few per turn of the event loop and pauses.
"""

import asyncio
import logging
import socket
from collections.abc import Callable

ACCEPT_BATCH = 16
"""Connections per turn of the event loop; others have their turn in between."""
PAUSE_SECONDS = 1.0
"""After an error of accept, such as a lack of file descriptors."""
logger = logging.getLogger(__name__)


class Listener:
    """A listening socket on the running event loop, in the place of an `asyncio.Server`."""

    def __init__(self, listening: socket.socket, on_accept: Callable[[socket.socket, str], None]) -> None:
        self.sockets: tuple[socket.socket, ...] = (listening,)
        self._on_accept = on_accept
        self._loop = asyncio.get_running_loop()
        self._retry: asyncio.TimerHandle | None = None
        listening.setblocking(False)
        self._resume()

    def close(self) -> None:
        """Accept nothing more."""
        if self._retry is not None:
            self._retry.cancel()
        for listening in self.sockets:
            self._loop.remove_reader(listening)
            listening.close()
        self.sockets = ()

    async def wait_closed(self) -> None:
        """Return at once: connections are waited for elsewhere."""

    def _resume(self) -> None:
        for listening in self.sockets:
            self._loop.add_reader(listening, self._accept, listening)

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(ACCEPT_BATCH):
            try:
                accepted, address = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                # The socket stays readable, so waiting on it would only repeat the error.
                self._loop.remove_reader(listening)
                self._retry = self._loop.call_later(PAUSE_SECONDS, self._resume)
                logger.error(f"no connection is accepted for {PAUSE_SECONDS:g} s ({error.strerror}); see ulimit -n")
                return
            accepted.setblocking(False)
            self._on_accept(accepted, str(address[0]))
