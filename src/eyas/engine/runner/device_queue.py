"""The device as a queue of work that runs in order, while the host goes on.

On CUDA the queue is the current stream. All work of a round on device memory goes through a queue, so tests can use one
that runs everything as late as possible, to find code that relies on it being done. A CPU runs work at once.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from eyas.engine.runner.graph_capture import GraphCapture
from eyas.kernels.attention.choose import has_triton


class Mark(Protocol):
    """A position in the queue."""

    def wait(self) -> None:
        """Wait until the device has reached it."""

    def seconds_since(self, earlier: Any) -> float:
        """Device time since an earlier mark; both must have been waited for."""


class DeviceQueue(Protocol):
    """Runs functions on the device, in order."""

    def run(self, function: Callable[[], object]) -> None:
        """Queue a function; it may run after this returns."""

    def mark(self) -> Mark:
        """A mark behind everything queued so far."""


class _EventMark:
    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._event.record()

    def wait(self) -> None:
        self._event.synchronize()

    def seconds_since(self, earlier: "_EventMark") -> float:
        seconds: float = 1e-3 * earlier._event.elapsed_time(self._event)
        return seconds


class ImmediateQueue:
    """Runs each function at once, on the host."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock

    def run(self, function: Callable[[], object]) -> None:
        function()

    def mark(self) -> Mark:
        return _TimeMark(self._clock())


class CUDAStreamQueue(ImmediateQueue):
    """The current CUDA stream: functions are called at once and launch asynchronous operations."""

    def mark(self) -> Mark:
        return _EventMark()


class _TimeMark:
    def __init__(self, at: float) -> None:
        self._at = at

    def wait(self) -> None:
        """Return at once: all earlier work is done."""

    def seconds_since(self, earlier: "_TimeMark") -> float:
        return self._at - earlier._at


@dataclass(kw_only=True)
class RoundDevice:
    """How rounds use a device: with or without CUDA graphs, asynchronously or not."""

    capture: GraphCapture
    queue: DeviceQueue
    synchronous: bool = False
    """Whether each step lands before the next is launched."""
    chance: float | None = None
    """Probability of accepting any draft, for measurements at a given acceptance; None: by equality."""

    def without_graphs(self) -> "RoundDevice":
        """A copy without captured graphs."""
        return replace(self, capture=self.capture.without_graphs())

    @classmethod
    def of(
        cls, device: torch.device, *, graphs: bool, overlap: bool, clock: Callable[[], float] = time.perf_counter
    ) -> "RoundDevice":
        """Make one from options; a CPU is always synchronous."""
        on_gpu = device.type == "cuda"
        return cls(
            capture=GraphCapture(device=device, enabled=graphs and on_gpu and has_triton()),
            queue=CUDAStreamQueue() if on_gpu else ImmediateQueue(clock),
            synchronous=not (on_gpu and overlap),
        )
