"""Measures how much a learner with a share of the device slows serving down.

    python benchmarks/learning.py --device cuda --dtype bfloat16 --users 16 --share 0.1
    python benchmarks/learning.py --users 2 --share 0.1

The engine answers tickets of `adaptation_traffic.py`, drafted for as deep as pays, so many at a time without an end.
Its first answers are what the learner learns from, in a process of its own (`learning_process.py`). Windows in which
the learner is held and windows in which it learns come in turn, in the order A B B A, and a ratio is of two windows
that lie side by side. The bound: serving keeps 1 - share - 0.02 of its speed. On a CPU, a step of the learner takes
seconds: windows have to be long enough for several pieces of its work, and the machine quiet.
"""

import argparse
import json
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from adaptation_traffic import make_requests
from engine_speed import read_drafter, requests_of
from pairs import Interval, interval, turns

from eyas.engine.config import EngineConfig
from eyas.engine.engine import Engine
from eyas.engine.request import Speculation
from eyas.errors import UserError
from eyas.kernels.linear.packed_linear import pack_linears
from eyas.target.model import Target
from eyas.train.journal import versions

Json = dict[str, Any]
ALONE, BESIDE = "alone", "beside a learner"
SLACK = 0.02
"""Loss of serving speed allowed beyond the learner's share."""
TICKETS = 400
LEARNER_SECONDS = 600.0
"""Seconds in which a learner must do its first step."""


@dataclass(frozen=True, kw_only=True)
class Window:
    """Steps and tokens of a window."""

    tokens: int
    seconds: float
    step_p50: float
    step_p99: float
    """Median seconds of a step."""

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


