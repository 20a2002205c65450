"""The types that keys and values are kept in: that of the pass, or 8-bit floats.

An 8-bit float (e4m3) has no scale beside it: 1 byte for a number of up to 448, rounded to 4 significant bits down to
2 ** -6 and to multiples of 2 ** -9 below. What is larger is kept as 448. Queries never read the numbers as they were
before: every backend writes first and reads what was written, in prompts as in decoding, so that an answer does not
depend on where a prompt was cut, on what the prefix cache held or on drafts.
"""

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
LARGEST = 448.0


def as_stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Keys or values as a cache of this type keeps them."""
    return x.clamp(-LARGEST, LARGEST).to(FP8) if dtype == FP8 and x.dtype != FP8 else x


def bits(x: Tensor) -> Tensor:
    """The same memory for operations that only move it: torch has few of them for 8-bit floats."""
    return x.view(torch.uint8) if x.dtype == FP8 else x
