"""What the client itself costs: a slow client measures itself.

One thread reads all streams. Its share of a core tells how near it is to its end; how late it wakes when it should
tells by how much the times it notes may be off.
"""

import asyncio
import time
from types import TracebackType

TICK = 0.02
BUSY = 0.5
"""From this share of a core on, bursts have to wait."""


class ClientOverhead:
    """Watches the client for the length of a block."""

    def __init__(self) -> None:
        self.late: list[float] = []
        self._cpu = self._wall = 0.0
        self.cpu_share = 0.0
        """CPU seconds per second."""

    async def __aenter__(self) -> "ClientOverhead":
        self._cpu, self._wall = time.process_time(), time.perf_counter()
        self._watch = asyncio.create_task(self._tick())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watch.cancel()
        await asyncio.gather(self._watch, return_exceptions=True)  # its end is no news; that of the caller is
        seconds = time.perf_counter() - self._wall
        self.cpu_share = (time.process_time() - self._cpu) / seconds if seconds > 0 else 0.0

    async def _tick(self) -> None:
        while True:
            due = time.perf_counter() + TICK
            await asyncio.sleep(TICK)
            self.late.append(max(0.0, time.perf_counter() - due))
