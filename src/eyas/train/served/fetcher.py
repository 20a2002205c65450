"""Fetches packs of documents from servers ahead of the trainer, in order, within a bound on bytes.

Each server has a few threads, each with one request under way; vLLM batches them. A pack's documents are asked for when
its bytes fit beside those of packs that were not yet taken, so that neither disk nor memory holds more than
`ahead_bytes` and the one pack that the trainer waits for, which is asked for in any case.

A server that goes away gives its documents back to the queue and is tried again until it returns: that costs time and
nothing else. One that is not the right one is set aside while others carry on; the run ends only where none is left. A
document that servers which are well refuse `ATTEMPTS` times has failed: it is counted, and the pack goes on without it.
What one server refused is asked of another first.

Shapes: T tokens, A captured layers, D hidden size.
"""

import heapq
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from eyas.errors import UserError
from eyas.train.features import InterruptedWaitError
from eyas.train.served.client import DocumentFailedError, ServerAwayError
from eyas.train.served.health import ServerHealth, StateClient

logger = logging.getLogger(__name__)

ATTEMPTS = 3
CLOSE_SECONDS = 20.0
FAILURES_SHOWN = 10


@dataclass(kw_only=True, eq=False)
class PackRequest:
    """The documents of one pack, under way."""

    number: int
    documents: list[list[int]]
    size: int
    """Bytes of their states."""
    states: list[Tensor | None]
    """Of each document, once it is there; None for one that failed."""
    left: int
    """Documents that are neither there nor failed."""
    failed: set[int] = field(default_factory=set)
    refusals: dict[int, list[tuple[ServerHealth, str]]] = field(default_factory=dict)
    """Of a document, by servers that were well."""


@dataclass(kw_only=True)
class FetchCounts:
    """What came of it all."""

    documents: int = 0
    failed: int = 0
    retried: int = 0
    """Requests that were made again, for whatever reason."""
    waited_seconds: float = 0.0
    """How long the trainer waited."""


