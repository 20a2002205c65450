"""Sends a server all known attacks and judges its behaviour. Prints a table; exits with 1 if a bar fails.

    python benchmarks/attack.py                                   # starts `eyas serve` itself, with 256 descriptors
    python benchmarks/attack.py --url http://127.0.0.1:8000 --pid 4711
    python benchmarks/attack.py --only schema

Attacks (`attacks.py`) go one after another. With each, an honest client asks a question whose answer is known and, with
an attack by grammar, for an object of a schema that nobody has sent before. All the while /health is asked. Judged is:

    answers    every attack is refused or answered as it should be, in time; every honest client gets its answer
    memory     of the server and its children: at most 512 MiB more at any time of an attack, and in the end back
    health     99.9 % of probes answered within a second; the longest is told
    sockets    silent connections and those that trickle are closed in time; meanwhile the processor is idle
    log        no traceback, no error, no failed step
    end        told to stop, the server exits with 0

What needs the process or its log is not judged where the server was started by somebody else.
"""

import argparse
import asyncio
import json
import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
from attacks import ANSWER_SECONDS, Attack, HurtError, Victim, all_attacks, status_of
from soak import Verdict
from soak_clients import Books, Choices, Clients, FullError, WrongAnswerError
from soak_questions import CHAT, QUESTIONS, Question
from soak_server import Health, Server

SERVE = "eyas serve --max-model-len 1024 --max-num-seqs 16 --max-queue 24 --memory-gib 0.25"
DESCRIPTORS = 256
"""File descriptors of the server: few enough for an attacker to exhaust."""
SOCKETS = 400
GROWTH_MIB, LEFT_MIB = 512.0, 256.0
"""MiB that the server may grow during one attack, and after all of them."""
SETTLE_SECONDS = 10.0
IDLE_SHARE = 0.2
"""CPU share allowed while only held connections are open."""
BUSY_TRIES = 20


class MemoryWatch:
    """Records the peak memory of the server and its children."""

    def __init__(self, server: Server) -> None:
        self._server, self._peak = server, 0.0

    async def run(self) -> None:
        """Sample until cancelled."""
        while True:
            self._peak = max(self._peak, self._server.memory() or 0.0)
            await asyncio.sleep(0.05)

    def peak(self) -> float:
        """Return the peak in MiB and reset it."""
        peak, self._peak = self._peak, 0.0
        return peak


class Siege:
    """A server with attackers and honest clients."""

    def __init__(self, server: Server, clients: Clients, verdict: Verdict) -> None:
        self.server, self.clients, self.verdict = server, clients, verdict
        self.victim = Victim(server.url)
        self.results: list[dict[str, Any]] = []
        self._honest = 0
        self._failures: list[str] = []

    async def prepare(self) -> None:
        """Get a reference answer, which also loads everything that a first request loads."""
        self.question: Question = QUESTIONS[0]
        self.expected: Choices = await self.clients.whole(self.question)
        await self._ask_for_new_object()

    async def attack(self, attack: Attack, memory: MemoryWatch) -> None:
        """Send one attack beside honest clients, and record the results."""
        before = self.server.memory() or 0.0
        memory.peak()
        began = time.monotonic()
        honest = [self._ask()]
        if attack.path == CHAT:
            honest.append(self._ask_for_new_object())
        attacked, *asked = await asyncio.gather(attack.run(self.victim), *honest, return_exceptions=True)
        grown = max(0.0, memory.peak() - before)
        result = {
            "attack": attack.name,
            "status": attacked if isinstance(attacked, int) else None,
            "seconds": time.monotonic() - began,
            "grown_mib": grown,
        }
        self.results.append(result)
        for who, outcome in (("attack", attacked), *(("an honest client", outcome) for outcome in asked)):
            if isinstance(outcome, BaseException):
                self._failures.append(f"{attack.name}: {who}: {type(outcome).__name__} {outcome}")
        print(f"{result['status'] or '-':>4}  {result['seconds']:6.2f} s  {grown:6.0f} MiB  {attack.name}", flush=True)

    async def hold_sockets(self, count: int, first: bytes, drip: bytes, seconds: float) -> None:
        """Hold silent and trickling connections, which must all be closed in time."""
        name = f"{count} connections that {'trickle' if drip else 'say nothing'}"
        opened = await asyncio.gather(*(self.victim.open() for _ in range(count)), return_exceptions=True)
        pairs = [pair for pair in opened if not isinstance(pair, BaseException)]
        for _, writer in pairs:
            writer.write(first)
        processor, began = self.server.processor_seconds(), time.monotonic()
        closings = [asyncio.create_task(_until_closed(reader, writer, drip)) for reader, writer in pairs]
        try:
            await self._ask()
            idle_from, used_before = time.monotonic(), self.server.processor_seconds()
            _, held = await asyncio.wait(closings, timeout=seconds)
            share = None
            if used_before is not None and processor is not None:
                share = ((self.server.processor_seconds() or 0) - used_before) / (time.monotonic() - idle_from)
        finally:
            for task in closings:
                task.cancel()
            for _, writer in pairs:
                writer.transport.abort()
        words = f"{name}: {len(held)} left after {time.monotonic() - began:.1f} s"
        if share is not None:
            words += f", {100 * share:.0f} % of a processor"
        self.verdict.judge("sockets", not held and (share is None or share <= IDLE_SHARE), words)
        print(words, flush=True)

    async def judge(self, health: Health, start_mib: float | None) -> None:
        """Judge the bars after all attacks."""
        words = f"{len(self.results)} attacks, {self._honest} honest answers, {len(self._failures)} amiss"
        self.verdict.judge("answers", not self._failures, "; ".join([words, *self._failures]))
        within, longest = health.within(1.0), health.longest
        words = f"{100 * within:.2f} % of {len(health.seconds)} probes within 1 s, the longest {longest:.2f} s"
        self.verdict.judge("health", within >= 0.999, words)
        if start_mib is None:
            return
        worst = max(self.results, key=lambda result: float(result["grown_mib"]))
        words = f"at most {worst['grown_mib']:.0f} MiB more ({worst['attack']})"
        self.verdict.judge("memory", worst["grown_mib"] <= GROWTH_MIB, words)
        await asyncio.sleep(SETTLE_SECONDS)
        left = (self.server.memory() or 0.0) - start_mib
        self.verdict.judge("memory", left <= LEFT_MIB, f"{left:+.0f} MiB in the end, of {start_mib:.0f}")

    async def _ask(self) -> None:
        """Ask the reference question, again while the server is full."""
        await self._insist(self.question, lambda said: said == self.expected)

    async def _ask_for_new_object(self) -> None:
        """Ask for an object of a schema that is in no cache."""
        self._honest += 1
        key = f"bird{self._honest}"
        schema = {"type": "object", "properties": {key: {"type": "boolean"}}, "required": [key]}
        body = {
            "messages": [{"role": "user", "content": "Is an owl a bird?"}],
            "max_tokens": 32,
            "temperature": 0,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "bird", "schema": schema | {"additionalProperties": False}},
            },
        }
        question = Question(kind="JSON", path=CHAT, body=body)
        await self._insist(question, lambda said: isinstance(json.loads(said[0][0]).get(key), bool))

    async def _insist(self, question: Question, right: Any) -> None:
        self._honest += 1
        async with asyncio.timeout(ANSWER_SECONDS):
            for _ in range(BUSY_TRIES):
                try:
                    said = await self.clients.whole(question)
                except FullError as full:
                    await asyncio.sleep(full.seconds)
                    continue
                if not right(said):
                    raise WrongAnswerError(f"got {said}")
                return
        raise HurtError(f"sent away {BUSY_TRIES} times")


