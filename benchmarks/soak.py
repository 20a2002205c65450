"""Loads a server for a while with clients and attackers, and judges it. Prints a table and JSON.

    python benchmarks/soak.py --minutes 20                       # starts `eyas serve` itself
    python benchmarks/soak.py --url http://127.0.0.1:8000 --pid 4711

While the server is idle, it is asked a fixed set of questions (`soak_questions.py`): those answers are the reference.
Then many clients (`soak_clients.py`) ask at random: the same questions whole, streamed or read slowly, under every mode
of speculation; objects of a schema; requests that are broken or too long; and some hang up, in a stream or before it.
Some are attackers (`attacks.py`): they send what is known to hurt servers, and must be refused. Half of every minute
the others ask without a pause, so that the queue overflows; in the other half it runs dry. Judged is:

    answers    every known answer is the reference, every object fits its schema, every refusal has the right code
    health     99.9 % of probes of /health are answered within a second; the longest is told
    outcomes   every request sent has one; a stream has one [DONE], at its end; no id of an answer comes twice
    books      the server's `eyas_requests_total` rose by as many as were sent. A client that hung up is one of them:
               counted once, as `disconnected` if the server saw it in time, else by how its answer ended. What an
               attacker sends may be refused before it is a request, so it may be counted or not
    log        one line for each request, and none about a failure; no failed step, no replaced engine
    memory     the median of the last tenth is at most 2 % above that of the tenth in the middle
    idle       afterwards nothing runs, nothing waits, no page is used
    again      the reference once more
    farewell   told to stop while four streams run, the server ends them as it should and exits with 0

What needs the process or its log is not judged where the server was started by somebody else. Ctrl-C ends the fire and
judges what was measured until then.
"""

import argparse
import asyncio
import json
import random
import signal
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
from attacks import Victim, all_attacks
from soak_clients import Books, Choices, Clients, harass, live
from soak_questions import FAREWELL, QUESTIONS, Question, refusals
from soak_server import Health, Server, Watch

GROWTH = 0.02
HEALTHY = 0.999
FAREWELLS = 4
SERVE = (
    "eyas serve --max-model-len 1024 --max-num-seqs 16 --max-queue 24 --memory-gib 0.06 --no-page "
    "--request-seconds 3600 --drain-seconds 600"
)
"""Server limits low enough for status 429 and full KV caches; timeouts long enough for a busy machine."""


class Verdict:
    """Bars with their outcomes, and the figures they rest on."""

    def __init__(self) -> None:
        self.bars: dict[str, bool] = {}
        self.words: dict[str, str] = {}

    def judge(self, bar: str, holds: bool, words: str) -> None:
        """Add a bar; added twice, it holds only if it held both times."""
        self.bars[bar] = holds and self.bars.get(bar, True)
        self.words[bar] = f"{self.words[bar]}; {words}" if bar in self.words else words

    def table(self) -> str:
        """The verdict as text."""
        return "\n".join(
            f"{bar:<10} {'holds' if holds else 'FAILS':<6} {self.words[bar]}" for bar, holds in self.bars.items()
        )


