"""Responses to one client as JSON or server-sent events, and detection of a disconnect."""

import asyncio
import json
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from starlette.types import Receive, Send

from eyas.serve.api_error import ApiError

Result = TypeVar("Result")
ERROR_SEND_SECONDS = 5.0
"""The time for an error to reach a client that may not be reading."""
JSON_HEADERS = {"content-type": "application/json"}
SSE_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}


class ClientDisconnectedError(Exception):
    """The client closed the connection."""


class ResponseWriter:
    """Writes one response. A stream sends its status with the first event, so an earlier error has its own status."""

    def __init__(self, send: Send, request_id: str, *, named_events: bool = False) -> None:
        self._send = send
        self._named_events = named_events
        self._request_id = request_id
        self._streaming = False
        self._write_lock = asyncio.Lock()  # several choices share the connection
        self.status: int | None = None
        self.headers: dict[str, str] = {}
        """Headers that every response to this request has."""

    async def json(self, body: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> None:
        payload = _dump(body)
        await self._start(status, JSON_HEADERS | {"content-length": str(len(payload))} | (headers or {}))
        await self._send({"type": "http.response.body", "body": payload})

    async def event(self, body: Any) -> None:
        async with self._write_lock:
            if not self._streaming:
                self._streaming = True
                await self._start(200, SSE_HEADERS)
            await self._chunk(self._event_bytes(body))

    async def end(self) -> None:
        if not self._named_events:
            await self._chunk(b"data: [DONE]\n\n")
        await self._send({"type": "http.response.body", "body": b""})

    async def fail(self, failure: ApiError, event: Any = None) -> None:
        """Send an error: as a status if none was sent yet, else as the last event of the stream (`event`, if given)."""
        with suppress(TimeoutError):
            async with asyncio.timeout(ERROR_SEND_SECONDS):
                if self.status is None:
                    await self.json(failure.body, status=failure.status, headers=failure.headers)
                elif self._streaming:
                    await self._chunk(self._event_bytes(event or failure.body))
                    await self._send({"type": "http.response.body", "body": b""})

    async def _start(self, status: int, headers: dict[str, str]) -> None:
        self.status = status
        pairs = [(name.lower().encode(), value.encode("latin-1")) for name, value in (headers | self.headers).items()]
        pairs.append((b"x-request-id", self._request_id.encode()))
        await self._send({"type": "http.response.start", "status": status, "headers": pairs})

    def _event_bytes(self, body: Any) -> bytes:
        name = f"event: {body['type']}\n".encode() if self._named_events else b""
        return name + b"data: " + _dump(body) + b"\n\n"

    async def _chunk(self, payload: bytes) -> None:
        await self._send({"type": "http.response.body", "body": payload, "more_body": True})


async def cancel_on_disconnect(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`, which is cancelled if the client disconnects. Call it after the body was read."""
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_wait_for_disconnect(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnectedError
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _dump(body: Any) -> bytes:
    return json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8", "replace")
