"""Runs the training of `eyas adapt --device-share` without an end; it can be paused.

    python benchmarks/learning_process.py answers.jsonl --out FOLDER --share 0.1

`learning.py` starts it and speaks to it: `hold` and `go` on its stdin; on its stdout a line of JSON when it has learnt
for a step, and one each time it is held, with the seconds that it worked and the seconds that it was let. A held
learner lies still in a rest, and its clock does too, so that it goes on as if nothing had been. It ends with its stdin.
"""

import argparse
import functools
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

from eyas.data.files import read_conversations
from eyas.drafter.checkpoint import read_config
from eyas.target.parts import TargetParts
from eyas.train.adaptation.recipe import AdaptationSettings, adaptation_recipe
from eyas.train.load_target import load_training_target
from eyas.train.pace import Pace, PacedSources, rests_between_modules, threads_of
from eyas.train.ranks import Ranks
from eyas.train.run import run
from eyas.train.sources.live import LiveSource

WITHOUT_END = 1e6


class Gate:
    """A pausable sleep, with a clock that stops meanwhile."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self._held = 0.0
        self.steps = 0
        self.pace: Pace | None = None

    def obey(self) -> None:
        """Read orders until stdin ends."""
        for line in sys.stdin:
            {"hold": self._open.clear, "go": self._open.set}[line.strip()]()
        os._exit(0)

    def clock(self) -> float:
        """Seconds without pauses."""
        return time.monotonic() - self._held

    def sleep(self, seconds: float) -> None:
        """Sleep, longer while paused."""
        time.sleep(seconds)
        if self._open.is_set():
            return
        began = time.monotonic()
        assert self.pace is not None
        tell(held=True, worked=self.pace.seconds_worked(), let=self.clock(), steps=self.steps)
        self._open.wait()
        self._held += time.monotonic() - began


def tell(**words: Any) -> None:
    """Print a line of JSON."""
    print(json.dumps(words), flush=True)


def main() -> None:
    """Learn until stdin ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("answers", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--drafter", default="smollm2-eagle3.1")
    parser.add_argument("--share", type=float, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="auto")
    arguments = parser.parse_args()
    gate = Gate()
    threading.Thread(target=gate.obey, daemon=True).start()
    settings = AdaptationSettings(
        drafter=arguments.drafter,
        answers=[str(arguments.answers)],
        epochs=WITHOUT_END,
        minutes=WITHOUT_END,
        device_share=arguments.share,
        target={"source": arguments.target, "dtype": arguments.dtype, "device": arguments.device},
        folder=str(arguments.out),
        overrides=["train.save_every=0", "train.log_every=1"],
    )
    device = torch.device(arguments.device)
    if device.type == "cpu":
        torch.set_num_threads(threads_of(arguments.share, torch.get_num_threads()))
    conversations = list(read_conversations(arguments.answers))
    config = read_config(arguments.drafter)
    recipe = adaptation_recipe(
        settings, config, answered=len(conversations), context=None, on_cpu=device.type == "cpu", longest=1
    )
    target = load_training_target(recipe, Ranks(), None)
    ready = threading.Event()
    wait = (lambda: None) if device.type == "cpu" else functools.partial(torch.accelerator.synchronize, device)
    # No rest before the first step, when nothing is measured yet.
    gate.pace = pace = Pace(
        arguments.share, synchronize=wait, hurry=lambda: not ready.is_set(), clock=gate.clock, sleep=gate.sleep
    )

    class Steps:
        """Counts steps."""

        def progressed(self, metrics: Any) -> None:
            """After each."""
            gate.steps = metrics.step

        def estimated(self, *_: object) -> None:
            """Never: there is no end."""

        def saved(self, *_: object) -> None:
            """Never, either."""

    def begin() -> None:
        ready.set()
        tell(ready=True, threads=torch.get_num_threads())

    live = functools.partial(LiveSource, target, chunk=recipe.train.chunk)
    with rests_between_modules(pace):
        run(
            recipe,
            TargetParts.of(target),
            PacedSources(open_source=live, pace=pace),
            observers=[Steps()],
            on_first_step=begin,
            clock=pace.seconds_worked,
        )


if __name__ == "__main__":
    main()
