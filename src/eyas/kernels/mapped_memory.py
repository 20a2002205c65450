"""Memory straight from the system: zeros, of which only what is written takes any."""

import mmap
from contextlib import suppress


def mapped_memory(size: int, *, huge_pages: bool) -> mmap.mmap:
    """So many bytes, with the system told whether pages of megabytes are wanted for them, where it has any."""
    memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    advice = getattr(mmap, "MADV_HUGEPAGE" if huge_pages else "MADV_NOHUGEPAGE", None)
    if advice is not None:
        with suppress(OSError):  # a kernel without huge pages does not know the word
            memory.madvise(advice)
    return memory
