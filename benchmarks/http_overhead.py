"""Measures the overhead of HTTP: the same greedy requests to one engine, directly and through the server.

    python benchmarks/http_overhead.py --users 16

One engine is loaded. A round by hand has as many tasks as users stream from it in this process. A round over HTTP has
as many clients, in a process of their own, stream from the server that runs here around the same engine: so chat
template, tokenizer, JSON, events, sockets and the clients' own share of the processor are all in the difference. Rounds
take turns, each begins without cached prefixes, and every answer must be the same both ways. Figures are medians over
rounds; the overhead is the median over pairs of rounds of how much slower HTTP was. Exits with 1 if that is not below
the bar.
"""

import argparse
import asyncio
import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eyas.bench.client import Client
from eyas.bench.stream import StreamedAnswer
from eyas.remote.address import Address

BAR = 0.05
THINGS = (
    *("bread", "rope", "glass", "steel", "paper", "salt", "wool", "rivers"),
    *("clocks", "bridges", "maps", "boats", "stars", "seeds", "ice", "soap"),
)
ASKED = ("Explain in a few sentences how {} came to be.", "Write a short story about {}.", "List ten facts about {}.")
Round = dict[str, Any]
"""Seconds, tokens, texts by number, and CPU seconds of the clients."""


def questions(users: int, each: int) -> list[list[dict[str, Any]]]:
    """Questions of every user, distinct as long as there are enough."""
    return [
        [
            {"role": "user", "content": ASKED[turn % len(ASKED)].format(THINGS[user % len(THINGS)])}
            for turn in range(each)
        ]
        for user in range(users)
    ]