class StateFetcher:
    """Threads that fetch, and the queue before them."""

    def __init__(
        self,
        clients: Sequence[StateClient],
        *,
        bytes_per_token: int,
        ahead_bytes: int,
        in_flight: int,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.counts = FetchCounts()
        self._bytes_per_token, self._ahead_bytes, self._stop = bytes_per_token, ahead_bytes, stop
        self._changed = threading.Condition()
        self._not_asked: deque[PackRequest] = deque()
        self._jobs: list[tuple[int, int, PackRequest]] = []
        self._held = 0  # bytes of packs that were asked for and not yet taken
        self._numbers = 0
        self._closed = False
        self._broken: Exception | None = None
        self._aside: list[ServerHealth] = []
        self._servers = [ServerHealth(client) for client in clients]
        # Nobody is asked before something is wanted: a cache that is whole needs no server.
        self._threads = [
            threading.Thread(target=self._run, args=(server,), daemon=True)
            for server in self._servers
            for _ in range(in_flight)
        ]

    @property
    def held_bytes(self) -> int:
        """Of states that are under way, on disk or in memory."""
        return self._held

    def request(self, documents: Sequence[Sequence[int]]) -> PackRequest:
        """Ask for a pack when there is room for it; returns at once."""
        with self._changed:
            if not self._numbers:
                for thread in self._threads:
                    thread.start()
            self._numbers += 1
            size = sum(len(ids) for ids in documents) * self._bytes_per_token
            pack = PackRequest(
                number=self._numbers,
                documents=[list(ids) for ids in documents],
                size=size,
                states=[None] * len(documents),
                left=len(documents),
            )
            self._not_asked.append(pack)
            self._ask_for_more()
        return pack

    def wait(self, pack: PackRequest) -> None:
        """Until all of it is there or has failed; `InterruptedWaitError` if the run stops and no server is there."""
        began = time.monotonic()
        with self._changed:
            if pack in self._not_asked:  # whoever waits goes first
                self._not_asked.remove(pack)
                self._ask(pack)
            while pack.left:
                if self._broken is not None:
                    raise self._broken
                if self._closed:
                    raise RuntimeError("the fetcher is closed, and nobody will bring what is waited for")
                if self._stop() and not any(server.ready for server in self._servers):
                    raise InterruptedWaitError
                self._changed.wait(0.2)
            self.counts.waited_seconds += time.monotonic() - began

    def release(self, pack: PackRequest) -> None:
        """The pack's states are the caller's, or nobody's: there is room for others."""
        with self._changed:
            self._held -= pack.size
            self._ask_for_more()

    def close(self) -> None:
        """Ask for nothing any more, break off what is under way and wait for the threads.

        A thread that outlives the interpreter in code of torch ends the process by an abort.
        """
        with self._changed:
            self._closed = True
            self._jobs.clear()
            self._not_asked.clear()
            self._changed.notify_all()
        for server in self._servers:
            server.client.close()
        deadline = time.monotonic() + CLOSE_SECONDS
        for thread in self._threads:
            if thread.ident is not None and thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))

    def _ask_for_more(self) -> None:
        while self._not_asked and (not self._held or self._held + self._not_asked[0].size <= self._ahead_bytes):
            self._ask(self._not_asked.popleft())

    def _ask(self, pack: PackRequest) -> None:
        self._held += pack.size
        for place in range(len(pack.documents)):
            heapq.heappush(self._jobs, (pack.number, place, pack))
        self._changed.notify_all()

    def _run(self, server: ServerHealth) -> None:
        try:
            self._work(server)
        except UserError as error:
            self._set_aside(server, error)
        except Exception as error:  # a fault of ours: whoever waits must hear of it
            with self._changed:
                self._broken = self._broken or error
                self._changed.notify_all()

    def _set_aside(self, server: ServerHealth, error: UserError) -> None:
        """It is the wrong one; each of its threads comes here, and one says so."""
        with self._changed:
            if server in self._aside:
                return
            self._aside.append(server)
            if len(self._aside) < len(self._servers):
                logger.warning(f"one of {len(self._servers)} servers is set aside: {error}")
                return
            self._broken = (
                error
                if len(self._servers) == 1
                else UserError(
                    f"none of the {len(self._servers)} servers can be used: "
                    + "; ".join(str(other.refused) for other in self._servers)
                )
            )
            self._changed.notify_all()

    def _work(self, server: ServerHealth) -> None:
        while True:
            with self._changed:
                if self._closed or self._broken is not None:
                    return
            if not server.settled():
                continue
            with self._changed:
                if self._closed:
                    return
                if (job := self._next_job(server)) is None:
                    self._changed.wait(0.5)
                    continue
                place, pack = job
            try:
                states = server.client.fetch(pack.documents[place])
            except (ServerAwayError, DocumentFailedError) as error:
                self._gave_nothing(server, pack, place, error)
                continue
            with self._changed:
                pack.states[place] = states
                # Servers may compute in more bytes than was thought.
                self._bytes_per_token = max(self._bytes_per_token, states.nbytes // max(1, len(states)))
                server.gave()
                for other, reason in dict(pack.refusals.get(place, ())).items():
                    if other is not server:
                        other.was_at_fault(reason)
                self._done(pack)

    def _next_job(self, server: ServerHealth) -> tuple[int, PackRequest] | None:
        """The first document that this server is to be asked for."""
        passed_over, found = [], None
        while self._jobs and found is None:
            job = heapq.heappop(self._jobs)
            refused_by = {other for other, _ in job[2].refusals.get(job[1], ())}
            if server in refused_by and any(other.ready and other not in refused_by for other in self._servers):
                passed_over.append(job)
            else:
                found = job
        for job in passed_over:
            heapq.heappush(self._jobs, job)
        return None if found is None else (found[1], found[2])

    def _gave_nothing(self, server: ServerHealth, pack: PackRequest, place: int, error: Exception) -> None:
        """The document's fault or the server's?"""
        if self._closed:  # it was broken off
            return
        if isinstance(error, DocumentFailedError):
            try:
                server.client.probe()
            except (ServerAwayError, DocumentFailedError) as found:
                server.lose(f"{error}; and then {found}")
            else:
                with self._changed:
                    refusals = pack.refusals.setdefault(place, [])
                    refusals.append((server, str(error)))
                    if len(refusals) >= ATTEMPTS:
                        self._fail(pack, place, error)
                        return
        else:
            server.lose(str(error))
        with self._changed:
            self.counts.retried += 1
            if not self._closed:
                heapq.heappush(self._jobs, (pack.number, place, pack))
            self._changed.notify_all()

    def _fail(self, pack: PackRequest, place: int, error: Exception) -> None:
        self.counts.failed += 1
        pack.failed.add(place)
        if self.counts.failed <= FAILURES_SHOWN:
            more = "; further ones are counted only" if self.counts.failed == FAILURES_SHOWN else ""
            logger.warning(
                f"a document of {len(pack.documents[place])} tokens is left out: {error} ({self.counts.failed} so far"
                f"{more})"
            )
        self._done(pack)

    def _done(self, pack: PackRequest) -> None:
        self.counts.documents += 1
        pack.left -= 1
        self._changed.notify_all()
