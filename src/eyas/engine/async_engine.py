"""One engine for many asyncio callers: a thread runs the steps, and each request has a stream of deltas.

Only the thread touches the engine; callers queue submissions and cancellations, which run between steps. The deltas of
a step are handed to asyncio in one call for all streams, because each hand-over makes the thread wait for the GIL. A
slow reader gets the deltas of several steps together.

Leaving a stream cancels its request. If a step fails, all streams end with that error and later requests are refused,
because the engine's state is not trusted any more. With `mend`, the owner returns an engine to continue with and the
requests that were lost, and only those end.
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
"""Called on the engine's thread after a failed step. Returns a sound engine and the lost keys; None means all."""
Seen = TypeVar("Seen")


class EngineError(RuntimeError):
    """The request ended because of an engine failure."""


class _Mailbox(asyncio.Queue[Event]):
    """Queue of deltas for one stream. Only its event loop touches it."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.get_running_loop()

    async def take(self) -> list[Event]:
        """Wait for events and return all that have arrived."""
        events = [await self.get()]
        while not self.empty():
            events.append(self.get_nowait())
        return events


def _deliver(mail: Sequence[tuple[_Mailbox, Event]]) -> None:
    for mailbox, event in mail:
        mailbox.put_nowait(event)


class AsyncEngine:
    """Runs an engine on its own thread. Use it as a context manager, or call `close`."""

    def __init__(self, engine: Engine, *, mend: Mend | None = None) -> None:
        self.engine = engine
        self._mend = mend
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._mailboxes: dict[int, _Mailbox] = {}
        self.failure: BaseException | None = None
        """The error that stopped the engine, if any."""
        self._owes = False
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="eyas-engine", daemon=True)
        self._thread.start()

    async def stream(
        self, request: Request, *, taken_on: Callable[[Engine, int], None] | None = None
    ) -> AsyncGenerator[OutputDelta, None]:
        """Yield a request's deltas. `taken_on` is called on the engine's thread with the key, once submitted."""
        async with aclosing(self.batches(request, taken_on=taken_on)) as batches:
            async for deltas in batches:
                for delta in deltas:
                    yield delta

    async def batches(
        self, request: Request, *, taken_on: Callable[[Engine, int], None] | None = None
    ) -> AsyncGenerator[list[OutputDelta], None]:
        """Yield a request's deltas in batches of those that have arrived."""
        mailbox = _Mailbox()
        keys: list[int] = []  # used by the thread only: a caller may leave before its key is known

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
            # After `mend` replaced the engine, the key may belong to another request.
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
        """Call `look` with the engine, on its thread between steps."""
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
        """Stop after the current step; open streams end with an error."""
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
                # Sleep until an order comes if there is no work; otherwise take one only if it is there.
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
            except BaseException as error:  # after a failed cancellation the state is as doubtful as after a step
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
            # The event loop may be closed, which must not end this thread.
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
            # Deltas of earlier steps may not have been returned yet: one more step returns them.
            self._owes, self.engine = mended is self.engine, mended
            self._end(error, lost)

    def _give_up(self, failure: BaseException) -> None:
        """End all streams and refuse later requests."""
        self.failure = failure
        for key in self._mailboxes:
            with suppress(Exception):  # a failed engine may fail here too
                self.engine.cancel(key)
        self._end(failure, None)

    def _end(self, error: BaseException, lost: Collection[int] | None) -> None:
        """End the streams of lost requests, or all, with an error."""
        mail = list[tuple[_Mailbox, Event]]()
        for key in list(self._mailboxes) if lost is None else lost:
            mailbox = self._mailboxes.pop(key, None)
            if mailbox is not None:
                failure = EngineError(f"the engine stopped: {error}")
                failure.__cause__ = error
                mail.append((mailbox, failure))
        self._send(mail)
