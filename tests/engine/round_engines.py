"""Engines whose rounds live on a device that is the processor, and a life for them to live through."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

import pytest
import torch

from engine.dense_tables import use_dense_tables
from engine.late_queue import LateQueue
from engine.test_engine import request
from eyas.drafter.model import Drafter
from eyas.engine.config import EngineConfig
from eyas.engine.engine import Engine
from eyas.engine.request import Speculation
from eyas.engine.runner.device_queue import DeviceQueue
from eyas.engine.runner.graph_capture import CapturedGraph, Function, GraphCapture
from eyas.engine.runner.input_buffers import InputBuffers
from eyas.target.model import Target


@pytest.fixture(autouse=True)
def dense_where_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention of passes that are laid out on the device, without a GPU's kernels."""
    use_dense_tables(monkeypatch)


class Uncaptured(GraphCapture):
    """The same functions where there is no CUDA: they just run."""

    def _capture(self, inputs: InputBuffers, function: Function) -> CapturedGraph:
        return CapturedGraph(inputs=inputs, run=lambda: function(inputs.device))


def round_engine(
    target: Target,
    drafter: Drafter | None,
    engine_options: EngineConfig,
    queue: DeviceQueue | None = None,
    *,
    synchronous: bool = False,
    clock: Callable[[], float] = perf_counter,
) -> Engine:
    """An engine whose rounds live on a device."""
    engine = Engine(target, drafter, config=engine_options, clock=clock)
    engine.use_rounds(Uncaptured(device=torch.device("cpu")), queue or LateQueue(), synchronous=synchronous)
    return engine


def graphs_of(engine: Engine) -> GraphCapture:
    """Its captured passes."""
    assert engine.rounds is not None
    return engine.rounds.runner.capture


def make_moody(engine: Engine, mood: Callable[[], int]) -> None:
    """From now on requests draft as deep as the mood says, and all of it is verified."""
    choose = engine.controller.choose

    def moody(rows: Sequence[Any], **options: Any) -> Any:
        depths = tuple(mood() for _ in rows)
        choice = replace(choose(rows, **options), depths=depths, limits=depths, holds=1)
        step = choice.under_way
        assert step is not None
        step.limits = {row.key: depth for row, depth in zip(rows, depths, strict=True)}
        step.bound = frozenset(step.limits)
        return choice

    engine.controller.choose = moody  # type: ignore[method-assign, assignment]


def live_through(engine: Engine, prompts: list[tuple[int, ...]]) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """Tokens and the depths they came from, while depths change at random and users come and go."""
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
