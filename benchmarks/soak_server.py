"""Observes the server of a soak: process, memory, counters, log."""

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
from soak_questions import CHAT, TEXT

from eyas.bench.process import Command

COMPLETIONS = (CHAT, TEXT)

LOOK_SECONDS = 2.0
HEALTH_SECONDS = 10.0
"""Timeout of a probe of /health."""
HEALTH_PAUSE = 0.1
LATE, MIDDLE = (0.9, 1.0), (0.45, 0.55)
"""Parts of the run that are compared for growth; caches fill in the first half."""


class Server:
    """Address of the server, and its process if known."""

    def __init__(self, url: str, pid: int | None = None) -> None:
        self.url, self.pid = url.rstrip("/"), pid
        self.process: subprocess.Popen[bytes] | None = None
        self.log: Path | None = None

    @classmethod
    def start(cls, command: str, log: Path) -> "Server":
        """Run a server and keep its log."""
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
        """Wait until the server is ready."""
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
        """Read /status."""
        async with session.get(self.url + "/status") as response:
            told: dict[str, Any] = await response.json()
        return told

    async def counted(self, session: aiohttp.ClientSession) -> dict[str, int]:
        """Finished completion requests by outcome."""
        async with session.get(self.url + "/metrics") as response:
            text = await response.text()
        counts: dict[str, int] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == "eyas_requests_total" and sample.labels["endpoint"] in COMPLETIONS:
                    outcome = sample.labels["outcome"]
                    counts[outcome] = counts.get(outcome, 0) + int(sample.value)
        return counts

    def memory(self) -> float | None:
        """Memory of the server and its children in MiB; None without a process."""
        if self.pid is None:
            return None
        return sum(map(_resident_mib, [self.pid, *_children(self.pid)]))

    def processor_seconds(self) -> float | None:
        """CPU seconds without children; None without a process."""
        if self.pid is None:
            return None
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def logged(self) -> tuple[list[str], list[str]]:
        """Ids of all completion requests in the log, and its lines about failures."""
        ids, failures = [], []
        for line in self.log.read_text().splitlines() if self.log is not None else ():
            with suppress(ValueError):
                told = json.loads(line)
                if told.get("event") == "request" and told["path"] in COMPLETIONS:
                    ids.append(told["request_id"])
                if told.get("level") not in ("info", "warning"):
                    failures.append(line)
            if line.startswith("Traceback"):
                failures.append(line)
        return ids, failures

    def stop(self) -> None:
        """Kill the server."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()


class Watch:
    """Samples memory, load and KV blocks of a server."""

    def __init__(self) -> None:
        self.memory: list[tuple[float, float]] = []
        """Seconds, MiB."""
        self.most = {"running": 0, "waiting": 0, "used": 0}

    async def run(self, server: Server, session: aiohttp.ClientSession, tell: Callable[[str], None]) -> None:
        """Sample until cancelled."""
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
        """Relative growth of memory in the second half; None with too few samples."""
        late, middle = (_part(self.memory, *part) for part in (LATE, MIDDLE))
        return statistics.median(late) / statistics.median(middle) - 1 if late and middle else None


class Health:
    """Latency of /health over new connections."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.seconds: list[float] = []

    async def run(self) -> None:
        """Probe until cancelled; a wrong answer counts as a timeout."""
        timeout = aiohttp.ClientTimeout(total=HEALTH_SECONDS)
        connector = aiohttp.TCPConnector(force_close=True)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            while True:
                began = time.monotonic()
                taken = HEALTH_SECONDS
                with suppress(aiohttp.ClientError, OSError):
                    async with session.get(self._url + "/health") as response:
                        await response.read()
                        if response.status == 200:
                            taken = time.monotonic() - began
                self.seconds.append(taken)
                await asyncio.sleep(HEALTH_PAUSE)

    def within(self, seconds: float) -> float:
        """Share of probes within the limit."""
        return sum(taken <= seconds for taken in self.seconds) / max(1, len(self.seconds))

    @property
    def longest(self) -> float:
        """Of all probes."""
        return max(self.seconds, default=0.0)


def _children(pid: int) -> list[int]:
    """Descendants of a process."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, IndexError):  # processes come and go
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found[1:]


def _resident_mib(pid: int) -> float:
    """Memory of a process; 0 if it is gone."""
    try:
        return int(Path(f"/proc/{pid}/status").read_text().split("VmRSS:")[1].split()[0]) / 1024
    except (OSError, IndexError):
        return 0.0


def _part(samples: Sequence[tuple[float, float]], start: float, end: float) -> list[float]:
    whole = samples[-1][0] if samples else 0.0
    return [value for when, value in samples if start * whole <= when <= end * whole]
