"""Memory straight from the system: zeros, of which only what is written takes any."""

import mmap
from contextlib import suppress
from math import prod

import torch
from torch import Tensor


def mapped_memory(size: int, *, huge_pages: bool) -> mmap.mmap:
    """So many bytes, with the system told whether pages of megabytes are wanted for them, where it has any."""
    memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    advice = getattr(mmap, "MADV_HUGEPAGE" if huge_pages else "MADV_NOHUGEPAGE", None)
    if advice is not None:
        with suppress(OSError):  # a kernel without huge pages does not know the word
            memory.madvise(advice)
    return memory


def untouched_zeros(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros. On a CPU they take memory where they are written alone; torch would touch all of them now."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    with torch.inference_mode(False):  # else they could be written in inference mode only
        return torch.frombuffer(mapped_memory(prod(shape) * dtype.itemsize, huge_pages=False), dtype=dtype).view(shape)
