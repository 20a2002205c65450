"""HTTP client of the bench: sends requests and notes when each byte arrives.

A failed answer is a result too; only a server that is gone raises `ServerGoneError`.
"""

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import aiohttp

from eyas.bench.counters import Counters, read_counters
from eyas.bench.stream import Arrival, StreamedAnswer, parse_stream
from eyas.remote.address import Address, error_message
from eyas.remote.server_pool import CONNECTION_ERRORS, describe_failure

PROBE_SECONDS = 10.0
_CLOSED = (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError)
"""Raised if the server has closed a kept-alive connection."""


class ServerGoneError(Exception):
    """The server does not answer any more."""


class Client:
    """Client of one server for one run, so that no run reuses the connections of another."""

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

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    def begin(self) -> None:
        """Reset the clock."""
        self._began = time.perf_counter()

    @property
    def now(self) -> float:
        """Seconds since `begin`."""
        return time.perf_counter() - self._began

    async def ask(self, path: str, body: Mapping[str, Any], *, key: str, category: str, turn: int) -> StreamedAnswer:
        payload = json.dumps(body).encode()
        arrivals: list[Arrival] = []
        asked = StreamedAnswer(key=key, category=category, turn=turn, sent=self.now)
        try:
            try:
                status = await self._post(path, payload, arrivals)
            except _CLOSED:
                if arrivals:
                    raise
                # Some servers (llama.cpp's) close after an answer without saying so: send again, on the same clock.
                status = await self._post(path, payload, arrivals)
        except CONNECTION_ERRORS as error:
            await self.get("/v1/models")  # raises if the server is gone
            return replace(asked, error=describe_failure(error, self._timeout))
        if status != 200:
            return replace(asked, error=f"{status}: {error_message(b''.join(data for _, data in arrivals))}")
        return parse_stream(asked, arrivals)

    async def _post(self, path: str, payload: bytes, arrivals: list[Arrival]) -> int:
        """Append the body to `arrivals` as it comes; return the status."""
        async with self._session.post(
            self._address.url + path, data=payload, headers={"content-type": "application/json"}
        ) as response:
            async for data in response.content.iter_any():
                arrivals.append((self.now, data))
            return response.status

    async def get(self, path: str) -> tuple[int, bytes]:
        """Status and body; raises `ServerGoneError` if there is no answer."""
        try:
            async with asyncio.timeout(PROBE_SECONDS), self._session.get(self._address.url + path) as response:
                return response.status, await response.read()
        except CONNECTION_ERRORS as error:
            raise ServerGoneError(describe_failure(error, PROBE_SECONDS)) from error

    async def counters(self) -> Counters | None:
        status, body = await self.get("/metrics")
        return read_counters(body.decode("utf-8", "replace")) if status == 200 else None
