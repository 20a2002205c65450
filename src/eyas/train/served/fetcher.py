"""Fetching of packs of documents from servers ahead of the trainer, in order, within a bound on bytes.

Each server has several threads with one request each; vLLM batches them. The documents of a pack are requested when its
bytes fit beside those of packs not yet taken, so neither disk nor memory holds more than `ahead_bytes` and the one pack
that the trainer waits for, which is requested in any case.

A server that goes away returns its documents to the queue and is tried again until it is back. That costs time and
nothing else. One that is the wrong server when it is first reached is set aside for good while others carry on, and the
run ends only if none is left. One that was right and is not any more may be repaired, so it is tried again too. A
document that healthy servers refuse `ATTEMPTS` times has failed: it is counted, and the pack goes on without it. A
document that one server refused is requested from another first.

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
from eyas.train.served.client import DocumentFailedError, ServerAwayError, StatesClient

logger = logging.getLogger(__name__)

ATTEMPTS = 3
CLOSE_SECONDS = 20.0
FAILURES_SHOWN = 10
PAUSES = (0.5, 30.0)
"""Seconds between attempts to reach a server that is away: first and maximum."""
REMINDER_SECONDS = 60.0


class ServerHealth:
    """State of one server, shared by its threads."""

    def __init__(self, client: StatesClient) -> None:
        self.client = client
        self.ready = False
        self.known = False
        """Whether it was ever reached and accepted."""
        self.refused: UserError | None = None
        """Reason why it is set aside for good."""
        self._asking = threading.Lock()
        self._lost_at = time.monotonic()
        self._reminded = 0.0
        self._next_try = 0.0
        self._pause = 0.0

    def settled(self) -> bool:
        """Whether it is ready; if not, one thread tries to connect while the others wait a moment.

        Raises `UserError`, in every thread, if it is the wrong server.
        """
        if self.ready:
            return True
        if not self._asking.acquire(timeout=0.2):
            return False
        try:
            if self.ready:
                return True
            if self.refused is not None:
                raise self.refused
            if time.monotonic() < self._next_try:
                time.sleep(min(0.1, PAUSES[0]))
                return False
            try:
                self.client.connect()
            except (ServerAwayError, DocumentFailedError, UserError) as error:
                if self.client.closed:
                    return False
                if not isinstance(error, UserError):
                    self._pause = min(PAUSES[1], max(PAUSES[0], 2 * self._pause))
                elif self.known:  # it was the right one before, so it may be repaired
                    self._pause = PAUSES[1]
                else:
                    self.refused = error
                    raise
                self._next_try = time.monotonic() + self._pause
                self._remind(str(error))
                return False
            away = time.monotonic() - self._lost_at
            logger.info(f"reached {self.client.url}" + (f" again, after {away:.0f} s" if self.known else ""))
            self.ready = self.known = True
            self._pause = 0.0
            return True
        finally:
            self._asking.release()

    def lose(self, reason: str) -> None:
        """Mark it as away or unhealthy."""
        if self.ready:
            self.ready = False
            self._lost_at = time.monotonic()
            self._reminded = 0.0
            self._remind(reason)

    def _remind(self, reason: str) -> None:
        now = time.monotonic()
        if not self._reminded or now - self._reminded > REMINDER_SECONDS:
            self._reminded = now
            logger.warning(f"waiting for {self.client.url}: {reason}")


@dataclass(kw_only=True, eq=False)
class PackRequest:
    """Documents of one pack that was requested."""

    number: int
    documents: list[list[int]]
    size: int
    """Bytes of their states."""
    states: list[Tensor | None]
    """States of each document that has arrived; None for one that failed."""
    left: int
    """Number of documents that have neither arrived nor failed."""
    failed: set[int] = field(default_factory=set)
    refusals: dict[int, list[ServerHealth]] = field(default_factory=dict)
    """Healthy servers that refused a document, once for each attempt."""


@dataclass(kw_only=True)
class FetchCounts:
    """Statistics of the fetcher."""

    documents: int = 0
    failed: int = 0
    retried: int = 0
    """Repeated requests, for whatever reason."""
    waited_seconds: float = 0.0
    """Time that the trainer waited."""


class StateFetcher:
    """Threads that fetch, and their queue."""

    def __init__(
        self,
        clients: Sequence[StatesClient],
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
        self._held = 0  # bytes of packs that are requested and not yet taken: in transit, on disk or in memory
        self._numbers = 0
        self._closed = False
        self._broken: Exception | None = None
        self._aside: list[ServerHealth] = []
        self._servers = [ServerHealth(client) for client in clients]
        # Started with the first request: a complete cache needs no server.
        self._threads = [
            threading.Thread(target=self._run, args=(server,), daemon=True)
            for server in self._servers
            for _ in range(in_flight)
        ]

    def request(self, documents: Sequence[Sequence[int]]) -> PackRequest:
        """Request a pack as soon as there is room for it; returns at once."""
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
        """Wait for the pack; raise `InterruptedWaitError` if the run is to stop and no server is ready."""
        began = time.monotonic()
        with self._changed:
            if pack in self._not_asked:  # a pack that is waited for goes first
                self._not_asked.remove(pack)
                self._ask(pack)
            while pack.left:
                if self._broken is not None:
                    raise self._broken
                if self._closed:
                    raise RuntimeError("the fetcher is closed, and the pack that is waited for will not arrive")
                if self._stop() and not any(server.ready for server in self._servers):
                    raise InterruptedWaitError
                self._changed.wait(0.2)
            self.counts.waited_seconds += time.monotonic() - began

    def release(self, pack: PackRequest) -> None:
        """Free the pack's bytes for others."""
        with self._changed:
            self._held -= pack.size
            self._ask_for_more()

    def close(self) -> None:
        """Cancel all requests and wait for the threads, since one in torch at exit would abort the process."""
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
        except Exception as error:  # an internal error, which the waiting trainer must get
            with self._changed:
                self._broken = self._broken or error
                self._changed.notify_all()

    def _set_aside(self, server: ServerHealth, error: UserError) -> None:
        """Set the wrong server aside; each of its threads comes here, and one of them logs it."""
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
                # Servers may compute in a larger type than expected.
                self._bytes_per_token = max(self._bytes_per_token, states.nbytes // max(1, len(states)))
                self._done(pack)

    def _next_job(self, server: ServerHealth) -> tuple[int, PackRequest] | None:
        """First document to request from this server."""
        passed_over, found = [], None
        while self._jobs and found is None:
            job = heapq.heappop(self._jobs)
            refused_by = job[2].refusals.get(job[1], [])
            if server in refused_by and any(other.ready and other not in refused_by for other in self._servers):
                passed_over.append(job)
            else:
                found = job
        for job in passed_over:
            heapq.heappush(self._jobs, job)
        return None if found is None else (found[1], found[2])

    def _gave_nothing(self, server: ServerHealth, pack: PackRequest, place: int, error: Exception) -> None:
        """Find out whether the document or the server is at fault."""
        if self._closed:  # the request was cancelled
            return
        if isinstance(error, DocumentFailedError):
            try:
                server.client.probe()
            except (ServerAwayError, DocumentFailedError) as found:
                server.lose(f"{error}; and then {found}")
            else:
                with self._changed:
                    refusals = pack.refusals.setdefault(place, [])
                    refusals.append(server)
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
