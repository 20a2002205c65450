"""Pool of servers of one model: a request goes to the least busy one, and waits while all are down.

A server that breaks a connection or fails is set aside and probed until it serves the model again; its requests are
sent again. A request that keeps failing on healthy servers raises `RequestFailedError`; one that a server refuses
raises `RequestRefusedError` at once.
"""

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import aiohttp

from eyas.errors import UserError
from eyas.remote.address import Address, error_message, read_model_card

Read = TypeVar("Read")

PROBE_SECONDS = 30.0
"""Timeout of /v1/models."""
CONNECTION_ERRORS = (aiohttp.ClientError, asyncio.TimeoutError, OSError)
_BUSY = (408, 425, 429, 503)


class RequestRefusedError(Exception):
    """The server refuses this request; it is not sent again."""


class RequestFailedError(Exception):
    """The request failed too often."""


class BrokenReplyError(Exception):
    """A reply of status 200 is not a valid answer; the request may be sent again."""


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """Time limits in seconds, and number of attempts."""

    timeout: float = 3600.0
    """For one answer."""
    patience: float = 1800.0
    """While no server is up."""
    attempts: int = 6
    """For a request that reaches a server."""
    first_delay: float = 0.5
    longest_delay: float = 30.0

    def __post_init__(self) -> None:
        if self.timeout <= 0 or self.patience < 0 or self.attempts < 1:
            raise UserError(
                f"timeout {self.timeout:g}, patience {self.patience:g} and attempts {self.attempts} must be above 0"
            )

    def delay(self, failures: int) -> float:
        """Seconds before the next attempt: exponential backoff with jitter."""
        return min(self.longest_delay, self.first_delay * 2.0 ** min(failures, 16)) * random.uniform(0.5, 1.0)


@dataclass(kw_only=True, eq=False)
class RemoteServer:
    """A server of the pool, with its state."""

    address: Address
    session: aiohttp.ClientSession
    card: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    in_flight: int = 0
    up: bool = False
    watch: asyncio.Task[None] | None = None

    async def get(self, path: str) -> tuple[int, bytes]:
        url, headers = self.address.url + path, self.address.headers
        async with asyncio.timeout(PROBE_SECONDS), self.session.get(url, headers=headers) as reply:
            return reply.status, await reply.read()

    async def post(self, path: str, body: Mapping[str, Any]) -> tuple[int, bytes, float]:
        """Status, body, and seconds to wait by `Retry-After`."""
        headers = {**self.address.headers, "content-type": "application/json"}
        payload = json.dumps({**body, **self.extra}).encode()
        async with self.session.post(self.address.url + path, data=payload, headers=headers) as reply:
            return reply.status, await reply.read(), _seconds(reply.headers.get("Retry-After"))


Admit = Callable[[RemoteServer], Awaitable[Mapping[str, Any]]]
"""Tries a new or returned server and returns request fields for it alone; raises `UserError` if it cannot be used."""


