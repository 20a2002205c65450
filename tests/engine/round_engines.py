"""Engines that use rounds as on a GPU, with the CPU as device, and a scenario to run them through."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch

from engine.common import Prompts, request
from engine.late_queue import LateQueue
from eyas.drafter.model import Drafter
from eyas.engine.config import EngineConfig
from eyas.engine.engine import Engine
from eyas.engine.request import Speculation
from eyas.engine.runner.device_queue import DeviceQueue, RoundDevice
from eyas.engine.runner.graph_capture import Function, GraphCapture
from eyas.plan.shapes import CHAIN
from eyas.target.model import Target


class Uncaptured(GraphCapture):
    """Runs functions as they are, where there is no CUDA."""

    def _capture(self, function: Function) -> Function:
        return function


def round_engine(
    target: Target,
    drafter: Drafter | None,
    engine_options: EngineConfig,
    queue: DeviceQueue | None = None,
    *,
    synchronous: bool = False,
    chance: float | None = None,
    exact: bool = False,
    clock: Callable[[], float] = perf_counter,
) -> Engine:
    """An engine that launches each step before the previous one has landed, on a device that finishes late.

    `exact` uses the passes of a CPU instead of padded ones.
    """
    cpu = torch.device("cpu")
    device = RoundDevice(
        capture=GraphCapture(device=cpu, enabled=False) if exact else Uncaptured(device=cpu),
        queue=queue or LateQueue(),
        synchronous=synchronous,
        chance=chance,
    )
    return Engine(target, drafter, config=engine_options, clock=clock, device=device)


def graphs_of(engine: Engine) -> GraphCapture:
    """The engine's captured passes."""
    return engine.core.runner.capture


def make_moody(engine: Engine, mood: Callable[[], int]) -> None:
    """Make requests draft at the depths that `mood` returns."""
    choose = engine.controller.choose

    def moody(rows: Sequence[Any], **options: Any) -> Any:
        depths = tuple(mood() for _ in rows)
        return replace(choose(rows, **options), depths=depths, shape=CHAIN, holds=1)

    engine.controller.choose = moody  # type: ignore[method-assign, assignment]


def live_through(engine: Engine, prompts: Prompts) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """Tokens of requests and the depths they came from, while depths change at random and users come and go."""
    source = random.Random(3)
    make_moody(engine, lambda: source.choice([0, 0, 1, 2, 5, 7]))
    tokens: dict[int, list[int]] = {}
    depths: dict[int, list[int]] = {}
    left, doomed = list(enumerate(prompts)), {2, 7}
    while left or engine.busy:
        if left and source.random() < 0.3:
            number, prompt = left.pop(0)
            assert engine.submit(request(prompt, max_new_tokens=60, speculation=Speculation())) == number
        for piece in engine.step():
            tokens.setdefault(piece.key, []).extend(piece.tokens)
            depths.setdefault(piece.key, []).extend(piece.depths)
        engine.scheduler.check()
        for seq in engine.scheduler.running:
            if seq.key in doomed and seq.new_tokens > 10:
                doomed.remove(seq.key)
                engine.cancel(seq.key)
    assert engine.block_manager.used == 0
    return tokens, depths
