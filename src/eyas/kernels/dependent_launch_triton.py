# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Programmatic dependent launch: kernels start before the kernel ahead of them has ended.

That hides most of a launch. The rule: before `begin_dependent`, read nothing that another kernel writes, and write
nothing. After it, all earlier kernels have ended, as each of them has waited for those ahead of it.

The programs of the next kernel start when those of this one have ended or, with EARLY, when all of them have begun:
then they can load what does not depend on others, or at least are resident. That is for kernels ahead of small ones:
early programs go wherever there is room, and ahead of a large product, whose time is that of the multiprocessor with
most programs, that costs more than it saves, unless every multiprocessor has room for one.

Such a kernel has the constexprs DEPENDENT and EARLY and is launched with `**dependent_launch(device)`.
"""

from functools import cache
from typing import Any

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]

MOST_EARLY = 4
"""Up to this many rows, a kernel with one program per row counts as small."""


@triton.jit
def begin_dependent(DEPENDENT: tl.constexpr, EARLY: tl.constexpr):
    """Wait for the kernel ahead; let the programs of the next one start."""
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
    if DEPENDENT and EARLY:
        tl.extra.cuda.gdc_launch_dependents()


@cache
def launches_dependently(device: torch.device) -> bool:
    """Whether the GPU and this Triton support it."""
    if device.type != "cuda" or torch.version.cuda is None or not hasattr(tl.extra.cuda, "gdc_wait"):
        return False
    return torch.cuda.get_device_capability(device)[0] >= 9


def dependent_launch(device: torch.device, *, early: bool = False) -> dict[str, Any]:
    """Launch arguments; a GPU without support waits between kernels."""
    able = launches_dependently(device)
    return {"DEPENDENT": able, "EARLY": early} | ({"launch_pdl": True} if able else {})