async def soak(arguments: argparse.Namespace, server: Server, record: dict[str, Any], verdict: Verdict) -> None:
    """The whole soak; its record is available at any time."""
    books, strays, watch, health, stop = Books(), Books(), Watch(), Health(server.url), asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, stop.set)
    async with Clients(server.url, books) as clients:
        session = clients.session
        await server.until_ready(session, arguments.start_seconds)
        before = await server.counted(session)
        max_model_len = (await server.status(session))["served"]["max_model_len"]
        known = await _references(clients, arguments.questions)
        print(f"{len(known)} answers known; {arguments.clients} clients for {arguments.minutes:g} minutes", flush=True)

        watching = asyncio.create_task(watch.run(server, session, lambda line: print(line, flush=True)))
        probing = asyncio.create_task(health.run())
        ending = loop.call_later(60 * arguments.minutes, stop.set)
        began = time.monotonic()
        lives = [
            live(clients, known, refusals(max_model_len), rng=random.Random(f"{arguments.seed} {number}"), stop=stop)
            for number in range(arguments.clients - arguments.attackers)
        ]
        lives += [
            harass(
                Victim(server.url), strays, all_attacks(), rng=random.Random(f"{arguments.seed} -{number}"), stop=stop
            )
            for number in range(arguments.attackers)
        ]
        firing = asyncio.gather(*lives)
        await stop.wait()
        loop.remove_signal_handler(signal.SIGINT)  # a second Ctrl-C ends all of it
        with suppress(TimeoutError):
            await asyncio.wait_for(firing, arguments.patience)  # answers under way come to their end
        ending.cancel()
        watching.cancel()
        probing.cancel()
        record["fire"] = _fire(books, watch, time.monotonic() - began)
        record["attacks"] = {kind: dict(outcomes) for kind, outcomes in strays.outcomes.items()}
        record["health"] = {"probes": len(health.seconds), "within_1_s": health.within(1), "longest_s": health.longest}
        _judge_fire(verdict, books, watch)
        _judge_attacks(verdict, strays, health)

        await _judge_rest(verdict, server, clients, arguments.patience)
        again = await _references(clients, arguments.questions)
        same = sum(a == b for a, b in zip(known, again, strict=True))
        verdict.judge("again", same == len(known), f"{same} of {len(known)} references are the same")
        counts = await _counts_when_settled(server, clients, before, arguments.patience)
        record["server_counts"] = counts
        sent, counted, stray = books.sent.total(), sum(counts.values()), strays.sent.total()
        words = f"{sent} requests and {stray} attacks sent, {counted} counted by the server"
        verdict.judge("books", sent <= counted <= sent + stray, words)
        if server.process is not None:
            await _judge_farewell(verdict, server, clients, arguments.patience)
            _judge_log(verdict, server, books, strays)


async def _references(clients: Clients, count: int) -> list[tuple[Question, Choices]]:
    """Ask all questions in turn."""
    known: list[tuple[Question, Choices]] = []

    async def ask(question: Question) -> str:
        known.append((question, await clients.whole(question)))
        return "right"

    for question in QUESTIONS[:count]:
        await clients.books.note("reference", ask(question))
    if len(known) < len(QUESTIONS[:count]):
        raise SystemExit(f"the idle server does not answer: {clients.books.amiss}")
    return known


def _fire(books: Books, watch: Watch, seconds: float) -> dict[str, Any]:
    return {
        "seconds": seconds,
        "sent": dict(books.sent),
        "outcomes": {kind: dict(outcomes) for kind, outcomes in books.outcomes.items()},
        "unanswered": books.unanswered,
        "amiss": books.amiss,
        "most": watch.most,
        "memory_mib": watch.memory,
        "memory_growth": watch.growth,
    }


def _judge_fire(verdict: Verdict, books: Books, watch: Watch) -> None:
    right, wrong, refused = (books.total(outcome) for outcome in ("right", "wrong", "refused"))
    verdict.judge("answers", not wrong and right > 0, f"{right} right, {wrong} wrong, {refused} refused as they should")
    lost, unanswered = books.total("lost"), books.unanswered
    twice = sum(count > 1 for count in books.ids.values())
    words = f"{lost} lost, {unanswered} without an outcome, {twice} ids twice"
    verdict.judge("outcomes", not (lost or unanswered or twice), words)
    verdict.judge("outcomes", True, f"{books.total('full')} told to come back, {books.total('left')} left by clients")
    if watch.growth is not None:
        words = f"{100 * watch.growth:+.2f} % in the second half, {watch.memory[-1][1]:.0f} MiB at the end"
        verdict.judge("memory", watch.growth <= GROWTH, words)


def _judge_attacks(verdict: Verdict, strays: Books, health: Health) -> None:
    wrong, sent = strays.total("wrong") + strays.total("lost"), strays.sent.total()
    verdict.judge(
        "answers", not wrong, "; ".join([f"{sent} attacks, {wrong} not refused as they should", *strays.amiss])
    )
    within = health.within(1.0)
    words = f"{100 * within:.2f} % of {len(health.seconds)} probes within 1 s, the longest {health.longest:.2f} s"
    verdict.judge("health", within >= HEALTHY, words)


async def _judge_rest(verdict: Verdict, server: Server, clients: Clients, patience: float) -> None:
    """Wait until the server is idle, which must happen, with nothing left."""
    deadline = time.monotonic() + patience
    while True:
        told = await server.status(clients.session)
        left = {name: told["load"][name] for name in ("running", "waiting", "in_flight")}
        left |= {"KV blocks used": told["kv_blocks"]["used"]}
        if not any(left.values()) or time.monotonic() > deadline:
            break
        await asyncio.sleep(0.2)
    verdict.judge("idle", not any(left.values()), ", ".join(f"{name} {count}" for name, count in left.items()))
    failed, replaced = (told["counts"][name] for name in ("failed_steps", "replaced_engines"))
    verdict.judge("log", not (failed or replaced), f"{failed} failed steps, {replaced} engines replaced")


