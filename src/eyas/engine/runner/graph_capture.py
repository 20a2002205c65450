"""CUDA graphs of functions of input buffers: captured once for each bucket of shapes, replayed with other numbers.

All graphs share one pool of memory: what a replay leaves there holds until the next.
"""

import gc
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from eyas.engine.runner.input_buffers import InputBuffers

logger = logging.getLogger(__name__)

Numbers = Mapping[str, Tensor]
"""The tables of `InputBuffers` on the device."""
Function = Callable[[Numbers], Tensor]


@dataclass(frozen=True, kw_only=True)
class CapturedGraph:
    """A function of inputs."""

    inputs: InputBuffers
    run: Callable[[], Tensor]


@dataclass(kw_only=True, eq=False)
class GraphCapture:
    """Runs functions of input buffers, captured if possible."""

    device: torch.device
    enabled: bool = True
    """Without, nothing is captured."""
    bytes: int = 0
    """Memory taken by capturing."""
    refused: set[str] = field(default_factory=set)
    """Kinds of functions that could not be captured."""
    _made: dict[tuple[object, ...], CapturedGraph] = field(default_factory=dict)
    _pool: Any = None
    _beside: Any = None
    """Where functions run before they are captured: one stream, since torch keeps freed memory for each apart."""

    def __len__(self) -> int:
        return len(self._made)

    def anew(self) -> "GraphCapture":
        """One that has captured nothing."""
        return replace(self, bytes=0, refused=set(), _made={}, _pool=None)

    def has(self, kind: str, bucket: tuple[object, ...]) -> bool:
        """Whether a bucket has its graph, so that nothing is run to make it."""
        return (kind, *bucket) in self._made

    def get(
        self,
        kind: str,
        bucket: tuple[object, ...],
        shapes: Callable[[], Mapping[str, tuple[int, ...]]],
        function: Function,
    ) -> CapturedGraph | None:
        """The graph of a bucket, made now if it was not yet; None if that fails.

        Capturing runs the function on zeros.
        """
        if not self.enabled or kind in self.refused:
            return None
        made = self._made.get((kind, *bucket))
        if made is None:
            inputs = InputBuffers(shapes(), self.device)
            try:
                made = self._capture(inputs, function)
            except Exception as error:  # whatever it is, decoding goes on
                self.refused.add(kind)
                reason = " ".join(str(error).split())[:300]
                logger.warning(
                    f"{kind} of shape {bucket} cannot be captured as a CUDA graph, it runs eagerly: {reason}"
                )
                return None
            self._made[kind, *bucket] = made
        return made

    def _capture(self, inputs: InputBuffers, function: Function) -> CapturedGraph:
        before = torch.cuda.memory_reserved(self.device)
        inputs.clear()
        # Once without capturing: kernels are compiled and libraries take their memory on first use.
        if self._beside is None:
            self._beside = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._beside.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._beside):
            function(inputs.device)
        torch.cuda.current_stream(self.device).wait_stream(self._beside)
        graph = torch.cuda.CUDAGraph()
        with _no_collection(), torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = function(inputs.device)
        graph.replay()  # the first time it is brought to the device, which takes milliseconds
        self._pool = self._pool or graph.pool()
        self.bytes += max(0, torch.cuda.memory_reserved(self.device) - before)

        def replay() -> Tensor:
            graph.replay()
            return output

        return CapturedGraph(inputs=inputs, run=replay)


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
