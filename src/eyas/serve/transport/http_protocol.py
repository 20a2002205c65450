"""One connection of an untrusted client: limits on what it sends, and deadlines.

Invariant: whenever the server waits for the client, a deadline runs from the first moment of that wait, so that bytes
that trickle in do not extend it. Input that is no request gets an answer with a status, one log line, and no traceback.
"""

import asyncio
import http
import json
import logging
import re
import sys
import uuid
from collections.abc import Callable
from enum import Enum
from typing import Any, cast

import h11
from starlette.types import Message, Receive, Scope, Send
from uvicorn import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from eyas.serve.api_error import ApiError
from eyas.serve.model_info import ServerLimits
from eyas.serve.monitoring.json_logging import log_event
from eyas.serve.monitoring.metrics import ServerMetrics
from eyas.serve.transport.connection import ERROR_SEND_SECONDS, JSON_HEADERS, ResponseWriter
from eyas.serve.transport.connection_limiter import ConnectionLimiter, client_network

logger = logging.getLogger(__name__)
READ_BYTES = 16 * 1024
"""Bytes parsed in one go; other connections have their turn in between."""
PROBE_PATHS = ("/health", "/metrics")
"""Paths that are answered above the connection cap too, under any root path."""
FREE_CHUNKS = 100
LEAST_CHUNK_BYTES = 64
"""Beyond `FREE_CHUNKS` chunks, a body must have this many bytes in each on average: parsing takes time per chunk."""
CLOSE_HEADER = (b"connection", b"close")
HTTP_VERSIONS = ("1.0", "1.1")
MAX_HEAD_BYTES = 16 * 1024
MAX_HEADERS = 100
LINGER_SECONDS = 2.0
"""The time for a client to read the last response before its connection ends."""
bug_logger = logging.getLogger("uvicorn.error.protocol")
"""uvicorn's warnings are about client input, which is counted here; its errors are bugs."""
bug_logger.setLevel(logging.ERROR)


class Phase(Enum):
    """The event that the server waits for on a connection."""

    HEAD = "the rest of a request's head"
    REQUEST = "the body, the application, or the client to read the response"
    REST = "the rest of a body that is not needed, after its response"
    IDLE = "another request"


class ChunkCounter(h11.Connection):
    """An HTTP parser that refuses bodies which are mostly chunk headers."""

    _chunks = _chunk_bytes = 0

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._chunks = self._chunk_bytes = 0
        elif isinstance(event, h11.Data):
            self._chunks += event.chunk_start
            self._chunk_bytes += len(event.data)
            if self._chunks > FREE_CHUNKS and self._chunk_bytes < LEAST_CHUNK_BYTES * self._chunks:
                raise h11.RemoteProtocolError(f"chunks below {LEAST_CHUNK_BYTES} bytes")
        return event