async def one_by_one(
    client: Client, number: int, asked: Sequence[dict[str, Any]], max_tokens: int
) -> list[StreamedAnswer]:
    """Ask one question after the other; a failed answer ends the program."""
    answers = []
    for turn, message in enumerate(asked):
        body = {
            "messages": [message],
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        answer = await client.ask("/v1/chat/completions", body, key=f"{number}", category="", turn=turn)
        if answer.error is not None:
            raise SystemExit(f"user {number} got {answer.error}")
        answers.append(answer)
    return answers


async def by_http(url: str, arguments: argparse.Namespace) -> Round:
    """One round of clients that start together."""
    async with Client(Address.of(url), timeout=3600) as client:

        async def user(number: int, asked: Sequence[dict[str, Any]]) -> list[tuple[str, int]]:
            answers = await one_by_one(client, number, asked, arguments.max_tokens)
            return [(answer.text, answer.tokens) for answer in answers]

        return await _timed([user(*asked) for asked in enumerate(questions(arguments.users, arguments.each))])


async def _timed(users: Sequence[Any]) -> Round:
    used, began = _processor_seconds(), time.perf_counter()
    said = [answer for answers in await asyncio.gather(*users) for answer in answers]
    seconds = time.perf_counter() - began
    return {
        "seconds": seconds,
        "tokens": sum(tokens for _, tokens in said),
        "texts": [text for text, _ in said],
        "processor_seconds": _processor_seconds() - used,
    }


def _processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def ask_when_told(arguments: argparse.Namespace) -> None:
    """Client process: a round for every line on stdin."""
    while await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps(await by_http(arguments.ask, arguments)), flush=True)


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure both ways in turn."""
    # Only here: the process of the clients needs none of it.
    from eyas.drafter.shipped import choose_drafter
    from eyas.engine.config import EngineConfig
    from eyas.engine.engine import Engine
    from eyas.engine.output import OutputDelta, SpecDecodeStats
    from eyas.engine.request import Request
    from eyas.loading import load_another, load_pair
    from eyas.sampling import Sampling
    from eyas.serve.app import Application
    from eyas.serve.drafter_swaps import DrafterSlot
    from eyas.serve.local_engine import LocalEngineClient
    from eyas.serve.model_info import ModelInfo
    from eyas.serve.transport.server import Server, listen, url_of
    from eyas.train.journal import versions

    drafter_name = choose_drafter(arguments.drafter, arguments.target)
    target, drafter = load_pair(arguments.target, drafter_name, dtype="auto", device=arguments.device, cache=None)
    engine = Engine(
        target, drafter, config=EngineConfig(max_num_seqs=arguments.users, max_model_len=1024, memory=2**30)
    )
    engine_client = LocalEngineClient(lambda: engine)
    slot = DrafterSlot(model=drafter, load=lambda name: load_another(target, name, cache=None))
    model_info = ModelInfo(
        name="model", target=arguments.target, drafter=drafter_name, max_model_len=1024, max_num_seqs=arguments.users
    )
    listener = listen("127.0.0.1", 0)
    server = Server(Application(engine_client, model_info, page=False, slot=slot))
    serving = asyncio.create_task(server.serve([listener]))
    prompts = [
        [target.encode_chat([message]) for message in user] for user in questions(arguments.users, arguments.each)
    ]

    async def user(asked: Sequence[Sequence[int]]) -> list[tuple[str, int]]:
        answers = []
        for prompt in asked:
            request = Request(prompt=tuple(prompt), sampling=Sampling(), max_new_tokens=arguments.max_tokens)
            pieces = list[OutputDelta]()

            async def take(
                _: int, deltas: Sequence[OutputDelta], __: SpecDecodeStats, pieces: list[OutputDelta] = pieces
            ) -> None:
                pieces.extend(deltas)

            await engine_client.generate([request], take)
            answers.append(("".join(piece.text for piece in pieces), sum(len(piece.tokens) for piece in pieces)))
        return answers

    alike = {"--ask": url_of(listener), "--users": arguments.users, "--each": arguments.each}
    alike |= {"--max-tokens": arguments.max_tokens}
    clients = await asyncio.create_subprocess_exec(
        sys.executable,
        __file__,
        *(f"{name}={value}" for name, value in alike.items()),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=2**26,
    )
    orders, reports = clients.stdin, clients.stdout
    assert orders is not None
    assert reports is not None

    async def over_http() -> Round:
        orders.write(b"go\n")
        await orders.drain()
        told: Round = json.loads(await reports.readline())
        return told

    rounds: dict[str, list[Round]] = {"by hand": [], "over HTTP": []}
    try:
        for number in range(-1, arguments.rounds):  # the first is for warming up
            for way in rounds if number % 2 else reversed(rounds):
                engine.block_manager.forget()
                done = await (_timed([user(asked) for asked in prompts]) if way == "by hand" else over_http())
                print(f"{way}: {done['tokens'] / done['seconds']:.1f} tokens/s", flush=True)
                if number >= 0:
                    rounds[way].append(done)
    finally:
        orders.close()
        await clients.wait()
        server.should_exit = True
        await serving
        engine_client.close()
    return {"versions": versions(), **_figures(rounds)}


def _figures(rounds: dict[str, list[Round]]) -> dict[str, Any]:
    speeds = {way: [done["tokens"] / done["seconds"] for done in these] for way, these in rounds.items()}
    expected = rounds["by hand"][0]["texts"]
    every = [done["texts"] for these in rounds.values() for done in these]
    return {
        "tokens_per_second": {way: statistics.median(these) for way, these in speeds.items()},
        "all": speeds,
        "overhead": statistics.median(1 - b / a for a, b in zip(speeds["by hand"], speeds["over HTTP"], strict=True)),
        "clients_processor_share": statistics.median(
            done["processor_seconds"] / done["seconds"] for done in rounds["over HTTP"]
        ),
        "processors": os.cpu_count(),
        "answers_the_same": sum(a == b for texts in every for a, b in zip(texts, expected, strict=True)),
        "answers": sum(map(len, every)),
    }


def main() -> int:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--drafter", help="unless it is the target's own; or none")
    parser.add_argument("--users", type=int, default=16)
    parser.add_argument("--each", type=int, default=2, help="requests of every user in a round")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--ask", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.ask:
        asyncio.run(ask_when_told(arguments))
        return 0
    record = asyncio.run(measure(arguments))
    record["arguments"] = {name: str(value) for name, value in vars(arguments).items()}
    for way, speed in record["tokens_per_second"].items():
        print(f"{way:<10} {speed:8.1f} tokens/s, {arguments.users} users")
    holds = record["overhead"] < BAR and record["answers_the_same"] == record["answers"]
    print(
        f"overhead   {100 * record['overhead']:.1f} %, bar {100 * BAR:g} %: {'holds' if holds else 'FAILS'}; "
        f"clients take {record['clients_processor_share']:.2f} of {record['processors']} processors; "
        f"same answers: {record['answers_the_same']} of {record['answers']}"
    )
    text = json.dumps(record, indent=1)
    if arguments.out is not None:
        arguments.out.write_text(text)
    else:
        print(text)
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
