"""Listen, serve, and drain on SIGTERM or SIGINT."""

import asyncio
import logging
import socket
import ssl
from math import ceil
from types import FrameType

import uvicorn

from eyas.errors import UserError
from eyas.serve.app import Application

logger = logging.getLogger(__name__)
BACKLOG = 1024
CLOSE_SECONDS = 10
"""For errors to reach clients whose answers were cut off by the drain limit."""


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


class Server(uvicorn.Server):
    """Runs an application until a signal, then drains it."""

    def __init__(self, application: Application, *, tls: ssl.SSLContext | None = None) -> None:
        self._context = application.context
        self._drain_seconds = self._context.limits.drain_seconds
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
                timeout_graceful_shutdown=ceil(self._drain_seconds) + CLOSE_SECONDS,
            )
        )
        self.config.load()
        self.config.ssl = tls  # the context that was tried, not one that uvicorn would make of the same files

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain at the first signal, exit at the second; uvicorn's own would raise the signal again at the end."""
        self.force_exit = self.should_exit
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept nothing more, wait for answers in flight, and end those beyond the limit with an error."""
        admission, engine_client = self._context.admission, self._context.engine_client
        admission.drain()
        logger.info(f"stopping: {admission.in_flight} answers under way have {self._drain_seconds:g} s")
        loop = asyncio.get_running_loop()
        deadline = loop.call_later(self._drain_seconds, lambda: loop.run_in_executor(None, engine_client.close))
        try:
            await super().shutdown(sockets)
        finally:
            deadline.cancel()