async def _counts_when_settled(
    server: Server, clients: Clients, before: dict[str, int], patience: float
) -> dict[str, int]:
    """Increase of the server's counters; a request counts just after its last byte."""
    deadline = time.monotonic() + min(patience, 60)
    while True:
        now = await server.counted(clients.session)
        counts = {outcome: count - before.get(outcome, 0) for outcome, count in sorted(now.items())}
        if sum(counts.values()) >= clients.books.sent.total() or time.monotonic() > deadline:
            return counts
        await asyncio.sleep(0.2)


async def _judge_farewell(verdict: Verdict, server: Server, clients: Clients, patience: float) -> None:
    """Stop the server while it answers."""
    assert server.process is not None
    expected = await clients.whole(FAREWELL)
    running = [asyncio.create_task(clients.streamed(FAREWELL)) for _ in range(FAREWELLS)]
    while (await server.status(clients.session))["load"]["running"] < FAREWELLS and not running[0].done():
        await asyncio.sleep(0.05)
    under_way = sum(not task.done() for task in running)
    server.process.send_signal(signal.SIGTERM)
    said = await asyncio.wait_for(asyncio.gather(*running, return_exceptions=True), patience)
    right = sum(answer == expected for answer in said)
    code = await asyncio.wait_for(asyncio.to_thread(server.process.wait), patience)
    words = f"{under_way} streams under way at SIGTERM, {right} ended as they should, exit code {code}"
    verdict.judge("farewell", under_way == right == FAREWELLS and code == 0, words)


def _judge_log(verdict: Verdict, server: Server, books: Books, strays: Books) -> None:
    ids, failures = server.logged()
    expected = books.sent.total() + 1 + FAREWELLS
    unknown = set(books.ids) - set(ids)
    words = f"{len(ids)} requests logged of {expected}, {len(unknown)} answers not among them, {len(failures)} failures"
    complete = expected <= len(ids) <= expected + strays.sent.total() and len(ids) == len(set(ids))
    verdict.judge("log", complete and not unknown and not failures, words)


def main() -> int:
    """Soak, print, and exit with 1 if a bar fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--attackers", type=int, default=8, help="of the clients, so many attack")
    parser.add_argument("--questions", type=int, default=len(QUESTIONS), help="ask only the first so many")
    parser.add_argument("--seed", type=int, default=0, help="of what clients choose to do")
    parser.add_argument("--serve", default=SERVE, help="the command that starts the server")
    parser.add_argument("--url", help="a server that runs already, and that nobody else asks meanwhile")
    parser.add_argument("--pid", type=int, help="its process, to watch its memory")
    parser.add_argument("--start-seconds", type=float, default=300)
    parser.add_argument("--patience", type=float, default=900, help="seconds for the last answers before they are lost")
    parser.add_argument("--log", type=Path, help="where the server's log goes")
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    arguments = parser.parse_args()

    log = arguments.log or Path(tempfile.mkdtemp(prefix="soak-")) / "server.log"
    server = Server(arguments.url, arguments.pid) if arguments.url else Server.start(arguments.serve, log)
    record: dict[str, Any] = {"arguments": {name: str(value) for name, value in vars(arguments).items()}}
    verdict = Verdict()
    try:
        asyncio.run(soak(arguments, server, record, verdict))
        record["complete"] = True
    except KeyboardInterrupt:
        verdict.judge("complete", False, "stopped before all was judged")
    except (aiohttp.ClientError, OSError) as error:  # a timeout is one of them
        verdict.judge("complete", False, f"the server is gone or stuck: {type(error).__name__} {error}; see {log}")
    finally:
        server.stop()
        record |= {"bars": verdict.bars, "words": verdict.words}
        if arguments.out is not None:
            arguments.out.write_text(json.dumps(record, indent=1))
    for kind, outcomes in sorted(record.get("fire", {}).get("outcomes", {}).items()):
        print(f"{kind:<26} {sum(outcomes.values()):>7}  {', '.join(f'{n} {name}' for name, n in outcomes.items())}")
    for line in record.get("fire", {}).get("amiss", ()):
        print(f"amiss: {line}")
    print(verdict.table())
    return 0 if verdict.bars and all(verdict.bars.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