class ServerPool:
    """Pool of servers, an async context manager for one event loop."""

    def __init__(
        self,
        addresses: Sequence[Address],
        *,
        model: str | None = None,
        retry: RetryPolicy | None = None,
        report: Callable[[str], None] = lambda _: None,
    ) -> None:
        urls = [address.url for address in addresses]
        if not urls or len(set(urls)) < len(urls):
            raise UserError(f"{len(urls)} servers are given, {len(set(urls))} of them distinct; name each once")
        self._addresses, self._model = tuple(addresses), model
        self._retry, self._report = retry or RetryPolicy(), report
        self._admit: Admit | None = None
        self._ready = asyncio.Event()
        self._none_since = time.monotonic()

    async def __aenter__(self) -> "ServerPool":
        timeout = aiohttp.ClientTimeout(total=self._retry.timeout, sock_connect=PROBE_SECONDS)
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout)
        self.servers = tuple(RemoteServer(address=address, session=self._session) for address in self._addresses)
        return self

    async def __aexit__(self, *_: object) -> None:
        watches = [server.watch for server in self.servers if server.watch is not None]
        for watch in watches:
            watch.cancel()
        await asyncio.gather(*watches, return_exceptions=True)
        await self._session.close()

    async def identify(self) -> Mapping[str, Any]:
        """Ask all servers for their model, which must be the same; return the first's entry in /v1/models."""
        problems = await asyncio.gather(*(self._ask_for_model(server) for server in self.servers))
        known = [server for server in self.servers if server.card]
        if not known:
            what = "; ".join(f"{server.address.url}: {why}" for server, why in zip(self.servers, problems, strict=True))
            raise UserError(f"no server answers ({what}); start it, or check the address")
        if self._model is None:
            self._model = str(known[0].card["id"])
            for server in known:
                if server.card["id"] != self._model:
                    raise UserError(
                        f"{server.address.url} serves {server.card['id']!r} and {known[0].address.url} "
                        f"{self._model!r}; one file has the answers of one model, leave one of them out"
                    )
        return known[0].card

    async def start(self, admit: Admit) -> None:
        """Try every server that is up, and wait for the others in the background."""
        self._admit = admit
        for server in self.servers:
            problem = "it does not answer" if not server.card else await self._admit_patiently(server, admit)
            if problem is None:
                self._set_up(server)
            else:
                self._suspect(server, problem)

    async def _admit_patiently(self, server: RemoteServer, admit: Admit) -> str | None:
        """Try a server, again if its connections break; return the problem, if any."""
        problem = ""
        for failures in range(self._retry.attempts):
            try:
                server.extra = await admit(server)
            except CONNECTION_ERRORS as error:
                problem = describe_failure(error, self._retry.timeout)
                await asyncio.sleep(self._retry.delay(failures))
            else:
                return None
        return problem

    async def post(self, path: str, body: Mapping[str, Any], read: Callable[[Any, RemoteServer], Read]) -> Read:
        """Send a request until a server answers, and return `read` of the reply; it may raise `BrokenReplyError`."""
        failures, busy = 0, 0
        while True:
            server = await self._choose()
            server.in_flight += 1
            try:
                status, reply, wait = await server.post(path, {"model": self._model, **body})
                if status == 200:
                    return read(_parsed(reply), server)
                problem = f"{status}: {error_message(reply)}"
                reached = True
            except BrokenReplyError as error:
                problem, status, wait, reached = str(error), 500, 0.0, True
            except CONNECTION_ERRORS as error:
                problem, status, wait = describe_failure(error, self._retry.timeout), 500, 0.0
                reached = not isinstance(error, aiohttp.ClientConnectorError)
            finally:
                server.in_flight -= 1
            if status in _BUSY:
                busy += 1
                await asyncio.sleep(max(wait, self._retry.delay(busy)))
                continue
            if status in (401, 403):
                raise UserError(f"{server.address.url} lets only holders of a key in ({problem}); give --api-key")
            if status < 500:
                raise RequestRefusedError(problem)
            self._suspect(server, problem)
            failures += reached
            if failures >= self._retry.attempts:
                raise RequestFailedError(f"{failures} attempts failed, the last with {problem}")
            if reached:
                await asyncio.sleep(self._retry.delay(failures))

    async def _choose(self) -> RemoteServer:
        """The least busy server that is up; wait for one if there is none."""
        while not any(server.up for server in self.servers):
            try:
                async with asyncio.timeout(max(0.0, self._none_since + self._retry.patience - time.monotonic())):
                    await self._ready.wait()
            except TimeoutError as error:
                raise UserError(
                    f"no server answered for {self._retry.patience:g} s (--patience); what was answered before is "
                    "kept: start a server and give the same command again"
                ) from error
        return min((server for server in self.servers if server.up), key=lambda server: server.in_flight)

    def _set_up(self, server: RemoteServer) -> None:
        server.up = True
        self._ready.set()

    def _suspect(self, server: RemoteServer, problem: str) -> None:
        """Take the server out of the pool until it answers again."""
        if server.watch is not None:
            return
        server.up = False
        if not any(other.up for other in self.servers):
            self._ready.clear()
            self._none_since = time.monotonic()
        server.watch = asyncio.create_task(self._wait_for(server, problem))

    async def _wait_for(self, server: RemoteServer, problem: str) -> None:
        since, failures = time.monotonic(), 0
        while (why := await self._try(server, again=failures > 0)) is not None:
            if not failures:
                self._report(f"{server.address.url} is away ({why}, after {problem}); trying again until it is back")
            failures += 1
            await asyncio.sleep(self._retry.delay(failures))
        if failures:
            self._report(f"{server.address.url} is there again, after {time.monotonic() - since:.0f} s")
        server.watch = None
        self._set_up(server)

    async def _try(self, server: RemoteServer, *, again: bool) -> str | None:
        """Probe a server and return the problem, if any; one that was gone is tried anew."""
        try:
            why = await self._ask_for_model(server)
            if why is None and (again or not server.extra) and self._admit is not None:
                server.extra = {}
                server.extra = await self._admit(server)
        except (UserError, *CONNECTION_ERRORS) as error:
            return str(error) if isinstance(error, UserError) else describe_failure(error, PROBE_SECONDS)
        return why

    async def _ask_for_model(self, server: RemoteServer) -> str | None:
        try:
            reply = await server.get("/v1/models")
        except CONNECTION_ERRORS as error:
            return describe_failure(error, PROBE_SECONDS)
        if reply[0] >= 500:
            return f"{reply[0]}: {error_message(reply[1])}"
        server.card = read_model_card(reply, server.address, self._model)
        return None


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError as error:
        raise BrokenReplyError(f"an answer that is not JSON ({error})") from error


def _seconds(text: str | None) -> float:
    try:
        return min(600.0, max(0.0, float(text or 0)))
    except ValueError:
        return 0.0


def describe_failure(error: BaseException, seconds: float) -> str:
    """A connection error in words."""
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"no connection ({error.os_error.strerror or error.os_error})"
    if isinstance(error, TimeoutError):
        return f"timed out after {seconds:g} s"
    return f"the connection broke ({error or type(error).__name__})"
