"""A transport whose close comes to an end, and does not take the last response with it."""

import asyncio
from collections.abc import Callable
from typing import Any

LINGER_SECONDS = 2.0


class ClosingTransport(asyncio.Transport):
    """Passes everything on to another transport, except how it closes.

    asyncio closes only once all was written: a client that never reads would keep the connection for ever. And a
    socket that is closed while the client still sends resets the connection, and the client may never see why.
    So the client has a moment to read, and what it still sends is read and dropped, but then the connection ends.
    """

    def __init__(self, transport: asyncio.Transport, is_sending: Callable[[], bool]) -> None:
        super().__init__()
        self._transport = transport
        self._is_sending = is_sending
        self._closing = False
        self._deadline: asyncio.TimerHandle | None = None

    def close(self) -> None:
        """Say that nothing more is written, and end within `LINGER_SECONDS`."""
        if self._closing:
            return
        self._closing = True
        self._deadline = asyncio.get_running_loop().call_later(LINGER_SECONDS, self._transport.abort)
        if self._is_sending() and self._transport.can_write_eof():
            self._transport.write_eof()
            self._transport.resume_reading()
        else:
            self._transport.close()

    def lost(self) -> None:
        """The connection has ended: nothing is to be done any more."""
        self._closing = True
        if self._deadline is not None:
            self._deadline.cancel()

    def abort(self) -> None:
        """End now."""
        self._closing = True
        self._transport.abort()

    def is_closing(self) -> bool:
        """Whether it was closed, here or by the client."""
        return self._closing or self._transport.is_closing()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Write, unless it is closing."""
        if not self._closing:
            self._transport.write(data)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """As of the other transport."""
        return self._transport.get_extra_info(name, default)

    def pause_reading(self) -> None:
        """As of the other transport."""
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        """As of the other transport."""
        self._transport.resume_reading()

    def get_write_buffer_size(self) -> int:
        """As of the other transport."""
        return self._transport.get_write_buffer_size()
