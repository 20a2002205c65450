# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Kernels that are launched before the kernel in front of them has ended (programmatic dependent launch).

That hides most of a launch. The law: nothing that another kernel writes is read, and nothing is written, before
`begin_dependent`. Behind it, all kernels in front have ended, as each of them has waited for those in front of it.

The programs of the next kernel come when those of this one have ended or, with EARLY, when all of them have begun: then
they can load what depends on nothing, or at least are there. That is for kernels in front of small ones. Programs that
come early go where there is room, and in front of a large product, whose time is that of the processor with most of
them, that costs more than it saves, unless every processor has room for one.

A kernel with this law has the constexprs DEPENDENT and EARLY and is launched with `**dependent_launch(device)`.
"""

from functools import cache
from typing import Any

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]

MOST_EARLY = 4
"""Rows up to which a kernel of a program for each row is small."""


@triton.jit
def begin_dependent(DEPENDENT: tl.constexpr, EARLY: tl.constexpr):
    """Wait for the kernel in front; let the programs of the one behind come."""
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
    if DEPENDENT and EARLY:
        tl.extra.cuda.gdc_launch_dependents()


@cache
def launches_dependently(device: torch.device) -> bool:
    """Whether the GPU can do that, and this Triton."""
    if device.type != "cuda" or torch.version.cuda is None or not hasattr(tl.extra.cuda, "gdc_wait"):
        return False
    return torch.cuda.get_device_capability(device)[0] >= 9


def dependent_launch(device: torch.device, *, early: bool = False) -> dict[str, Any]:
    """Arguments of a launch; a GPU that cannot do it waits in between."""
    able = launches_dependently(device)
    return {"DEPENDENT": able, "EARLY": early} | ({"launch_pdl": True} if able else {})
