"""Measures the speed of a fresh engine's first requests, with auto and with fixed depths.

    python benchmarks/first_requests.py                         the default target as shipped, 1, 4 and 16 users
    python benchmarks/first_requests.py --users 1 --rounds 5

Every mode gets an engine of its own, made anew for each round. The engines take turns, a quarter of a second each, and
the clock of those that wait stands still: a machine whose speed changes from second to second slows all of them alike.
Figures are medians over rounds, ratios are of one round. The first requests count, and nothing ran before them but what
an engine does on its own before it is ready (`ready` are its seconds). `first` is the speed of the first half of the
first requests, in parts of the whole run's.

    shipped   the drafter as it is
    no record the drafter without its recorded acceptance, as a foreign one comes
    random    a drafter of random weights, without a record
"""

import argparse
import time
from copy import copy
from dataclasses import dataclass
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
TURN = 0.25
"""Seconds."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """Speed of an engine's first requests."""

    speed: float
    """Tokens per second."""
    first: float
    """Speed of the beginning relative to the whole run."""
    ready: float
    """Seconds until the engine was ready."""


class PausingClock:
    """A clock that can be stopped."""

    def __init__(self) -> None:
        self._waited, self._paused = time.perf_counter(), 0.0

    def __call__(self) -> float:
        """Seconds so far, while it runs."""
        return time.perf_counter() - self._waited

    def pause(self) -> None:
        """Stop the clock."""
        self._paused = time.perf_counter()

    def go_on(self) -> None:
        """Start the clock."""
        self._waited += time.perf_counter() - self._paused


class Server:
    """An engine that answers its first requests, in turns."""

    def __init__(
        self, target: Target, drafter: Drafter | None, how: Speculation, *, users: int, count: int, tokens: int
    ) -> None:
        self._clock = PausingClock()
        self._engine = Engine(target, drafter, config=EngineConfig(capture_ahead=True), clock=self._clock)
        self._ready, self._users, self._tokens = self._clock(), users, list[float]()
        self._requests = [
            Request(
                prompt=tuple(target.encode_chat([{"role": "user", "content": QUESTIONS[number % len(QUESTIONS)]}])),
                sampling=Sampling(),
                max_new_tokens=tokens,
                seed=number,
                speculation=how,
            )
            for number in reversed(range(count))
        ]
        self._under_way = set[int]()
        self._clock.pause()

    def take_turn(self) -> bool:
        """Answer for one turn; return whether anything is left to do."""
        self._clock.go_on()
        until = self._clock() + TURN
        while (self._requests or self._under_way) and self._clock() < until:
            while self._requests and len(self._under_way) < self._users:
                self._under_way.add(self._engine.submit(self._requests.pop()))
            pieces = self._engine.step()
            now = self._clock()
            self._tokens += [now] * sum(len(piece.tokens) for piece in pieces)
            self._under_way -= {piece.key for piece in pieces if piece.finished is not None}
        self._clock.pause()
        return bool(self._requests or self._under_way)

    def run(self, first: int) -> Run:
        """Speed of the run, and of its first tokens."""
        seconds = [moment - self._ready for moment in self._tokens]
        speed = len(seconds) / seconds[-1]
        return Run(speed=speed, first=first / seconds[first - 1] / speed, ready=self._ready)


def main() -> None:
    """Run the benchmark and print its table."""
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
        rounds = list[dict[str, Run]]()
        for _ in range(wanted.rounds):
            count = max(users, wanted.requests)
            servers = {
                way: Server(target, drafter, how, users=users, count=count, tokens=wanted.tokens)
                for way, (drafter, how) in ways.items()
            }
            waiting = list(servers.values())
            while waiting:
                waiting = [server for server in waiting if server.take_turn()]
            rounds.append({way: server.run(users * wanted.tokens // 2) for way, server in servers.items()})
        print_table(users, rounds)


def print_table(users: int, rounds: list[dict[str, Run]]) -> None:
    """Medians over rounds; ratios are within a round."""
    speeds = {way: median(each[way].speed for each in rounds) for way in rounds[0]}
    best = max((way for way in speeds if not way.startswith("auto")), key=lambda way: speeds[way])
    for way in speeds:
        of_plain, of_best = (
            median(each[way].speed / each[other].speed for each in rounds) for other in ("plain", best)
        )
        first, ready = median(each[way].first for each in rounds), median(each[way].ready for each in rounds)
        print(
            f"{users:3d} users  {way:16s} {speeds[way]:7.1f} tokens/s  of plain {of_plain:.3f}  "
            f"of {best} {of_best:.3f}  first {first:.2f}  ready {ready:.2f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
