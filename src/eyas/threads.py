"""Number of CPU threads, and the wait policy of torch's OpenMP threads.

OpenMP threads wait by spinning, which is slow beside any other busy process and gains nothing on a quiet machine. The
policy is read when the OpenMP library is loaded, so `wait_asleep` loads it before torch does. Kernels of eyas have
threads of their own (`kernels/threads.c`).
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
QUOTA_FILES = ("/sys/fs/cgroup/cpu.max", "/sys/fs/cgroup/cpu/cpu.cfs_quota_us")
_settled = False
"""Torch's threads sleep while waiting, or the log has a note that they do not."""


def wait_asleep() -> None:
    """Let torch's threads sleep while waiting, unless torch is loaded already or the environment sets a policy."""
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
        del os.environ[WAIT_VARIABLES[0]]  # child processes decide for themselves


def use_threads(count: int) -> None:
    """Set the number of threads for this process and its children. Imports torch."""
    import torch

    os.environ["OMP_NUM_THREADS"] = str(count)
    torch.set_num_threads(count)


def limit_threads() -> None:
    """Use no more threads than the CPU quota of this process allows, unless OMP_NUM_THREADS is set."""
    global _settled
    import torch

    quota = None if "OMP_NUM_THREADS" in os.environ else cpu_quota()
    if quota is not None:
        torch.set_num_threads(max(1, min(torch.get_num_threads(), ceil(quota))))
    if not _settled and sys.platform == "linux" and not any(name in os.environ for name in WAIT_VARIABLES):
        _settled = True
        logger.info("torch's threads spin while they wait; import eyas before torch, or set OMP_WAIT_POLICY=PASSIVE")


def cpu_quota(paths: tuple[str, str] = QUOTA_FILES) -> float | None:
    """CPU quota of this process's control group (the limit of a container), in processors; None without a limit."""
    try:
        if Path(paths[0]).exists():
            quota, period = Path(paths[0]).read_text().split()
        else:
            quota = Path(paths[1]).read_text()
            period = Path(paths[1]).with_name("cpu.cfs_period_us").read_text()
        return int(quota) / int(period) if int(quota) > 0 else None
    except (OSError, ValueError, ZeroDivisionError):  # the quota is `max`, or there is no file
        return None