class Serving:
    """A constant number of users."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._target = target = Target.load(arguments.target, dtype=arguments.dtype, device=arguments.device)
        if target.device.type == "cpu":
            pack_linears(target.model, widen=arguments.dtype == "auto")
        self.tickets = make_requests(TICKETS, seed=0)
        prompts = [tuple(target.encode_chat(ticket["messages"])) for ticket in self.tickets]
        longest = max(map(len, prompts)) + arguments.max_tokens
        config = EngineConfig(max_num_seqs=arguments.users, max_model_len=longest)
        self._engine = Engine(target, read_drafter(arguments.drafter, target), config=config)
        self._engine.capture_graphs()
        asked = requests_of(target, prompts, arguments.max_tokens, Speculation())
        self._waiting = cycle(enumerate(asked))
        self._users, self._under_way = arguments.users, dict[int, tuple[int, list[int]]]()
        self.answers: dict[int, list[int]] = {}
        """Answers as tokens, by ticket."""

    def serve(self, until: Callable[[], bool]) -> Window:
        """Serve until a condition holds, for at least one step."""
        engine, tokens, steps = self._engine, 0, list[float]()
        began = now = time.perf_counter()
        while not steps or not until():
            while len(self._under_way) < self._users:
                ticket, request = next(self._waiting)
                self._under_way[engine.submit(request)] = ticket, []
            for piece in engine.step():
                tokens += len(piece.tokens)
                ticket, said = self._under_way[piece.key]
                said += piece.tokens
                if piece.finished is not None:
                    self.answers[ticket] = said
                    del self._under_way[piece.key]
            before, now = now, time.perf_counter()
            steps.append(now - before)
        p50, p99 = np.percentile(steps, (50, 99))
        return Window(tokens=tokens, seconds=now - began, step_p50=float(p50), step_p99=float(p99))

    def serve_for(self, seconds: float) -> Window:
        """Serve for some seconds."""
        end = time.perf_counter() + seconds
        return self.serve(lambda: time.perf_counter() >= end)

    def write_answers(self, file: Path) -> int:
        """All answers so far, as conversations."""
        decode = self._target.tokenizer.decode
        lines = []
        for ticket, said in self.answers.items():
            answer = {"role": "assistant", "content": decode(said, skip_special_tokens=True)}
            lines.append(json.dumps({"messages": [*self.tickets[ticket]["messages"], answer]}) + "\n")
        file.write_text("".join(lines), encoding="utf-8")
        return len(lines)


class LearnerProcess:
    """The learner's process and its messages."""

    def __init__(self, arguments: argparse.Namespace, answers: Path, folder: Path, log: Path) -> None:
        words = [str(answers), "--out", str(folder), "--share", str(arguments.share)]
        for name in ("target", "drafter", "device", "dtype"):
            words += [f"--{name}", getattr(arguments, name)]
        program = Path(__file__).with_name("learning_process.py")
        self._log = log
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, str(program), *words],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self._said: queue.Queue[Json] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._said.put(json.loads(line))

    def said(self) -> Json | None:
        """Unread messages of the learner."""
        if self._said.empty() and self._process.poll() is not None:
            raise UserError(f"the learner ended with code {self._process.poll()}; see {self._log}")
        return None if self._said.empty() else self._said.get()

    def order(self, word: str) -> None:
        """Send `hold` or `go`."""
        assert self._process.stdin is not None
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()

    def end(self) -> None:
        """Close its stdin, which ends it; kill it if it does not end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def main() -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--drafter", default="smollm2-eagle3.1")
    parser.add_argument("--users", type=int, help="default 2, on a GPU 16")
    parser.add_argument("--share", type=float, default=0.1, help="of the device's time, for the learner; below 1")
    parser.add_argument("--answers", type=int, default=64, help="that it learns from, 32 at least")
    parser.add_argument("--max-tokens", type=int, default=100, help="of an answer")
    parser.add_argument("--window", type=float, help="seconds; default 15, on a GPU 3")
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=100.0, help="begin no pair after so long, but three at least")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--out", type=Path, default=Path("learning"), help="folder for learning.json and the log")
    arguments = parser.parse_args()
    if not 0 < arguments.share < 1:
        parser.error(f"--share is {arguments.share:g}; a learner that takes all has no rests to be held in: below 1")
    on_gpu = arguments.device.startswith("cuda")
    arguments.users = arguments.users or (16 if on_gpu else 2)
    arguments.window = arguments.window or (3.0 if on_gpu else 15.0)
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        try:
            record = measure(arguments, Path(folder))
        except UserError as error:
            raise SystemExit(f"error: {error}") from error
    (arguments.out / "learning.json").write_text(json.dumps(record, indent=1))
    print(table(record), flush=True)


def measure(arguments: argparse.Namespace, folder: Path) -> Json:
    """Measure windows in turn, and compute the ratios."""
    began = time.perf_counter()

    def say(words: str) -> None:
        print(f"{time.perf_counter() - began:5.0f} s  {words}", flush=True)

    serving = Serving(arguments)
    say("the engine is ready")
    serving.serve(lambda: len(serving.answers) >= arguments.answers)
    say(f"{serving.write_answers(folder / 'answers.jsonl')} answers to learn from")
    learner = LearnerProcess(arguments, folder / "answers.jsonl", folder / "run", arguments.out / "learner.log")
    try:
        first = _heard(serving, learner, LEARNER_SECONDS)
        say(f"the learner has done its first step, with {first['threads']} threads")
        learner.order("hold")
        was = start = _heard(serving, learner, LEARNER_SECONDS)
        pairs: list[dict[str, Window]] = []
        for number in range(arguments.pairs):
            if number >= 3 and time.perf_counter() - began > arguments.seconds:
                say(f"{number} of {arguments.pairs} pairs: --seconds are over")
                break
            pair = {}
            for mode in turns([ALONE, BESIDE], number):
                if mode == BESIDE:
                    learner.order("go")
                pair[mode] = serving.serve_for(arguments.window)
                if mode == BESIDE:
                    learner.order("hold")
                    before, was = was, _heard(serving, learner, LEARNER_SECONDS)
            pairs.append(pair)
            share = (was["worked"] - before["worked"]) / (was["let"] - before["let"])
            ratio = pair[BESIDE].speed / pair[ALONE].speed
            say(f"pair {number + 1}: {pair[ALONE].speed:.1f} tokens/s alone, {ratio:.3f} beside; it took {share:.1%}")
    finally:
        learner.end()
    return {
        "versions": versions(),
        "arguments": {name: str(value) for name, value in vars(arguments).items()},
        "device": torch.cuda.get_device_name() if arguments.device.startswith("cuda") else "cpu",
        "seconds": time.perf_counter() - began,
        "users": arguments.users,
        "share": arguments.share,
        "share_taken": (was["worked"] - start["worked"]) / (was["let"] - start["let"]),
        "steps_learnt": was["steps"] - start["steps"],
        "bound": 1 - arguments.share - SLACK,
        "ratio": asdict(interval([pair[BESIDE].speed / pair[ALONE].speed for pair in pairs])),
        "pairs": [{mode: asdict(window) for mode, window in pair.items()} for pair in pairs],
    }


def _heard(serving: Serving, learner: LearnerProcess, seconds: float) -> Json:
    """The learner's next message, while serving goes on."""
    found: list[Json] = []
    end = time.perf_counter() + seconds

    def heard() -> bool:
        if (said := learner.said()) is not None:
            found.append(said)
        return bool(found) or time.perf_counter() > end

    serving.serve(heard)
    if not found:
        raise UserError(f"the learner has said nothing for {seconds:.0f} s; see its log")
    return found[0]


def table(record: Json) -> str:
    """Print the remaining speed, and whether it is enough."""
    ratio, bound = Interval(**record["ratio"]), record["bound"]
    rows = []
    for mode in (ALONE, BESIDE):
        windows = [pair[mode] for pair in record["pairs"]]
        speed = statistics.median(window["tokens"] / window["seconds"] for window in windows)
        steps = [1000 * statistics.median(window[name] for window in windows) for name in ("step_p50", "step_p99")]
        rows.append(f"{mode:<20}{speed:>10.1f}{steps[0]:>10.2f}{steps[1]:>10.2f}")
    low = ratio.median if ratio.low is None else ratio.low
    held = "held" if low >= bound else "held by the median alone" if ratio.median >= bound else "missed"
    head = f"{record['arguments']['target']}, {record['device']}, {record['users']} users"
    lines = [
        f"\n{head}; {record['seconds']:.0f} s in all",
        f"{'':<20}{'tokens/s':>10}{'step ms':>10}{'99 %':>10}",
        *rows,
        f"serving keeps {ratio} of its speed over {ratio.pairs} pairs; bound {bound:.2f}: {held}",
        f"the learner took {record['share_taken']:.1%} of {record['share']:.1%}, did {record['steps_learnt']} steps",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
