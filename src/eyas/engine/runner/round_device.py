"""How passes come to a device: captured as CUDA graphs or run as they are, in flight or waited for."""

from dataclasses import dataclass, replace

import torch

from eyas.engine.runner.device_queue import CUDAStreamQueue, DeviceQueue, ImmediateQueue
from eyas.engine.runner.graph_capture import GraphCapture
from eyas.kernels.attention.choose import has_triton


@dataclass(kw_only=True)
class RoundDevice:
    """A device and how it is used."""

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
    def of(cls, device: torch.device, *, graphs: bool, overlap: bool) -> "RoundDevice":
        """A GPU works while the host plans ahead, if told to; a CPU is the host."""
        on_gpu = device.type == "cuda"
        return cls(
            capture=GraphCapture(device=device, enabled=graphs and on_gpu and has_triton()),
            queue=CUDAStreamQueue() if on_gpu else ImmediateQueue(),
            synchronous=not (on_gpu and overlap),
        )
