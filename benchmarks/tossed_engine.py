"""The engine with an acceptance length of one's choice: how many drafts of a round are accepted is tossed.

Everything about forced acceptance is here; the benchmarks that use it see an engine.
"""

import random
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from eyas.engine.engine import Engine
from eyas.engine.runner.device_queue import DeviceQueue
from eyas.engine.runner.graph_capture import CapturedGraph, Function, GraphCapture


class TossedEngine(Engine):
    """Accepts drafts by a coin instead of by what the target said.

    The whole comparison has run by then, so a step costs what it costs with a drafter of that acceptance. Where rounds
    live on the device, it is tossed there, and the host does not see it before the tokens have arrived.
    """

    def __init__(self, *arguments: Any, length: float, depth: int, **options: Any) -> None:
        self._chance, self._coin = chance_of(length, depth), random.Random(0)
        super().__init__(*arguments, **options)

    def use_rounds(self, capture: GraphCapture, queue: DeviceQueue, **options: Any) -> None:
        """Toss on the device, and time what is captured."""
        timed = TimedCapture(device=capture.device, enabled=capture.enabled)
        super().use_rounds(timed, queue, **{**options, "chance": self._chance})

    @property
    def capture(self) -> "TimedCapture | None":
        """Captured passes, where there are rounds."""
        capture = None if self.rounds is None else self.rounds.runner.capture
        return capture if isinstance(capture, TimedCapture) else None

    def _begin_to_learn(self, *given: Any) -> None:
        super()._begin_to_learn(*given)
        verify = self.host_loop._verify

        def tossed(*asked: Any) -> Any:
            results, output = verify(*asked)
            return [self._toss(result) if result.draft.tokens else result for result in results], output

        self.host_loop._verify = tossed  # type: ignore[method-assign]

    def _toss(self, result: Any) -> Any:
        first_child, nodes = dict[int, int](), list[int]()
        for node, parent in enumerate(result.draft.parents):
            first_child.setdefault(parent, node)
        while (node := first_child.get(nodes[-1] if nodes else -1, -1)) >= 0 and self._coin.random() < self._chance:
            nodes.append(node)
        return replace(result, nodes=nodes, tokens=[*(result.draft.tokens[n] for n in nodes), result.tokens[-1]])


class TimedCapture(GraphCapture):
    """Brackets replays by events."""

    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]]

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.events = defaultdict(list)

    def get(
        self,
        kind: str,
        bucket: tuple[object, ...],
        shapes: Callable[[], Mapping[str, tuple[int, ...]]],
        function: Function,
    ) -> CapturedGraph | None:
        """The same, timed."""
        graph = super().get(kind, bucket, shapes, function)
        if graph is None:
            return None

        def timed() -> Tensor:
            pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            pair[0].record()
            output = graph.run()
            pair[1].record()
            self.events[kind].append(pair)
            return output

        return replace(graph, run=timed)

    def milliseconds(self, kind: str) -> float:
        """The median replay so far."""
        torch.cuda.synchronize()
        times = [first.elapsed_time(last) for first, last in self.events[kind]]
        return statistics.median(times) if times else 0.0


def chance_of(length: float, depth: int) -> float:
    """The chance of each draft by which 1 + p + p^2 + ... + p^depth is the mean length."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**d for d in range(depth + 1)) < length else (low, middle)
    return low
