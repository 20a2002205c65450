"""Measures the overhead of `eyas serve --engine vllm`: the same greedy requests to one vLLM, directly and through eyas.

    python benchmarks/vllm_front.py --vllm-python ~/vllm/bin/python --users 1 --users 8

`eyas serve --engine vllm` is started once. Clients in this process stream from it, and from the vLLM that it started,
whose port and key are read from its process (so this runs on Linux only). Rounds take turns, the first way alternating;
a pair is one round of each. Prefix caches are warm for both ways from a first pair on, which is not counted. Figures
are medians over pairs of the ratio between both ways, with the lowest and the highest pair: what else the machine does
is in both rounds of a pair. What eyas itself computes is told apart, as seconds on a processor for each token: that
hardly depends on what else runs. Answers must be the same both ways.
"""

import argparse
import asyncio
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from http_overhead import one_by_one, questions

from eyas.bench.client import Client
from eyas.remote.address import Address

if TYPE_CHECKING:
    from collections.abc import Iterator

KEY = "front"
WAYS = ("vllm", "eyas")
Round = dict[str, Any]
"""Tokens per second of all users, the median time to a first token, and texts."""


@contextmanager
def started(arguments: argparse.Namespace) -> "Iterator[tuple[int, dict[str, Address]]]":
    """The process of eyas, and both addresses of one vLLM by their names."""
    depth = {"model": arguments.drafter, "method": "eagle3", "num_speculative_tokens": arguments.depth}
    command = [sys.executable, "-m", "eyas", "serve", arguments.target, "--engine", "vllm", "--port", "0"]
    command += ["--vllm-python", arguments.vllm_python, "--api-key", KEY, "--dtype", arguments.dtype]
    command += ["--max-model-len", "1024", "--max-num-seqs", str(max(arguments.users))]
    command += ["--speculative-config", json.dumps(depth) if arguments.depth else "none"]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("w") as output:
            front = subprocess.Popen([*command, "--", *arguments.vllm], stdout=output, stderr=subprocess.STDOUT)
        try:
            while (found := re.search(r"^at +(\S+)/v1", log.read_text(), re.M)) is None:
                if front.poll() is not None:
                    raise SystemExit(log.read_text())
                time.sleep(0.5)
            yield front.pid, {"vllm": _behind(front.pid), "eyas": Address.of(found[1], api_key=KEY)}
        finally:
            front.send_signal(signal.SIGTERM)
            front.wait()


def _behind(front: int) -> Address:
    """Find the vLLM that a server started."""
    for child in Path(f"/proc/{front}/task/{front}/children").read_text().split():
        words = Path(f"/proc/{child}/cmdline").read_text().split("\0")
        if "vllm.entrypoints.cli.main" in words:
            told = Path(f"/proc/{child}/environ").read_text().split("\0")
            key = next(entry for entry in told if entry.startswith("VLLM_API_KEY=")).partition("=")[2]
            return Address.of(f"http://127.0.0.1:{words[words.index('--port') + 1]}", api_key=key)
    raise SystemExit("eyas serve has no vLLM among its processes")


def _processor_seconds(process: int) -> float:
    """CPU seconds of a process, without its children."""
    behind_name = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(behind_name[11]) + int(behind_name[12])) / os.sysconf("SC_CLK_TCK")


async def ask(address: Address, users: int, arguments: argparse.Namespace) -> Round:
    """One round: all users start together, each asks one question after the other."""
    async with Client(address, timeout=3600) as client:
        asked = enumerate(questions(users, arguments.each))
        began = time.perf_counter()
        said = await asyncio.gather(*(one_by_one(client, *one, arguments.max_tokens) for one in asked))
        seconds = time.perf_counter() - began
    answers = [answer for of_user in said for answer in of_user]
    return {
        "tokens": sum(answer.tokens for answer in answers),
        "tokens_per_second": sum(answer.tokens for answer in answers) / seconds,
        "first_seconds": statistics.median(
            answer.first - answer.sent for answer in answers if answer.first is not None
        ),
        "texts": [answer.text for answer in answers],
    }


async def measure(
    front_process: int, addresses: dict[str, Address], users: int, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Measure both ways in turn for a number of users."""
    rounds: dict[str, list[Round]] = {way: [] for way in WAYS}
    for number in range(-1, arguments.pairs):  # the first is for warming up
        for way in WAYS if number % 2 else reversed(WAYS):
            used = _processor_seconds(front_process)
            done = await ask(addresses[way], users, arguments)
            done["front_seconds_per_token"] = (_processor_seconds(front_process) - used) / done["tokens"]
            told = f"{done['tokens_per_second']:.1f} tokens/s, first token {done['first_seconds'] * 1e3:.0f} ms"
            print(f"{users} users, {way}: {told}{'' if number >= 0 else ' (warming up)'}", flush=True)
            if number >= 0:
                rounds[way].append(done)
    direct, front = rounds["vllm"], rounds["eyas"]
    expected = direct[0]["texts"]
    every = [text for these in rounds.values() for done in these for text in zip(done["texts"], expected, strict=True)]
    return {
        "users": users,
        "pairs": arguments.pairs,
        **{f"{name}_{way}": [done[name] for done in rounds[way]] for name in FIGURES for way in WAYS},
        **{
            f"{name}_ratio": _spread([b[name] / a[name] for a, b in zip(direct, front, strict=True)])
            for name in FIGURES
        },
        "first_seconds_more": _spread(
            [b["first_seconds"] - a["first_seconds"] for a, b in zip(direct, front, strict=True)]
        ),
        "front_seconds_per_token": _spread([done["front_seconds_per_token"] for done in front]),
        "answers": len(every),
        "answers_the_same": sum(a == b for a, b in every),
    }


FIGURES = ("tokens_per_second", "first_seconds")


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def main() -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", required=True)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--drafter", default="smollm2-eagle3.1")
    parser.add_argument("--depth", type=int, default=3, help="0: no drafts")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--users", type=int, action="append")
    parser.add_argument("--each", type=int, default=1, help="questions of a user in a round")
    parser.add_argument("--max-tokens", type=int, default=40)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--out", type=Path)
    parser.add_argument("vllm", nargs="*", help="options of vLLM, behind --")
    arguments = parser.parse_args()
    arguments.users = arguments.users or [1, 8]
    from eyas.train.journal import versions

    found = []
    with started(arguments) as (process, addresses):
        for users in arguments.users:
            found.append(asyncio.run(measure(process, addresses, users, arguments)))
    for one in found:
        speed, first, more = one["tokens_per_second_ratio"], one["first_seconds_ratio"], one["first_seconds_more"]
        print(
            f"{one['users']} users, {one['pairs']} pairs: tokens/s through eyas {speed['median']:.3f} of vLLM's "
            f"[{speed['low']:.3f}, {speed['high']:.3f}], first token {first['median']:.2f} [{first['low']:.2f}, "
            f"{first['high']:.2f}], {more['median'] * 1e3:+.0f} ms; eyas computes "
            f"{one['front_seconds_per_token']['median'] * 1e3:.2f} ms for a token; {one['answers_the_same']} of "
            f"{one['answers']} answers the same"
        )
    if arguments.out is not None:
        record = {"arguments": vars(arguments) | {"out": None}, "processors": os.cpu_count(), "versions": versions()}
        arguments.out.write_text(json.dumps(record | {"users": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
