"""Many callers, one engine: a thread that steps, and streams of pieces for asyncio.

Only the thread touches the engine; callers hand it requests and cancellations between steps. A stream that is left,
for whatever reason, cancels its request. If a step fails, all streams end with that error and later ones are refused
with it: what a broken step left behind is not to be trusted. Unless the owner knows how to `mend` that: it is asked, on
the thread, for an engine to go on with and for the requests that were lost, and only those end.
"""

import asyncio
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Collection
from contextlib import suppress
from types import TracebackType
from typing import TypeVar, cast

from eyas.engine.engine import Engine
from eyas.engine.output import OutputDelta
from eyas.engine.request import Request

Event = OutputDelta | BaseException
Mend = Callable[[Engine, BaseException], tuple[Engine, Collection[int] | None]]
"""From an engine whose step failed to one that is sound, and the keys it lost; None for all of them."""
Seen = TypeVar("Seen")


class EngineError(RuntimeError):
    """A request ended because the engine did, not by its own fault."""


class AsyncEngine:
    """An engine on a thread of its own. Use it as a context manager, or call `close`."""

    def __init__(self, engine: Engine, *, mend: Mend | None = None) -> None:
        self.engine = engine
        self._mend = mend
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._sinks: dict[int, Callable[[Event], None]] = {}
        self._failure: BaseException | None = None
        self._owes = False
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="eyas-engine", daemon=True)
        self._thread.start()

    @property
    def failure(self) -> BaseException | None:
        """Why nothing is served any more, if so."""
        return self._failure

    async def stream(
        self, request: Request, *, taken_on: Callable[[Engine, int], None] | None = None
    ) -> AsyncGenerator[OutputDelta, None]:
        """The pieces of one request until its end. `taken_on` is called on the engine's thread, with the key."""
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[Event] = asyncio.Queue()
        keys: list[int] = []  # the thread writes and reads it; a caller may leave before knowing its key

        def sink(event: Event) -> None:
            # A loop that has ended has no one who waits; that must not end the thread, which serves others.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(events.put_nowait, event)

        def submit() -> None:
            try:
                self._require_sound()
                keys.append(self.engine.submit(request))
                self._sinks[keys[0]] = sink
                if taken_on is not None:
                    taken_on(self.engine, keys[0])
            except Exception as error:
                sink(error)

        def leave() -> None:
            # In an engine that replaced the one it was taken on by, the same key is somebody else's.
            if keys and self._sinks.get(keys[0]) is sink:
                del self._sinks[keys[0]]
                self.engine.cancel(keys[0])

        if self._closed:
            raise EngineError("the engine is closed")
        self._orders.put(submit)
        try:
            while True:
                event = await events.get()
                if isinstance(event, BaseException):
                    raise event
                yield event
                if event.finished is not None:
                    return
        finally:
            self._orders.put(leave)

    async def between_steps(self, look: Callable[[Engine], Seen]) -> Seen:
        """What `look` makes of the engine, asked on its thread while it stands still."""
        loop = asyncio.get_running_loop()
        seen: asyncio.Future[Seen] = loop.create_future()

        def settle(result: Seen | None, error: Exception | None) -> None:
            if not seen.done():
                seen.set_exception(error) if error is not None else seen.set_result(cast(Seen, result))

        def order() -> None:
            result, failure = None, None
            try:
                self._require_sound()
                result = look(self.engine)
            except Exception as error:
                failure = error
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(settle, result, failure)

        if self._closed:
            raise EngineError("the engine is closed")
        self._orders.put(order)
        return await seen

    def _require_sound(self) -> None:
        if self._failure is not None:
            raise EngineError("the engine has failed and serves no more") from self._failure

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
                at_work = self._failure is None and (self.engine.busy or self._owes)
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
        for piece in pieces:
            sink = self._sinks.get(piece.key) if piece.finished is None else self._sinks.pop(piece.key, None)
            if sink is not None:
                sink(piece)

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
        self._failure = failure
        for key in self._sinks:
            with suppress(Exception):  # an engine that failed may fail at this too
                self.engine.cancel(key)
        self._end(failure, None)

    def _end(self, error: BaseException, lost: Collection[int] | None) -> None:
        """Tell the streams of lost requests, or all, why there is no more."""
        for key in list(self._sinks) if lost is None else lost:
            sink = self._sinks.pop(key, None)
            if sink is not None:
                failure = EngineError(f"the engine stopped: {error}")
                failure.__cause__ = error
                sink(failure)
