"""Returns freed memory to the system.

The C library keeps freed memory for later; after loading a model this is as much as a small model takes, and is never
used again.
"""

import ctypes


def give_back() -> None:
    """Trim the heap, where the C library is glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))
