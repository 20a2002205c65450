"""The client: asks, and notes when each byte came. All HTTP of the bench is here.

Answers that fail are results too; only a server that is gone raises, since nothing more can be learnt from it.
"""

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any

import aiohttp

from eyas.bench.counters import Counters, read_counters
from eyas.bench.stream import Arrival, StreamedAnswer, error_message, parse_stream
from eyas.remote.address import Address

PROBE_SECONDS = 10.0
_BROKEN = (aiohttp.ClientError, asyncio.TimeoutError, OSError)
_CLOSED = (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError)
"""What a kept connection says that the server has closed."""


class ServerGoneError(Exception):
    """Nobody answers any more."""


class Client:
    """A server's counterpart for one run; connections are made anew for each, as none may be left from before."""

    def __init__(self, address: Address, *, timeout: float) -> None:
        self._address, self._timeout = address, timeout
        self._began = time.perf_counter()

    async def __aenter__(self) -> "Client":
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=self._timeout, sock_connect=PROBE_SECONDS),
            headers=self._address.headers,
            auto_decompress=False,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    def begin(self) -> None:
        """Count times from now."""
        self._began = time.perf_counter()

    @property
    def now(self) -> float:
        """Seconds since the beginning."""
        return time.perf_counter() - self._began

    async def ask(self, path: str, body: Mapping[str, Any], *, key: str, category: str, turn: int) -> StreamedAnswer:
        """Send, and read the stream to its end."""
        payload = json.dumps(body).encode()
        arrivals: list[Arrival] = []
        asked = StreamedAnswer(key=key, category=category, turn=turn, sent=self.now)
        try:
            try:
                status = await self._post(path, payload, arrivals)
            except _CLOSED:
                if arrivals:
                    raise
                # Some servers (llama.cpp's) close behind an answer and do not say so. The clock goes on meanwhile.
                status = await self._post(path, payload, arrivals)
        except _BROKEN as error:
            await self.get("/v1/models")  # raises if the server is gone
            reason = f"timed out after {self._timeout:g} s" if isinstance(error, TimeoutError) else _reason(error)
            return replace(asked, error=reason)
        if status != 200:
            told = _message(b"".join(data for _, data in arrivals))
            return replace(asked, error=f"{status}: {told}")
        return parse_stream(asked, arrivals)

    async def _post(self, path: str, payload: bytes, arrivals: list[Arrival]) -> int:
        """Add what comes to `arrivals`; the status."""
        async with self._session.post(
            self._address.url + path, data=payload, headers={"content-type": "application/json"}
        ) as response:
            async for data in response.content.iter_any():
                arrivals.append((self.now, data))
            return response.status

    async def get(self, path: str) -> tuple[int, bytes]:
        """Status and body; raises if the server is gone."""
        try:
            async with asyncio.timeout(PROBE_SECONDS), self._session.get(self._address.url + path) as response:
                return response.status, await response.read()
        except _BROKEN as error:
            raise ServerGoneError(_reason(error)) from error

    async def counters(self) -> Counters | None:
        """The server's own counts, where it tells them."""
        status, body = await self.get("/metrics")
        return read_counters(body.decode("utf-8", "replace")) if status == 200 else None


def _message(body: bytes) -> str:
    try:
        return error_message(json.loads(body))
    except ValueError:
        return error_message(body.decode("utf-8", "replace"))


def _reason(error: BaseException) -> str:
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"no connection ({error.os_error.strerror or error.os_error})"
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return f"the connection broke ({error or type(error).__name__})"
