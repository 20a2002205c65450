"""Memory for packed weights, apart from temporary allocations.

An allocator would place lasting matrices between temporaries, and the gaps are seldom returned: a model of 96 MB left
70 MB of holes. Here matrices are packed into regions of their own. A region is freed with its last matrix.
"""

import threading

import torch
from torch import Tensor

from eyas.kernels.mapped_memory import mapped_memory

REGION = 2**25
"""Bytes; a matrix above a quarter of it has a region to itself, so that little stays unused."""
ALIGNMENT = 64
"""A cache line, and the widest vector."""

_lock = threading.Lock()
_region = torch.empty(0, dtype=torch.uint8)
"""The unused rest of the newest region."""


def laid_apart(packed: Tensor) -> Tensor:
    """Copy bytes into such memory."""
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
    memory = mapped_memory(count, huge_pages=True)  # weights are read from end to end all the time
    with torch.inference_mode(False):
        return torch.frombuffer(memory, dtype=torch.uint8)
