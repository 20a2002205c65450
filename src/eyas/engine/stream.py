"""Many callers, one engine: a thread that steps, and streams of pieces for asyncio.

Only the thread touches the engine; callers hand it requests and cancellations between steps. A stream that is left,
for whatever reason, cancels its request. If a step fails, all streams end with that error and later ones are refused
with it: what a broken step left behind is not to be trusted.
"""

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable
from types import TracebackType

from eyas.engine.answer import Piece
from eyas.engine.engine import Engine
from eyas.engine.request import Request

Event = Piece | BaseException


class StreamingEngine:
    """An engine on a thread of its own. Use it as a context manager, or call `close`."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._sinks: dict[int, Callable[[Event], None]] = {}
        self._failure: BaseException | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="eyas-engine", daemon=True)
        self._thread.start()

    async def stream(self, request: Request) -> AsyncIterator[Piece]:
        """The pieces of one request until its end."""
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[Event] = asyncio.Queue()
        keys: list[int] = []  # the thread writes and reads it; a caller may leave before knowing its key

        def sink(event: Event) -> None:
            loop.call_soon_threadsafe(events.put_nowait, event)

        def submit() -> None:
            try:
                if self._failure is not None:
                    raise RuntimeError("the engine has failed and serves no more") from self._failure
                keys.append(self.engine.submit(request))
                self._sinks[keys[0]] = sink
            except Exception as error:
                sink(error)

        def leave() -> None:
            for key in keys:
                self._sinks.pop(key, None)
                self.engine.cancel(key)

        if self._closed:
            raise RuntimeError("the engine is closed")
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

    def close(self) -> None:
        """Stop after the step under way; open streams end with an error."""
        self._closed = True
        self._orders.put(None)
        self._thread.join()

    def __enter__(self) -> "StreamingEngine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self) -> None:
        while True:
            try:
                # Without work the thread sleeps until an order comes; with work it takes what is there.
                order = self._orders.get(block=not self.engine.busy)
            except queue.Empty:
                self._step()
                continue
            if order is None:
                self._fail(RuntimeError("the engine was closed"))
                return
            order()

    def _step(self) -> None:
        try:
            pieces = self.engine.step()
        except BaseException as error:
            self._fail(error)
            return
        for piece in pieces:
            sink = self._sinks.get(piece.key) if piece.finished is None else self._sinks.pop(piece.key, None)
            if sink is not None:
                sink(piece)

    def _fail(self, error: BaseException) -> None:
        self._failure = error
        sinks, self._sinks = self._sinks, {}
        for key in sinks:
            self.engine.cancel(key)
        for sink in sinks.values():
            failure = RuntimeError(f"the engine stopped: {error}")
            failure.__cause__ = error
            sink(failure)
