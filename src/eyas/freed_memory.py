"""Memory that was freed, given back to the system.

The C library keeps what is freed between things that stay, for later. What loading a model leaves so is as much as a
small model takes, and is never asked for again.
"""

import ctypes


def give_back() -> None:
    """Give it back now. glibc can; other C libraries do so by themselves or not at all."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))
