"""The device as a queue: what is put in runs in order, while the host goes on.

On CUDA that is the current stream. Everything that a round does to device memory goes through a queue, so tests can put
one in its place that runs things as late as it may, and find whoever counts on their being done. A CPU has done what it
is told when it is told.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from eyas.engine.runner.graph_capture import GraphCapture
from eyas.kernels.attention.choose import has_triton


class Mark(Protocol):
    """A place in the queue."""

    def wait(self) -> None:
        """Until the device has come to it."""

    def seconds_since(self, earlier: Any) -> float:
        """Of the device, from an earlier mark; both were waited for."""


class DeviceQueue(Protocol):
    """Runs functions on the device, in order."""

    def run(self, function: Callable[[], object]) -> None:
        """Put a function in; it may run later than this returns."""

    def mark(self) -> Mark:
        """The place behind all that was put in so far."""


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
    """The processor itself: a function has run when `run` returns."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock

    def run(self, function: Callable[[], object]) -> None:
        """Call it."""
        function()

    def mark(self) -> Mark:
        """The present time."""
        return _TimeMark(self._clock())


class CUDAStreamQueue(ImmediateQueue):
    """The current CUDA stream: what is called launches operations, which run later by themselves."""

    def mark(self) -> Mark:
        """An event."""
        return _EventMark()


class _TimeMark:
    def __init__(self, at: float) -> None:
        self._at = at

    def wait(self) -> None:
        """Return at once: all before it is done."""

    def seconds_since(self, earlier: "_TimeMark") -> float:
        return self._at - earlier._at


@dataclass(kw_only=True)
class RoundDevice:
    """How passes come to a device: captured as CUDA graphs or run as they are, in flight or waited for."""

    capture: GraphCapture
    queue: DeviceQueue
    synchronous: bool = False
    """Every step lands before the next is launched."""
    chance: float | None = None
    """A coin that accepts drafts instead of the law: to measure at an acceptance of one's choice."""

    def anew(self) -> "RoundDevice":
        """The device with nothing captured."""
        return replace(self, capture=self.capture.anew())

    @classmethod
    def of(
        cls, device: torch.device, *, graphs: bool, overlap: bool, clock: Callable[[], float] = time.perf_counter
    ) -> "RoundDevice":
        """A GPU works while the host plans ahead, if told to; a CPU is the host."""
        on_gpu = device.type == "cuda"
        return cls(
            capture=GraphCapture(device=device, enabled=graphs and on_gpu and has_triton()),
            queue=CUDAStreamQueue() if on_gpu else ImmediateQueue(clock),
            synchronous=not (on_gpu and overlap),
        )
