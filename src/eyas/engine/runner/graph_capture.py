"""CUDA graphs: captured once per bucket of shapes, replayed with other input.

A graph reads its input from fixed addresses, in the state or in `InputBuffers`. All graphs share one memory pool, so a
replay's output is valid until the next replay.
"""

import gc
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

logger = logging.getLogger(__name__)

Numbers = Mapping[str, Tensor]
"""Integer tables on the device."""
Function = Callable[[], Tensor]


class InputBuffers:
    """Named int64 tables in one buffer, so that one copy brings a step's input to the device.

    Writes are staged in pinned memory, so that the copy is asynchronous.
    """

    def __init__(self, sizes: Mapping[str, int], device: torch.device) -> None:
        total = sum(sizes.values())
        self._from = torch.zeros(total, dtype=torch.int64)
        self._to = torch.zeros(total, dtype=torch.int64, device=device)
        numbers: NDArray[np.int64] = self._from.numpy()
        self._host: dict[str, NDArray[np.int64]] = {}
        self.device: dict[str, Tensor] = {}
        """The tables on the device."""
        end = 0
        for name, size in sizes.items():
            start, end = end, end + size
            self._host[name], self.device[name] = numbers[start:end], self._to[start:end]

    def staged(self, **numbers: Sequence[int]) -> Callable[[], None]:
        """Stage these numbers, zero-padded; the returned function copies them to the device. Others may be staged
        before it runs.
        """
        for name, values in numbers.items():
            table = self._host[name]
            table[: len(values)], table[len(values) :] = values, 0
        staged_copy = self._from.clone()
        if self._to.is_cuda:
            staged_copy = staged_copy.pin_memory()

        def copy() -> None:
            self._to.copy_(staged_copy, non_blocking=True)

        return copy


@dataclass(kw_only=True, eq=False)
class GraphCapture:
    """Captures functions as CUDA graphs."""

    device: torch.device
    enabled: bool = True
    """Whether anything is captured."""
    bytes: int = 0
    """Memory allocated by captures."""
    refused: set[str] = field(default_factory=set)
    """Kinds of functions whose capture failed."""
    _replays: dict[tuple[object, ...], Function] = field(default_factory=dict)
    _pool: Any = None
    _warm_up_stream: Any = None
    """Stream for warm-up runs before captures; a single one, because torch caches freed memory per stream."""

    def __len__(self) -> int:
        return len(self._replays)

    def without_graphs(self) -> "GraphCapture":
        """A copy without captured graphs."""
        return replace(self, bytes=0, refused=set(), _replays={}, _pool=None)

    def get(
        self, kind: str, bucket: tuple[object, ...], function: Function, before: Callable[[], object]
    ) -> Function | None:
        """Return the replay of a bucket's graph; if there is none, call `before` and capture it. None on failure."""
        if not self.enabled or kind in self.refused:
            return None
        replay = self._replays.get((kind, *bucket))
        if replay is None:
            before()
            try:
                replay = self._capture(function)
            except Exception as error:  # decoding continues uncaptured, whatever failed
                self.refused.add(kind)
                reason = " ".join(str(error).split())[:300]
                logger.warning(
                    f"{kind} of shape {bucket} cannot be captured as a CUDA graph and runs eagerly: {reason}"
                )
                return None
            self._replays[kind, *bucket] = replay
        return replay

    def _capture(self, function: Function) -> Function:
        before = torch.cuda.memory_reserved(self.device)
        # Run once without capturing: kernels are compiled and libraries allocate memory on first use.
        if self._warm_up_stream is None:
            self._warm_up_stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._warm_up_stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._warm_up_stream):
            function()
        torch.cuda.current_stream(self.device).wait_stream(self._warm_up_stream)
        graph = torch.cuda.CUDAGraph()
        with _no_collection(), torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = function()
        graph.replay()  # the first replay uploads the graph, which takes milliseconds
        self._pool = self._pool or graph.pool()
        self.bytes += max(0, torch.cuda.memory_reserved(self.device) - before)

        def replay() -> Tensor:
            graph.replay()
            return output

        return replay


@contextmanager
def _no_collection() -> Iterator[None]:
    """Pause garbage collection: freeing graphs or pinned memory of a deleted engine during a capture would break the
    capture and every later use of pinned memory."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
