"""Host and versions for a bench record, and command lines without secrets."""

import os
import platform
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("eyas", "aiohttp", "prometheus_client", "numpy")
HIDDEN = "***"
_SECRET = re.compile(r"((?:--api-key|\b[A-Z_]*(?:API_KEY|TOKEN))[= ]\s*)[^\s'\"]+")


def host() -> dict[str, Any]:
    """The client's machine and its load."""
    return {
        "platform": platform.platform(),
        "python": platform.python_version(),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": _memory(),
        "load_average": [round(one, 2) for one in os.getloadavg()] if hasattr(os, "getloadavg") else None,
    }


def versions() -> dict[str, str | None]:
    """Versions of the packages that measure."""
    return {name: _version(name) for name in PACKAGES}


def without_secrets(text: str) -> str:
    """A command line with API keys and tokens hidden."""
    return _SECRET.sub(rf"\1{HIDDEN}", text)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("model name", "Model", "Hardware"):
                return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _memory() -> float | None:
    try:
        return round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1)
    except (ValueError, OSError):
        return None
