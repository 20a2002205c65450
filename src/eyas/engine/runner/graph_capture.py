"""CUDA graphs: captured once for each bucket of shapes, replayed with other numbers.

A graph reads its numbers where they lay when it was captured, so these never move: they are in the state, or in
`InputBuffers`. All graphs share one pool of memory: what a replay leaves there holds until the next.
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
"""Tables on the device."""
Function = Callable[[], Tensor]


class InputBuffers:
    """The numbers of a step in named tables side by side, so that one copy brings all of them to the device.

    Every number is an int64. What was written is staged in pinned memory, which a copy reads without waiting.
    """

    def __init__(self, sizes: Mapping[str, int], device: torch.device) -> None:
        total = sum(sizes.values())
        self._from = torch.zeros(total, dtype=torch.int64)
        self._to = torch.zeros(total, dtype=torch.int64, device=device)
        numbers: NDArray[np.int64] = self._from.numpy()
        self._host: dict[str, NDArray[np.int64]] = {}
        self.device: dict[str, Tensor] = {}
        """What was sent last."""
        end = 0
        for name, size in sizes.items():
            start, end = end, end + size
            self._host[name], self.device[name] = numbers[start:end], self._to[start:end]

    def staged(self, **numbers: Sequence[int]) -> Callable[[], None]:
        """Tables with these at their beginnings and 0 behind, to be brought to the device by calling this; others may
        be staged at once.
        """
        for name, told in numbers.items():
            table = self._host[name]
            table[: len(told)], table[len(told) :] = told, 0
        kept = self._from.clone()
        if self._to.is_cuda:
            kept = kept.pin_memory()

        def bring() -> None:
            self._to.copy_(kept, non_blocking=True)

        return bring


@dataclass(kw_only=True, eq=False)
class GraphCapture:
    """Captures functions."""

    device: torch.device
    enabled: bool = True
    """Without, nothing is captured."""
    bytes: int = 0
    """Memory taken by capturing."""
    refused: set[str] = field(default_factory=set)
    """Kinds of functions that could not be captured."""
    _made: dict[tuple[object, ...], Function] = field(default_factory=dict)
    _pool: Any = None
    _beside: Any = None
    """Where functions run before they are captured: one stream, since torch keeps freed memory for each apart."""

    def __len__(self) -> int:
        return len(self._made)

    def anew(self) -> "GraphCapture":
        """One that has captured nothing."""
        return replace(self, bytes=0, refused=set(), _made={}, _pool=None)

    def get(
        self, kind: str, bucket: tuple[object, ...], function: Function, before: Callable[[], object]
    ) -> Function | None:
        """What replays the graph of a bucket, made now if it was not yet, with `before` called first; None if that
        fails.
        """
        if not self.enabled or kind in self.refused:
            return None
        made = self._made.get((kind, *bucket))
        if made is None:
            before()
            try:
                made = self._capture(function)
            except Exception as error:  # whatever it is, decoding goes on
                self.refused.add(kind)
                reason = " ".join(str(error).split())[:300]
                logger.warning(
                    f"{kind} of shape {bucket} cannot be captured as a CUDA graph, it runs eagerly: {reason}"
                )
                return None
            self._made[kind, *bucket] = made
        return made

    def _capture(self, function: Function) -> Function:
        before = torch.cuda.memory_reserved(self.device)
        # Once without capturing: kernels are compiled and libraries take their memory on first use.
        if self._beside is None:
            self._beside = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._beside.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._beside):
            function()
        torch.cuda.current_stream(self.device).wait_stream(self._beside)
        graph = torch.cuda.CUDAGraph()
        with _no_collection(), torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = function()
        graph.replay()  # the first time it is brought to the device, which takes milliseconds
        self._pool = self._pool or graph.pool()
        self.bytes += max(0, torch.cuda.memory_reserved(self.device) - before)

        def replay() -> Tensor:
            graph.replay()
            return output

        return replay


@contextmanager
def _no_collection() -> Iterator[None]:
    """Let Python collect no garbage: graphs and pinned memory of an engine that is gone, freed while a stream captures,
    break the capture and every later use of pinned memory."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
