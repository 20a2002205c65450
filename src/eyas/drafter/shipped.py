"""Drafters that ship with eyas: ordinary checkpoints, whose names are accepted wherever a drafter's folder is."""

from importlib.resources import files
from pathlib import Path

SHIPPED = {"smollm2-eagle3.1": "smollm2-eagle31"}
"""Name to folder in eyas/drafters."""

DEFAULT_DRAFTER = {"smollm2": "smollm2-eagle3.1"}
"""Target to its default drafter."""

NO_DRAFTER = "none"
"""The name for plain decoding, without the default drafter."""


def choose_drafter(drafter: str | None, target: str) -> str | None:
    """Return the drafter that was named, or else the target's default drafter."""
    if drafter is None:
        return DEFAULT_DRAFTER.get(target)
    return None if drafter == NO_DRAFTER else drafter


def shipped_folder(name: str) -> Path | None:
    """Return the folder of a shipped drafter, or None."""
    if name not in SHIPPED:
        return None
    return Path(str(files("eyas"))) / "drafters" / SHIPPED[name]