async def _until_closed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, drip: bytes) -> None:
    """Wait until a connection is closed, sending a byte now and then."""
    ending = asyncio.create_task(status_of(reader))
    try:
        while not ending.done():
            await asyncio.wait([ending], timeout=0.5)
            if drip and not ending.done():
                writer.write(drip)
                await writer.drain()
    except ConnectionError:
        pass
    finally:
        ending.cancel()


async def besiege(arguments: argparse.Namespace, server: Server, verdict: Verdict, record: dict[str, Any]) -> None:
    """Run all attacks."""
    chosen: Sequence[Attack] = [one for one in all_attacks() if arguments.only in one.name]
    async with Clients(server.url, Books()) as clients:
        await server.until_ready(clients.session, arguments.start_seconds)
        siege, health, memory = Siege(server, clients, verdict), Health(server.url), MemoryWatch(server)
        await siege.prepare()
        start_mib = server.memory()
        watching = [asyncio.create_task(health.run())]
        if start_mib is not None:
            watching.append(asyncio.create_task(memory.run()))
        for attack in chosen:
            await siege.attack(attack, memory)
        if arguments.only in "sockets":
            head = siege.victim.head("POST", "/v1/completions")[:40]
            await siege.hold_sockets(SOCKETS, b"", b"", arguments.held_seconds)
            await siege.hold_sockets(SOCKETS, head, b"a", arguments.held_seconds)
        await siege.judge(health, start_mib)
        for task in watching:
            task.cancel()
        record |= {
            "attacks": siege.results,
            "health_seconds": {"longest": health.longest, "probes": len(health.seconds)},
        }
        told = (await server.status(clients.session))["counts"]
        verdict.judge("log", not (told["failed_steps"] or told["replaced_engines"]), "no failed step")
    if server.process is not None:
        _, failures = server.logged()
        verdict.judge("log", not failures, "; ".join([f"{len(failures)} failures", *failures[:3]])[:600])
        server.process.send_signal(signal.SIGTERM)
        code = await asyncio.to_thread(server.process.wait, 60)
        verdict.judge("end", code == 0, f"exit code {code}")


def main() -> int:
    """Attack, print, and exit with 1 if a bar fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only attacks whose names have this in them")
    parser.add_argument("--serve", default=SERVE, help="the command that starts the server")
    parser.add_argument("--url", help="a server that runs already")
    parser.add_argument("--pid", type=int, help="its process, to watch its memory")
    parser.add_argument("--held-seconds", type=float, default=30, help="for silent connections to be closed")
    parser.add_argument("--start-seconds", type=float, default=300)
    parser.add_argument("--log", type=Path, help="where the server's log goes")
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    arguments = parser.parse_args()

    log = arguments.log or Path(tempfile.mkdtemp(prefix="attack-")) / "server.log"
    if arguments.url:
        server = Server(arguments.url, arguments.pid)
    else:
        own, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, most))  # the server inherits it
        server = Server.start(arguments.serve, log)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(own, min(most, 4 * SOCKETS)), most))
    record: dict[str, Any] = {"arguments": {name: str(value) for name, value in vars(arguments).items()}}
    verdict = Verdict()
    try:
        asyncio.run(besiege(arguments, server, verdict, record))
    except (aiohttp.ClientError, OSError) as error:
        verdict.judge("complete", False, f"the server is gone or stuck: {type(error).__name__} {error}; see {log}")
    finally:
        server.stop()
        record |= {"bars": verdict.bars, "words": verdict.words}
        if arguments.out is not None:
            arguments.out.write_text(json.dumps(record, indent=1))
    print(verdict.table())
    return 0 if verdict.bars and all(verdict.bars.values()) else 1


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    sys.exit(main())
