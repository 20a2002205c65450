# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Kernels that are launched before the kernel in front of them has ended (programmatic dependent launch).

That hides most of a launch. The law: nothing that another kernel writes is read, and nothing is written, before
`begin_dependent`. Behind it, all kernels in front have ended, as each of them has waited for those in front of it.

The programs of the next kernel come when those of this one have ended or, with EARLY, when all of them have begun: then
they can load what depends on nothing. That is for small kernels. Programs that come early go where there is room, and
in front of a large product, whose time is that of the processor with most of them, that costs more than it saves.

Between two large products stand small kernels, of a program or few, and memory would be idle while they run. So they
are launched EARLY where rows are few, and the programs behind them have their first weights brought to the second cache
meanwhile (`ask_ahead`): nobody writes weights.

A kernel with this law has the constexprs DEPENDENT and EARLY and is launched with `**dependent_launch(device)`.
"""

from functools import cache
from typing import Any

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]


@triton.jit
def begin_dependent(DEPENDENT: tl.constexpr, EARLY: tl.constexpr):
    """Wait for the kernel in front; let the programs of the one behind come."""
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
    if DEPENDENT and EARLY:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def ask_ahead(first, ASK: tl.constexpr):
    """Have what lies behind addresses brought to the second cache, as `ask_assembly` says; nothing waits for it."""
    if ASK is not None:
        tl.inline_asm_elementwise(ASK, "=r,l", [first.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1)


def ask_assembly(device: torch.device, count: int) -> str | None:
    """How so many bytes are asked for, a multiple of 16; None if there are none, or the GPU cannot do it."""
    if count <= 0 or not launches_dependently(device):
        return None
    assert count % 16 == 0
    return f"cp.async.bulk.prefetch.L2.global [$1], {count}; mov.u32 $0, 0;"


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
