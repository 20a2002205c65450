"""The server of a soak, seen from outside: its process, its memory, its own counts, its log."""

import asyncio
import json
import os
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from eyas.bench.process import Command

LOOK_SECONDS = 2.0
LATE, MIDDLE = (0.9, 1.0), (0.45, 0.55)
"""Which parts of the time are compared for growth: the first half is for caches to fill."""


class Server:
    """Where to ask, and the process behind it where that is known."""

    def __init__(self, url: str, pid: int | None = None) -> None:
        self.url, self.pid = url.rstrip("/"), pid
        self.process: subprocess.Popen[bytes] | None = None
        self.log: Path | None = None

    @classmethod
    def start(cls, command: str, log: Path) -> "Server":
        """Run a server; what it says goes to the log."""
        line = Command.of(command)
        with log.open("wb") as out:
            process = subprocess.Popen(
                line.words,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env={**os.environ, **line.environment},
                start_new_session=True,  # Ctrl-C is for the soak, which then stops the server itself
            )
        server = cls(f"http://127.0.0.1:{line.port}", process.pid)
        server.process, server.log = process, log
        return server

    async def until_ready(self, session: aiohttp.ClientSession, seconds: float) -> None:
        """Wait until it takes requests."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.process is not None and self.process.poll() is not None:
                break
            with suppress(aiohttp.ClientError, OSError):
                async with session.get(self.url + "/health") as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(0.2)
        raise SystemExit(f"{self.url} does not serve; see {self.log or 'its log'}")

    async def status(self, session: aiohttp.ClientSession) -> dict[str, Any]:
        """What /status says."""
        async with session.get(self.url + "/status") as response:
            told: dict[str, Any] = await response.json()
        return told

    async def counted(self, session: aiohttp.ClientSession) -> dict[str, int]:
        """How many requests the server has seen to their end, by outcome."""
        async with session.get(self.url + "/metrics") as response:
            text = await response.text()
        counts: dict[str, int] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == "eyas_requests_total":
                    outcome = sample.labels["outcome"]
                    counts[outcome] = counts.get(outcome, 0) + int(sample.value)
        return counts

    def memory(self) -> float | None:
        """MiB in use; None where the process is not known."""
        if self.pid is None:
            return None
        fields = Path(f"/proc/{self.pid}/status").read_text().split("VmRSS:")[1].split()
        return int(fields[0]) / 1024

    def logged(self) -> tuple[list[str], list[str]]:
        """The ids of all requests in the log, and its lines about failures."""
        ids, failures = [], []
        for line in self.log.read_text().splitlines() if self.log is not None else ():
            with suppress(ValueError):
                told = json.loads(line)
                if told.get("event") == "request":
                    ids.append(told["request_id"])
                if told.get("level") not in ("info", "warning"):
                    failures.append(line)
            if line.startswith("Traceback"):
                failures.append(line)
        return ids, failures

    def stop(self) -> None:
        """End it, whatever state it is in."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()


class Watch:
    """Looks at a server from time to time: memory, load, KV blocks."""

    def __init__(self) -> None:
        self.memory: list[tuple[float, float]] = []
        """Seconds, MiB."""
        self.most = {"running": 0, "waiting": 0, "used": 0}

    async def run(self, server: Server, session: aiohttp.ClientSession, tell: Callable[[str], None]) -> None:
        """Look until cancelled."""
        began, said = time.monotonic(), 0.0
        while True:
            now, memory = time.monotonic() - began, server.memory()
            if memory is not None:
                self.memory.append((now, memory))
            told = await server.status(session)
            seen = told["load"] | told["kv_blocks"]
            self.most = {name: max(most, seen[name]) for name, most in self.most.items()}
            if now - said >= 60:
                said = now
                tell(f"{now:6.0f} s  {memory or 0:.1f} MiB  {seen['running']} running, {seen['waiting']} waiting")
            await asyncio.sleep(LOOK_SECONDS)

    @property
    def growth(self) -> float | None:
        """By how much of itself memory grew in the second half; None if it was hardly looked at."""
        late, middle = (_part(self.memory, *part) for part in (LATE, MIDDLE))
        return statistics.median(late) / statistics.median(middle) - 1 if late and middle else None


def _part(samples: Sequence[tuple[float, float]], start: float, end: float) -> list[float]:
    whole = samples[-1][0] if samples else 0.0
    return [value for when, value in samples if start * whole <= when <= end * whole]