class ClosingTransport:
    """Delegates to a transport, except for closing: that takes `LINGER_SECONDS` at most and loses no response.

    asyncio closes only once all was written: a client that never reads would keep the connection for ever. And a
    socket that is closed while the client still sends resets the connection, and the client may never see why. Here the
    client has a moment to read, and the data it still sends is read and dropped, but then the connection ends.
    """

    def __init__(self, transport: asyncio.Transport, is_sending: Callable[[], bool]) -> None:
        self._transport, self._is_sending = transport, is_sending
        self._closing = False
        self._deadline: asyncio.TimerHandle | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def close(self) -> None:
        """Write EOF, and end within `LINGER_SECONDS`."""
        if self._closing:
            return
        self._closing = True
        self._deadline = asyncio.get_running_loop().call_later(LINGER_SECONDS, self._transport.abort)
        if self._is_sending() and self._transport.can_write_eof():
            self._transport.write_eof()
            self._transport.resume_reading()
        else:
            self._transport.close()

    def lost(self) -> None:
        """The connection has ended: cancel the deadline."""
        self._closing = True
        if self._deadline is not None:
            self._deadline.cancel()

    def abort(self) -> None:
        self._closing = True
        self._transport.abort()

    def is_closing(self) -> bool:
        return self._closing or self._transport.is_closing()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Write, unless it is closing."""
        if not self._closing:
            self._transport.write(data)


class HttpProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 with deadlines, refusals in OpenAI's format, and a place in the limiter."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        *,
        address: str,
        limits: ServerLimits,
        limiter: ConnectionLimiter,
        metrics: ServerMetrics,
    ) -> None:
        super().__init__(config, server_state, {}, asyncio.get_running_loop())
        self.logger = bug_logger
        self.conn = ChunkCounter(h11.SERVER, config.h11_max_incomplete_event_size or 0)
        self.address = client_network(address)
        self.handshake: asyncio.Task[None] | None = None
        """The task that sets up the connection; with TLS it waits for the client."""
        self._limits, self._limiter, self._metrics = limits, limiter, metrics
        self._application, self.app = self.app, self._answer
        self._phase = Phase.HEAD
        self._phase_started = self.loop.time()
        self._deadline: asyncio.TimerHandle | None = None
        self._body_error: ApiError | None = None

    # For the limiter.

    @property
    def in_request(self) -> bool:
        return self._phase is Phase.REQUEST

    @property
    def waiting_since(self) -> float | None:
        body_is_missing = self.conn.their_state is h11.SEND_BODY
        if not self.in_request or body_is_missing or self.flow.write_paused:
            return self._phase_started
        return None

    def evict(self) -> None:
        self._count("evicted")
        if self.transport is not None:
            self.transport.abort()
        elif self.handshake is not None:
            self.handshake.cancel()

    # Called by asyncio and uvicorn.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if hasattr(transport, "max_size"):  # a plain socket's
            transport.max_size = READ_BYTES
        self._closing_transport = ClosingTransport(transport, self._is_sending)
        super().connection_made(cast("asyncio.Transport", self._closing_transport))
        self._enter(Phase.HEAD)

    def connection_lost(self, exc: Exception | None) -> None:
        self._limiter.remove(self)
        if self._deadline is not None:
            self._deadline.cancel()
        self._unset_keepalive_if_required()
        self._closing_transport.lost()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse data; after an error it is dropped."""
        if self.transport.is_closing() or self._body_error is not None:
            return
        super().data_received(data)
        self._follow()

    def on_response_complete(self) -> None:
        """Wait for the next request, or begin one that was received already."""
        self._enter(Phase.IDLE)
        super().on_response_complete()
        self._follow()

    def send_400_response(self, msg: str) -> None:
        """Answer input that is no HTTP. uvicorn calls this while it handles the parser's error."""
        error = sys.exception()
        failure = _parser_failure(error) if isinstance(error, h11.RemoteProtocolError) else ApiError(400, msg)
        if self.cycle is None or (self.cycle.response_complete and self.conn.our_state is not h11.DONE):
            self._refuse(failure)
        elif self.cycle.response_started:
            self.transport.close()
        else:
            # The application is reading this body: let it answer, and keep the record.
            self._body_error = failure
            self.cycle.message_event.set()

    def timeout_keep_alive_handler(self) -> None:
        """No-op: the deadline of the phase replaces it."""

    def shutdown(self) -> None:
        if not self.transport.is_closing():
            super().shutdown()

    # Deadlines.

    def _follow(self) -> None:
        """Enter the phase that follows from the parser's state."""
        if self.transport.is_closing():
            return
        if self.cycle is not None and not self.cycle.response_complete:
            phase = Phase.REQUEST
        elif self.conn.their_state is not h11.IDLE:
            phase = Phase.REST
        elif self.conn.trailing_data[0] or self.cycle is None:
            phase = Phase.HEAD
        else:
            phase = Phase.IDLE
        if phase is not self._phase:
            self._enter(phase)

    def _enter(self, phase: Phase) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._phase, self._phase_started = phase, self.loop.time()
        seconds = {
            Phase.HEAD: self._limits.header_seconds,
            # The application keeps the deadline itself and says so to the client. This is for one that does not read.
            Phase.REQUEST: self._limits.request_seconds + 2 * ERROR_SEND_SECONDS,
            Phase.REST: self._limits.header_seconds,
            Phase.IDLE: self.timeout_keep_alive,
        }[phase]
        self._deadline = self.loop.call_later(seconds, self._expire)

    def _expire(self) -> None:
        if self.transport.is_closing():
            return  # which has a deadline of its own
        if self._phase is Phase.HEAD and self.conn.trailing_data[0]:
            message = f"the head did not come within {self._limits.header_seconds:g} s; send it faster"
            self._refuse(ApiError(408, message, code="header_timeout"))
        elif self._phase is Phase.REQUEST:
            self._count("unread" if self.flow.write_paused else "overdue")
            self.transport.abort()
        else:
            if self._phase is Phase.HEAD:
                self._count("silent")
            self.transport.close()

    def _is_sending(self) -> bool:
        """Whether the client may be in the middle of a request."""
        return self._phase in (Phase.HEAD, Phase.REST) or self.conn.their_state in (h11.SEND_BODY, h11.ERROR)

    # Requests.

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check the head, then let the application answer."""
        cycle = self.cycle  # once it is complete, the next request of a pipeline has its own
        try:
            check_head(scope, body_bytes=self._limits.body_bytes)
            if self._limiter.only_probes(self) and not scope["path"].endswith(PROBE_PATHS):
                raise no_place()
        except ApiError as failure:
            self._count(failure.code, failure.status)
            writer = ResponseWriter(send, uuid.uuid4().hex)
            await writer.json(failure.body, status=failure.status, headers=failure.headers | {"connection": "close"})
            return

        async def receive_or_raise() -> Message:
            message = await receive()
            if self._body_error is not None:
                raise self._body_error
            return message

        async def send_and_close(message: Message) -> None:
            if self._body_error is not None and message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], CLOSE_HEADER]}
            await send(message)

        await self._application(scope, receive_or_raise, send_and_close)
        if self.flow.write_paused and not cycle.response_complete:
            # The application has given up on a client that does not read; uvicorn would call that a bug.
            cycle.disconnected = True
            self.transport.abort()

    def _refuse(self, failure: ApiError) -> None:
        """Answer without the application, and close."""
        self._count(failure.code, failure.status)
        self.transport.write(raw_response(failure))
        self.transport.close()

    def _count(self, code: str | None, status: int | None = None) -> None:
        count_refusal(self._metrics, code, self.client[0] if self.client else self.address, status=status)


def check_head(scope: Scope, *, body_bytes: int) -> None:
    """Refuse a request by its head alone, before its body is read. The HTTP parser has checked the syntax."""
    version = scope["http_version"]
    if version not in HTTP_VERSIONS:
        raise ApiError(505, f"HTTP/{version} is not spoken here; use HTTP/1.1", code="http_version")
    headers = scope["headers"]
    line = len(scope["method"]) + len(scope["raw_path"]) + len(scope["query_string"])
    size = line + sum(len(name) + len(value) for name, value in headers)
    if len(headers) > MAX_HEADERS or size > MAX_HEAD_BYTES:
        message = (
            f"the head has {len(headers)} headers and {size:,} bytes, above the {MAX_HEADERS} headers or "
            f"{MAX_HEAD_BYTES:,} bytes this server takes; send less"
        )
        raise ApiError(431, message, code="head_too_large")
    if any(character < " " for character in scope["path"]):
        raise ApiError(400, "the path has control characters; leave them out", code="bad_path")
    lengths = [value for name, value in headers if name == b"content-length"]
    encoded = any(name == b"transfer-encoding" for name, _ in headers)
    if encoded and (lengths or version == "1.0"):
        # A proxy in front may read another length than we do: the rest would be a smuggled request.
        beside = "Content-Length" if lengths else "HTTP/1.0"
        message = f"Transfer-Encoding with {beside} leaves the end of the body open; send one length"
        raise ApiError(400, message, code="bad_framing")
    if lengths and int(lengths[0]) > body_bytes:
        message = f"Content-Length is {int(lengths[0]):,}, above the {body_bytes:,} bytes this server takes; send less"
        raise ApiError(413, message, code="too_large")


def no_place() -> ApiError:
    """The refusal of a connection beyond the limit."""
    return ApiError(503, "too many connections; try again", code="too_many_connections", retry=1)


def raw_response(failure: ApiError) -> bytes:
    """A whole response, for a connection that closes after it."""
    body = json.dumps(failure.body).encode()
    headers = JSON_HEADERS | failure.headers | {"content-length": str(len(body)), "connection": "close"}
    lines = [f"HTTP/1.1 {failure.status} {http.HTTPStatus(failure.status).phrase}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


def count_refusal(metrics: ServerMetrics, code: str | None, client: str, *, status: int | None = None) -> None:
    """Record a refusal before any route. The log has only the first few of a kind."""
    metrics.connections_refused.labels(code).inc()
    log_event(logger, "connection_refused", limited_by=code, client=client, status=status, code=code)


def _parser_failure(error: h11.RemoteProtocolError) -> ApiError:
    """The parser's reason, without the client's bytes."""
    reason = re.sub(r": (bytearray\(|b['\"]).*", "", str(error), flags=re.DOTALL)
    if error.error_status_hint == 431:
        return ApiError(431, "the head is too large; send less", code="head_too_large")
    return ApiError(
        error.error_status_hint, f"this is no valid HTTP/1.1 ({reason}); check the request", code="bad_http"
    )
