"""Listens, accepts connections, serves, and drains on SIGTERM or SIGINT."""

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from math import ceil
from types import FrameType

import uvicorn

from eyas.errors import UserError
from eyas.serve.app import Application
from eyas.serve.transport.connection_limiter import ConnectionLimiter, connection_cap
from eyas.serve.transport.http_protocol import (
    LINGER_SECONDS,
    MAX_HEAD_BYTES,
    HttpProtocol,
    count_refusal,
    no_place,
    raw_response,
)

logger = logging.getLogger(__name__)
BACKLOG = 1024
ACCEPT_BATCH = 16
"""Connections per turn of the event loop; others have their turn in between."""
PAUSE_SECONDS = 1.0
"""The pause after an error of accept, such as a lack of file descriptors."""
CLOSE_SECONDS = 10
"""The time for errors to reach clients whose answers were cut off by the drain limit."""


def listen(address: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free port."""
    try:
        (family, kind, protocol, _, place), *_ = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen(BACKLOG)
    except (OSError, OverflowError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(
            f"cannot listen on {address} port {port} ({reason}); choose another --host or --port"
        ) from error
    return listener


def url_of(listener: socket.socket, *, tls: bool = False, root_path: str = "") -> str:
    """The URL of a listening socket."""
    address, port = listener.getsockname()[:2]
    host = f"[{address}]" if ":" in address else address
    return f"{'https' if tls else 'http'}://{host}:{port}{root_path}"


class Listener:
    """A listening socket on the running event loop, in place of an `asyncio.Server`.

    asyncio's own loop accepts as many connections at once as the backlog holds, and when file descriptors run out it
    schedules one retry per attempt: the process then only writes tracebacks. This one accepts a few per turn of the
    event loop, and pauses after an error.
    """

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


class Server(uvicorn.Server):
    """Runs an application until a signal, then drains it."""

    def __init__(self, application: Application, *, tls: ssl.SSLContext | None = None) -> None:
        self._context, self._history = application.context, application.history
        self._drain_seconds = self._context.limits.drain_seconds
        self._limiter = ConnectionLimiter(connection_cap(self._context.limits.max_connections))
        self._context.metrics.connections.set_function(lambda: self._limiter.open)
        super().__init__(
            uvicorn.Config(
                application.asgi,
                http="h11",
                ws="none",
                loop="asyncio",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=75,
                h11_max_incomplete_event_size=MAX_HEAD_BYTES,
                timeout_graceful_shutdown=ceil(self._drain_seconds) + CLOSE_SECONDS,
            )
        )
        self.config.load()
        self.config.ssl = tls  # the context that was tried, not one that uvicorn would make from the files

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.servers = [Listener(listening, self._accept) for listening in sockets or ()]  # type: ignore[misc]
        self.sampling = asyncio.create_task(self._history.run())
        loop = self._context.learning_loop
        self.learning = None if loop is None else asyncio.create_task(loop.run())
        self.started = True

    def _accept(self, accepted: socket.socket, address: str) -> None:
        """Give a connection a place, or refuse it."""
        limits, metrics, loop = self._context.limits, self._context.metrics, asyncio.get_running_loop()
        protocol = HttpProtocol(
            self.config, self.server_state, address=address, limits=limits, limiter=self._limiter, metrics=metrics
        )
        tls = self.config.ssl
        if not self._limiter.add(protocol):
            failure = no_place()
            count_refusal(metrics, failure.code, address, status=None if tls else failure.status)
            with accepted, suppress(OSError):
                if tls is None:
                    accepted.send(raw_response(failure))
                    accepted.shutdown(socket.SHUT_WR)
                    accepted.recv(2**16)  # what is unread at the close would reset the connection
            return

        started = False

        async def connect() -> None:
            nonlocal started
            started = True
            timeouts = {"ssl_handshake_timeout": limits.header_seconds, "ssl_shutdown_timeout": LINGER_SECONDS}
            with suppress(OSError):  # a client that has left, or a TLS handshake that failed
                await loop.connect_accepted_socket(
                    lambda: protocol, accepted, ssl=tls, **(timeouts if tls is not None else {})
                )

        def connected(_: asyncio.Task[None]) -> None:
            if protocol.transport is None:
                self._limiter.remove(protocol)
            if not started:  # evicted before the task ran; asyncio closes all others
                accepted.close()

        protocol.handshake = loop.create_task(connect())
        protocol.handshake.add_done_callback(connected)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain at the first signal, exit at the second; uvicorn's own would raise the signal again at the end."""
        self.force_exit = self.should_exit
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept nothing more, wait for answers in flight, and end those that exceed the limit with an error."""
        admission, engine_client = self._context.admission, self._context.engine_client
        admission.drain()
        self.sampling.cancel()
        if self.learning is not None:
            self.learning.cancel()
        logger.info(f"stopping: {admission.in_flight} answers under way have {self._drain_seconds:g} s")
        loop = asyncio.get_running_loop()
        deadline = loop.call_later(self._drain_seconds, lambda: loop.run_in_executor(None, engine_client.close))
        try:
            await super().shutdown(sockets)
        finally:
            deadline.cancel()
