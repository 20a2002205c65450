"""How many threads compute on a CPU, and how those of torch wait for each other.

Threads of OpenMP, torch's, wait by spinning. Beside any other busy process they spend most of their time waiting for
one that does not run, and on a quiet machine they gain nothing by it. How they wait is settled when their library is
loaded, so `wait_asleep` loads it before torch does. Kernels of eyas have threads of their own (`kernels/threads.c`).
"""

import ctypes
import logging
import os
import sys
from importlib.util import find_spec
from math import ceil
from pathlib import Path

logger = logging.getLogger(__name__)
WAIT_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""Environment variables that say how threads of OpenMP wait."""
QUOTA_FILES = ("/sys/fs/cgroup/cpu.max", "/sys/fs/cgroup/cpu/cpu.cfs_quota_us")
_settled = False
"""Whether torch's threads wait asleep, or it was said that they do not."""


def wait_asleep() -> None:
    """Let torch's threads sleep while they wait, unless torch is loaded already or the environment says how."""
    global _settled
    if sys.platform != "linux" or "torch" in sys.modules or any(name in os.environ for name in WAIT_VARIABLES):
        return
    found = find_spec("torch")
    if found is None or found.origin is None:
        return
    package = Path(found.origin).parent
    libraries = [*package.glob("lib/libgomp*.so*"), *package.parent.glob("torch.libs/libgomp*.so*")]
    os.environ[WAIT_VARIABLES[0]] = "PASSIVE"
    try:
        for library in libraries[:1]:
            ctypes.CDLL(str(library))
            _settled = True
    except OSError:
        logger.debug("torch's OpenMP library could not be loaded ahead", exc_info=True)
    finally:
        del os.environ[WAIT_VARIABLES[0]]  # processes that are started from here decide for themselves


def use_threads(count: int) -> None:
    """Compute with so many threads, here and in processes that are started from here. Imports torch."""
    import torch

    os.environ["OMP_NUM_THREADS"] = str(count)
    torch.set_num_threads(count)


def limit_threads() -> None:
    """Compute with no more threads than this process may have processors, unless OMP_NUM_THREADS says how many."""
    global _settled
    import torch

    quota = None if "OMP_NUM_THREADS" in os.environ else cpu_quota()
    if quota is not None:
        torch.set_num_threads(max(1, min(torch.get_num_threads(), ceil(quota))))
    if not _settled and sys.platform == "linux" and not any(name in os.environ for name in WAIT_VARIABLES):
        _settled = True
        logger.info("torch's threads spin while they wait; import eyas before torch, or set OMP_WAIT_POLICY=PASSIVE")


def cpu_quota(paths: tuple[str, str] = QUOTA_FILES) -> float | None:
    """Processors that the control group of this process (a container's limit) grants it; None without a limit."""
    try:
        if Path(paths[0]).exists():
            quota, period = Path(paths[0]).read_text().split()
        else:
            quota = Path(paths[1]).read_text()
            period = Path(paths[1]).with_name("cpu.cfs_period_us").read_text()
        return int(quota) / int(period) if int(quota) > 0 else None
    except (OSError, ValueError, ZeroDivisionError):  # no limit is `max`, or there is no such file
        return None
