"""Several servers of one model as one: a request goes to the idlest, to another if that one dies, and waits if all did.

A server that breaks a connection or fails is set aside and asked for its model until it answers as before; requests
that it held are sent again. Only a request that keeps failing on servers that are well is given up
(`RequestFailedError`), and only what is wrong with the request itself is never sent again (`RequestRefusedError`).
"""

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, TypeVar

import aiohttp

from eyas.errors import UserError
from eyas.remote.address import Address, read_model_card

Read = TypeVar("Read")

PROBE_SECONDS = 30.0
"""For a server to say which model it has."""
_BROKEN = (aiohttp.ClientError, asyncio.TimeoutError, OSError)
_BUSY = (408, 425, 429, 503)


class RequestRefusedError(Exception):
    """The server does not take this request, and would not the next time."""


class RequestFailedError(Exception):
    """The request failed as often as it may."""


class BrokenReplyError(Exception):
    """What came is no answer, though it says so; asking again may help."""


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """How long and how often. Seconds."""

    timeout: float = 3600.0
    """For one answer."""
    patience: float = 1800.0
    """While no server is there at all."""
    attempts: int = 6
    """For a request that reached a server."""
    first_delay: float = 0.5
    longest_delay: float = 30.0

    def __post_init__(self) -> None:
        if self.timeout <= 0 or self.patience < 0 or self.attempts < 1:
            raise UserError(
                f"timeout {self.timeout:g}, patience {self.patience:g} and attempts {self.attempts} must be above 0"
            )

    def delay(self, failures: int) -> float:
        """Before the next try, spread so that thousands do not come at once."""
        return min(self.longest_delay, self.first_delay * 2.0 ** min(failures, 16)) * random.uniform(0.5, 1.0)


@dataclass(kw_only=True, eq=False)
class RemoteServer:
    """One of them, and how it is."""

    address: Address
    session: aiohttp.ClientSession
    card: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Fields that requests to this server have beside the others."""
    in_flight: int = 0
    up: bool = False
    watch: asyncio.Task[None] | None = None

    async def get(self, path: str) -> tuple[int, bytes]:
        """Status and body."""
        async with asyncio.timeout(PROBE_SECONDS), self.session.get(self._url(path), headers=self._headers) as reply:
            return reply.status, await reply.read()

    async def post(self, path: str, body: Mapping[str, Any]) -> tuple[int, bytes, float]:
        """Status, body, and how many seconds the server wants to be left alone."""
        headers = {**self._headers, "content-type": "application/json"}
        payload = json.dumps({**body, **self.extra}).encode()
        async with self.session.post(self._url(path), data=payload, headers=headers) as reply:
            return reply.status, await reply.read(), _seconds(reply.headers.get("Retry-After"))

    @property
    def _headers(self) -> dict[str, str]:
        return self.address.headers

    def _url(self, path: str) -> str:
        return self.address.url + path


Admit = Callable[[RemoteServer], Awaitable[Mapping[str, Any]]]
"""Tries a server that is new or was gone, and says which fields its requests have beside the others; raises `UserError`
for one that cannot be used."""


class ServerPool:
    """See above; used inside `async with`, by one event loop."""

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
            raise UserError(f"{len(urls)} servers are given, {len(set(urls))} of them apart; name each once")
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

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        watches = [server.watch for server in self.servers if server.watch is not None]
        for watch in watches:
            watch.cancel()
        await asyncio.gather(*watches, return_exceptions=True)
        await self._session.close()

    async def identify(self) -> Mapping[str, Any]:
        """Ask all which model they have; the card of the first that answers. All must have the same."""
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
        """Try every server that is there, and begin to wait for the others."""
        self._admit = admit
        for server in self.servers:
            problem = "it does not answer" if not server.card else await self._admit_patiently(server, admit)
            if problem is None:
                self._set_up(server)
            else:
                self._suspect(server, problem)

    async def _admit_patiently(self, server: RemoteServer, admit: Admit) -> str | None:
        """Why a server cannot be tried. Connections that were kept meanwhile may be closed by now."""
        problem = ""
        for failures in range(self._retry.attempts):
            try:
                server.extra = await admit(server)
            except _BROKEN as error:
                problem = describe_failure(error, self._retry.timeout)
                await asyncio.sleep(self._retry.delay(failures))
            else:
                return None
        return problem

    async def post(self, path: str, body: Mapping[str, Any], read: Callable[[Any, RemoteServer], Read]) -> Read:
        """Send until a server answers, and return what `read` makes of that.

        `read` may raise `BrokenReplyError`.
        """
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
            except _BROKEN as error:
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
        """The idlest server that is up; wait for one if there is none."""
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
        """Give the server nothing until it has said that it is well."""
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
        """Why a server cannot be used; one that was gone is admitted anew, as it may be another."""
        try:
            why = await self._ask_for_model(server)
            if why is None and (again or not server.extra) and self._admit is not None:
                server.extra = {}
                server.extra = await self._admit(server)
        except (UserError, *_BROKEN) as error:
            return str(error) if isinstance(error, UserError) else describe_failure(error, PROBE_SECONDS)
        return why

    async def _ask_for_model(self, server: RemoteServer) -> str | None:
        try:
            reply = await server.get("/v1/models")
        except _BROKEN as error:
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
    """`Retry-After`, where it is a number."""
    try:
        return min(600.0, max(0.0, float(text or 0)))
    except ValueError:
        return 0.0


def error_message(body: bytes) -> str:
    """What a server says is wrong, in one line."""
    text = body.decode("utf-8", "replace")
    try:
        told = json.loads(text)
        error = told.get("error", told) if isinstance(told, dict) else told
        text = str(error.get("message", error) if isinstance(error, dict) else error)
    except ValueError:
        pass
    return " ".join(text.split())[:300]


def describe_failure(error: BaseException, seconds: float) -> str:
    """Why a connection gave nothing."""
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"no connection ({error.os_error.strerror or error.os_error})"
    if isinstance(error, TimeoutError):
        return f"no answer in {seconds:g} s"
    return f"the connection broke ({error or type(error).__name__})"
