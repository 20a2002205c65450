"""The dtypes of the KV cache: that of the pass, or fp8.

fp8 (e4m3) is stored without a scale: 4 significant bits for numbers from 2 ** -6 to 448, multiples of 2 ** -9 below;
larger numbers saturate at 448. Every backend writes first and reads what was written, in prompts as in decoding, so
that a result does not depend on chunks of a prompt, on the prefix cache or on drafts.
"""

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
LARGEST = 448.0


def as_stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert keys or values to a cache's dtype."""
    return x.clamp(-LARGEST, LARGEST).to(FP8) if dtype == FP8 and x.dtype != FP8 else x


def bits(x: Tensor) -> Tensor:
    """View fp8 as bytes, for operations that only move it and do not support fp8."""
    return x.view(torch.uint8) if x.dtype == FP8 else x
