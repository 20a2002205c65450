"""How fast the first requests of a fresh engine are answered, with auto and with fixed depths.

    python benchmarks/first_requests.py                         the default target as shipped, 1, 4 and 16 users
    python benchmarks/first_requests.py --users 1 --rounds 5

Every mode gets an engine of its own, made anew for each round, and the ways take turns, so that a machine's moods fall
on all of them alike; figures are medians over rounds. The first requests count, and nothing ran before them but what an
engine does on its own before it is ready (`ready` are its seconds).

    shipped   the drafter as it is
    no record the drafter without its recorded acceptance, as a foreign one comes
    random    a drafter of random weights, without a record
"""

import argparse
import time
from copy import copy
from statistics import median

from engine_speed import read_drafter

from eyas.drafter.model import Drafter
from eyas.drafter.shipped import choose_drafter
from eyas.engine.config import EngineConfig
from eyas.engine.engine import Engine
from eyas.engine.request import Request, Speculation
from eyas.loading import load_target
from eyas.sampling import Sampling
from eyas.target.model import Target

QUESTIONS = (
    "What is photosynthesis?",
    "Write a Python function that reverses a string.",
    "Name three rivers in Europe.",
    "Explain gravity to a child.",
    "Write a short poem about rain.",
    "How do I boil an egg?",
    "What is the capital of Australia, and why not Sydney?",
    "List five healthy breakfasts.",
    "Summarise the story of Romeo and Juliet.",
    "Why is the sky blue?",
)
Run = tuple[float, float]
"""Tokens per second, and seconds until the engine was ready."""


def measure(target: Target, drafter: Drafter | None, how: Speculation, *, users: int, count: int, tokens: int) -> Run:
    """Tokens per second of the first requests of an engine, so many at a time, and the seconds until it was ready."""
    began = time.perf_counter()
    engine = Engine(target, drafter, config=EngineConfig(capture_ahead=True))
    ready = time.perf_counter() - began
    requests = iter(
        Request(
            prompt=tuple(target.encode_chat([{"role": "user", "content": QUESTIONS[number % len(QUESTIONS)]}])),
            sampling=Sampling(),
            max_new_tokens=tokens,
            seed=number,
            speculation=how,
        )
        for number in range(count)
    )
    began = time.perf_counter()
    named = ((0, request) for request in requests)
    given = sum(len(output.tokens) for _, output in engine.serve(lambda: next(named, None), at_once=users))
    return given / (time.perf_counter() - began), ready


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--drafter")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--users", type=int, action="append")
    parser.add_argument("--depth", type=int, action="append")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=10, help="answered by each engine; at least one for each user")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--no-random", action="store_true")
    wanted = parser.parse_args()
    name = wanted.drafter or choose_drafter(None, wanted.target)
    if name is None:
        raise SystemExit(f"{wanted.target} has no drafter of its own; give --drafter")
    target = load_target(wanted.target, dtype=wanted.dtype, device="cpu", quantization="auto")
    shipped = read_drafter(name, target)
    foreign = copy(shipped)
    foreign.recorded_acceptance = None
    ways: dict[str, tuple[Drafter | None, Speculation]] = {"plain": (None, Speculation(mode="off"))}
    for depth in wanted.depth or (2, 3, 5):
        ways[f"depth {depth}"] = shipped, Speculation(mode="fixed", depth=depth)
    ways |= {"auto, shipped": (shipped, Speculation()), "auto, no record": (foreign, Speculation())}
    if not wanted.no_random:
        ways["auto, random"] = read_drafter(name, target, random=True), Speculation()
    for users in wanted.users or (1, 4, 16):
        runs: dict[str, list[Run]] = {way: [] for way in ways}
        for _ in range(wanted.rounds):
            for way, (drafter, how) in ways.items():
                count = max(users, wanted.requests)
                runs[way].append(measure(target, drafter, how, users=users, count=count, tokens=wanted.tokens))
        speeds = {way: median(speed for speed, _ in each) for way, each in runs.items()}
        best = max(speed for way, speed in speeds.items() if not way.startswith("auto"))
        for way, speed in speeds.items():
            ready = median(seconds for _, seconds in runs[way])
            print(
                f"{users:3d} users  {way:16s} {speed:7.1f} tokens/s  of plain {speed / speeds['plain']:.3f}  "
                f"of best {speed / best:.3f}  ready {ready:.2f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
