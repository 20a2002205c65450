"""Many callers, one engine: a thread that steps, and streams of pieces for asyncio.

Only the thread touches the engine; callers hand it requests and cancellations between steps. What a step gave crosses
over to asyncio in one go for all streams, and one that was not looked at for some steps gets what they gave together:
threads of Python take turns, and with a crossing for every piece the engine would wait for its turn as often.

A stream that is left, for whatever reason, cancels its request. If a step fails, all streams end with that error and
later ones are refused with it: what a broken step left behind is not to be trusted. Unless the owner knows how to
`mend` that: it is asked, on the thread, for an engine to go on with and for the requests that were lost, and only those
end.
"""

import asyncio
import concurrent.futures
import queue
import threading
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from contextlib import aclosing, suppress
from types import TracebackType
from typing import TypeVar

from eyas.engine.engine import Engine
from eyas.engine.output import OutputDelta
from eyas.engine.request import Request

Event = OutputDelta | BaseException
Mend = Callable[[Engine, BaseException], tuple[Engine, Collection[int] | None]]
"""From an engine whose step failed to one that is sound, and the keys it lost; None for all of them."""
Seen = TypeVar("Seen")


class EngineError(RuntimeError):
    """A request ended because the engine did, not by its own fault."""


class _Mailbox(asyncio.Queue[Event]):
    """What came for one stream and was not taken yet. Only its loop touches it."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.get_running_loop()

    async def take(self) -> list[Event]:
        """All that came since the last time, as soon as there is something."""
        events = [await self.get()]
        while not self.empty():
            events.append(self.get_nowait())
        return events


def _deliver(mail: Sequence[tuple[_Mailbox, Event]]) -> None:
    for mailbox, event in mail:
        mailbox.put_nowait(event)


class AsyncEngine:
    """An engine on a thread of its own. Use it as a context manager, or call `close`."""

    def __init__(self, engine: Engine, *, mend: Mend | None = None) -> None:
        self.engine = engine
        self._mend = mend
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._mailboxes: dict[int, _Mailbox] = {}
        self.failure: BaseException | None = None
        """Why nothing is served any more, if so."""
        self._owes = False
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="eyas-engine", daemon=True)
        self._thread.start()

    async def stream(
        self, request: Request, *, taken_on: Callable[[Engine, int], None] | None = None
    ) -> AsyncGenerator[OutputDelta, None]:
        """The pieces of one request until its end. `taken_on` is called on the engine's thread, with the key."""
        async with aclosing(self.batches(request, taken_on=taken_on)) as batches:
            async for deltas in batches:
                for delta in deltas:
                    yield delta

    async def batches(
        self, request: Request, *, taken_on: Callable[[Engine, int], None] | None = None
    ) -> AsyncGenerator[list[OutputDelta], None]:
        """The same, pieces together that came since the last ones were taken."""
        mailbox = _Mailbox()
        keys: list[int] = []  # the thread writes and reads it; a caller may leave before knowing its key

        def submit() -> None:
            try:
                self._require_sound()
                keys.append(self.engine.submit(request))
                self._mailboxes[keys[0]] = mailbox
                if taken_on is not None:
                    taken_on(self.engine, keys[0])
            except Exception as error:
                self._send([(mailbox, error)])

        def leave() -> None:
            # In an engine that replaced the one it was taken on by, the same key is somebody else's.
            if keys and self._mailboxes.get(keys[0]) is mailbox:
                del self._mailboxes[keys[0]]
                self.engine.cancel(keys[0])

        if self._closed:
            raise EngineError("the engine is closed")
        self._orders.put(submit)
        try:
            while True:
                deltas = list[OutputDelta]()
                for event in await mailbox.take():
                    if isinstance(event, BaseException):
                        if deltas:
                            yield deltas
                        raise event
                    deltas.append(event)
                yield deltas
                if deltas[-1].finished is not None:
                    return
        finally:
            self._orders.put(leave)

    async def between_steps(self, look: Callable[[Engine], Seen]) -> Seen:
        """What `look` makes of the engine, asked on its thread while it stands still."""
        seen: concurrent.futures.Future[Seen] = concurrent.futures.Future()

        def order() -> None:
            if seen.set_running_or_notify_cancel():
                try:
                    self._require_sound()
                    seen.set_result(look(self.engine))
                except Exception as error:
                    seen.set_exception(error)

        if self._closed:
            raise EngineError("the engine is closed")
        self._orders.put(order)
        return await asyncio.wrap_future(seen)

    def _require_sound(self) -> None:
        if self.failure is not None:
            raise EngineError("the engine has failed and serves no more") from self.failure

    def close(self) -> None:
        """Stop after the step under way; open streams end with an error."""
        self._closed = True
        self._orders.put(None)
        self._thread.join()

    def __enter__(self) -> "AsyncEngine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self) -> None:
        while True:
            try:
                # Without work the thread sleeps until an order comes; with work it takes what is there.
                at_work = self.failure is None and (self.engine.busy or self._owes)
                order = self._orders.get(block=not at_work)
            except queue.Empty:
                self._step()
                continue
            if order is None:
                self._give_up(RuntimeError("the engine was closed"))
                return
            try:
                order()
            except BaseException as error:  # a cancellation that fails leaves as much in doubt as a step
                self._recover(error)

    def _step(self) -> None:
        self._owes = False
        try:
            pieces = self.engine.step()
        except BaseException as error:
            self._recover(error)
            return
        mail = list[tuple[_Mailbox, Event]]()
        for piece in pieces:
            boxes = self._mailboxes
            mailbox = boxes.get(piece.key) if piece.finished is None else boxes.pop(piece.key, None)
            if mailbox is not None:
                mail.append((mailbox, piece))
        self._send(mail)

    def _send(self, mail: Sequence[tuple[_Mailbox, Event]]) -> None:
        by_loop = defaultdict[asyncio.AbstractEventLoop, list[tuple[_Mailbox, Event]]](list)
        for mailbox, event in mail:
            by_loop[mailbox.loop].append((mailbox, event))
        for loop, events in by_loop.items():
            # A loop that has ended has no one who waits; that must not end the thread, which serves others.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(_deliver, events)

    def _recover(self, error: BaseException) -> None:
        try:
            if self._mend is None:
                raise error
            mended, lost = self._mend(self.engine, error)
        except BaseException as failure:
            self._give_up(failure)
        else:
            # What an earlier step gave may not have been told yet: one more step tells it, even with nothing to do.
            self._owes, self.engine = mended is self.engine, mended
            self._end(error, lost)

    def _give_up(self, failure: BaseException) -> None:
        """End all streams and serve no more."""
        self.failure = failure
        for key in self._mailboxes:
            with suppress(Exception):  # an engine that failed may fail at this too
                self.engine.cancel(key)
        self._end(failure, None)

    def _end(self, error: BaseException, lost: Collection[int] | None) -> None:
        """Tell the streams of lost requests, or all, why there is no more."""
        mail = list[tuple[_Mailbox, Event]]()
        for key in list(self._mailboxes) if lost is None else lost:
            mailbox = self._mailboxes.pop(key, None)
            if mailbox is not None:
                failure = EngineError(f"the engine stopped: {error}")
                failure.__cause__ = error
                mail.append((mailbox, failure))
        self._send(mail)
