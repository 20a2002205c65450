"""Memory for packed weights, apart from everything that comes and goes while they are made.

An allocator would lay a matrix that stays between temporaries that go, and what lies between two that stay is seldom
given back: a model of 96 MB left 70 MB of holes. Here matrices lie one behind the other in regions of their own. A
region is freed when its last matrix is.
"""

import threading

import torch
from torch import Tensor

from eyas.kernels.mapped_memory import mapped_memory

REGION = 2**25
"""Bytes; a matrix of more than a quarter of it has a region to itself, so that little stays unused."""
ALIGNMENT = 64
"""A cache line, and the widest vector."""

_lock = threading.Lock()
_region = torch.empty(0, dtype=torch.uint8)
"""What is left of the newest."""


def laid_apart(packed: Tensor) -> Tensor:
    """The same bytes in such memory."""
    kept = _take(packed.nbytes).view(packed.shape)
    return kept.copy_(packed)


def _take(count: int) -> Tensor:
    global _region
    if count > REGION // 4:
        return _map(count)[:count]
    with _lock:
        if count > len(_region):
            _region = _map(REGION)
        taken, _region = _region[:count], _region[-(-count // ALIGNMENT) * ALIGNMENT :]
    return taken


def _map(count: int) -> Tensor:
    memory = mapped_memory(count, huge_pages=True)  # weights are read from end to end, all the time
    with torch.inference_mode(False):
        return torch.frombuffer(memory, dtype=torch.uint8)
