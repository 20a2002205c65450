"""An engine with a forced acceptance length: a coin decides how many drafts of a round are accepted.

Everything about forced acceptance is here; the benchmarks that use it see an engine.
"""

import statistics
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from eyas.drafter.model import Drafter
from eyas.engine.config import EngineConfig
from eyas.engine.engine import Engine
from eyas.engine.runner.device_queue import RoundDevice
from eyas.engine.runner.graph_capture import Function, GraphCapture
from eyas.target.model import Target


class TossedEngine(Engine):
    """Accepts drafts by a coin, and times captured passes.

    The whole comparison has run by then, so a step costs what it costs with a drafter of that acceptance. The coin is
    tossed on the device, and the host does not see it before the tokens have arrived.
    """

    def __init__(
        self, target: Target, drafter: Drafter | None, *, config: EngineConfig, length: float, depth: int
    ) -> None:
        usual = RoundDevice.of(target.device, graphs=config.graphs, overlap=config.async_scheduling)
        capture = TimedCapture(device=usual.capture.device, enabled=usual.capture.enabled)
        device = replace(usual, capture=capture, chance=chance_of(length, depth))
        super().__init__(target, drafter, config=config, device=device)

    @property
    def capture(self) -> "TimedCapture":
        """Captured passes; on a CPU there are none."""
        capture = self.core.runner.capture
        assert isinstance(capture, TimedCapture)
        return capture


class TimedCapture(GraphCapture):
    """Surrounds graph replays with CUDA events."""

    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]]

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.events = defaultdict(list)

    def get(
        self, kind: str, bucket: tuple[object, ...], function: Function, before: Callable[[], object]
    ) -> Function | None:
        """A graph whose replays are timed."""
        replay = super().get(kind, bucket, function, before)
        if replay is None:
            return None

        def timed() -> Tensor:
            pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            pair[0].record()
            output = replay()
            pair[1].record()
            self.events[kind].append(pair)
            return output

        return timed

    def milliseconds(self, kind: str) -> float:
        """Median replay time in milliseconds."""
        torch.cuda.synchronize()
        times = [first.elapsed_time(last) for first, last in self.events[kind]]
        return statistics.median(times) if times else 0.0


def chance_of(length: float, depth: int) -> float:
    """Probability p of each draft for which 1 + p + p^2 + ... + p^depth is the mean length."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**d for d in range(depth + 1)) < length else (low, middle)
    return low
