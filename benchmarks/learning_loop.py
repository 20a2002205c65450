"""Measures a server that learns from one kind of traffic: gain of its drafter, time, and that no answer changes.

    python benchmarks/learning_loop.py --out runs/loop --answers 200 --share 0.5 --options "--minutes 2"

Tickets of `adaptation_traffic.py` are asked of `eyas serve --learn --learn-share`, some at a time, until a drafter was
swapped in and its watch is over, or the time is up. A few of them are asked again after every change of drafter, at
temperature 0 and with nobody else asking: the answers must be the same (in bfloat16 up to near-ties,
docs/lossless.md: how many are is told). What the server said of itself is in OUT/status.jsonl, one line every few
seconds, and the outcome in OUT/loop.json.
"""

import argparse
import asyncio
import itertools
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
from adaptation_traffic import make_requests

Json = dict[str, Any]
PROBES = 8
PROBE_SEED = 1
STATUS_SECONDS = 5.0


def main() -> None:
    """Serve, ask and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--answers", type=int, default=200, help="new answers that begin an adaptation")
    parser.add_argument("--share", type=float, default=0.5, help="of the device's time")
    parser.add_argument("--interval", type=float, default=0.0, help="seconds between two adaptations")
    parser.add_argument("--options", default="", help="more options of `eyas adapt`")
    parser.add_argument("--serve", action="append", default=[], help="one more word of the server's command line")
    parser.add_argument("--users", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=60)
    parser.add_argument("--swaps", type=int, default=1, help="changes of drafter to wait for")
    parser.add_argument("--minutes", type=float, default=60.0, help="until it ends at the latest")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    asyncio.run(_Run(arguments).run())


class _Run:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.began = time.monotonic()
        self.tickets = _tickets()
        self.probes = make_requests(PROBES, seed=PROBE_SEED)
        self.ended = False
        self.may_ask = asyncio.Event()
        self.asking = 0
        self.rows: list[Json] = []
        self.texts: list[str] = []

    async def run(self) -> None:
        given = self.arguments
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        words = [sys.executable, "-m", "eyas", "serve", given.target, "--port", str(port)]
        words += ["--learn", str(given.out / "kept"), "--learn-share", str(given.share)]
        words += ["--learn-answers", str(given.answers), "--learn-interval", str(given.interval)]
        words += [f"--learn-options={given.options}", *given.serve]
        with (given.out / "server.log").open("ab") as log:
            server = subprocess.Popen(words, stdout=log, stderr=log)
        try:
            async with aiohttp.ClientSession() as self.http:
                await self._until_ready(server)
                status = await self._ask()
        finally:
            server.terminate()
            server.wait()
        told = {name: status["learning"][name] for name in ("learner", "collected")}
        told |= {"drafter_changes": status["drafter_changes"]}
        record = {"probes": self.rows, **told}
        (given.out / "loop.json").write_text(json.dumps(record, indent=1))
        print(json.dumps(record, indent=1))

    async def _until_ready(self, server: "subprocess.Popen[bytes]") -> None:
        while True:
            if server.poll() is not None:
                raise SystemExit(f"the server ended with code {server.returncode}; see {self.arguments.out}/server.log")
            with suppress(aiohttp.ClientError):
                await self._status()
                return
            await asyncio.sleep(0.5)

    async def _ask(self) -> Json:
        """Ask until nothing is left to wait for; return the last status."""
        await self._probe("start", (await self._status())["served"]["drafter"])
        users = [asyncio.create_task(self._user()) for _ in range(self.arguments.users)]
        try:
            await self._watch(users)
            return await self._status()
        finally:
            self.ended = True
            self.may_ask.set()
            await asyncio.gather(*users)

    async def _user(self) -> None:
        while not self.ended:
            await self.may_ask.wait()
            self.asking += 1
            try:
                await self._answer(next(self.tickets), {})
            finally:
                self.asking -= 1

    async def _watch(self, users: Sequence["asyncio.Task[None]"]) -> None:
        """Follow the server until the awaited event, or an unanswered request."""
        # A drafter that was learnt before is taken up at the start, which is no change to wait for.
        before = swaps = len((await self._status())["drafter_changes"])
        with (self.arguments.out / "status.jsonl").open("w") as file:
            while time.monotonic() - self.began < 60 * self.arguments.minutes and not any(u.done() for u in users):
                status = await self._status()
                learning = status["learning"]
                row = {"at": time.monotonic() - self.began, "learning": learning, "counts": status["counts"]}
                print(json.dumps(row), file=file, flush=True)
                for change in status["drafter_changes"][swaps:]:
                    swaps += 1
                    await self._probe(change["kind"], change["drafter"])
                if swaps >= before + self.arguments.swaps and learning["learner"]["state"] != "watching":
                    return
                await asyncio.sleep(STATUS_SECONDS)

    async def _probe(self, why: str, drafter: str | None) -> None:
        """Texts and acceptance of fixed tickets at depth 3, which are not learnt from."""
        self.may_ask.clear()
        while self.asking:
            await asyncio.sleep(0.01)
        texts, accepted, drafts = [], 0, 0
        for ticket in self.probes:
            fields = {"speculative": {"mode": "fixed", "depth": 3, "method": "eagle3", "learn": False}}
            reply = await self._answer(ticket, fields)
            texts.append(reply["choices"][0]["message"]["content"])
            accepted += reply["usage"]["speculative"]["accepted_tokens"]
            drafts += reply["usage"]["speculative"]["drafts"]
        length = round(1 + accepted / max(1, drafts), 3)
        at = round(time.monotonic() - self.began, 1)
        self.texts = self.texts or texts
        equal = sum(one == other for one, other in zip(texts, self.texts, strict=True))
        row = {"at": at, "why": why, "drafter": drafter, "acceptance_length": length, "answers_as_at_first": equal}
        self.rows.append(row)
        print(
            f"{at:.0f} s: {why}, drafter {drafter}: {length} tokens per verification on {PROBES} tickets, "
            f"{equal} answers as at first",
            flush=True,
        )
        self.may_ask.set()

    async def _answer(self, ticket: Json, fields: Json) -> Json:
        body = {"messages": ticket["messages"], "max_tokens": self.arguments.max_tokens, "temperature": 0, **fields}
        async with self.http.post(f"{self.url}/v1/chat/completions", json=body, timeout=600) as reply:
            told: Json = await reply.json()
            assert reply.status == 200, told
            return told

    async def _status(self) -> Json:
        async with self.http.get(f"{self.url}/status") as reply:
            told: Json = await reply.json()
            return told


def _tickets() -> Iterator[Json]:
    """Distinct tickets without end."""
    for seed in itertools.count():
        if seed != PROBE_SEED:
            yield from make_requests(1000, seed=seed)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main()
