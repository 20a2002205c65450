"""How much memory is free where the caches will lie."""

import os
from pathlib import Path

import torch


def free_bytes(device: torch.device) -> int:
    """Memory that is free where the caches will lie."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    available = [line.split()[1] for line in _meminfo() if line.startswith("MemAvailable:")]
    if available:
        return int(available[0]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _meminfo() -> list[str]:
    """Linux counts what it could drop as available; other systems have no such file."""
    try:
        return Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return []
