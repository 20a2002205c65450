"""Zeroed memory mapped from the system, which takes up only the pages that are written."""

import mmap
from contextlib import suppress
from math import prod

import torch
from torch import Tensor


def mapped_memory(size: int, *, huge_pages: bool) -> mmap.mmap:
    """Map `size` bytes, with or without huge pages where the system has them."""
    memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    advice = getattr(mmap, "MADV_HUGEPAGE" if huge_pages else "MADV_NOHUGEPAGE", None)
    if advice is not None:
        with suppress(OSError):  # a kernel without huge pages does not know the advice
            memory.madvise(advice)
    return memory


def untouched_zeros(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros. On a CPU only written pages take memory; torch would touch all of them at once."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    with torch.inference_mode(False):  # otherwise they would be writable in inference mode only
        return torch.frombuffer(mapped_memory(prod(shape) * dtype.itemsize, huge_pages=False), dtype=dtype).view(shape)
