"""Drafters that come with eyas, by name.

They are ordinary checkpoints in the package; whatever takes a drafter's folder takes one of these names as well.
"""

from importlib.resources import files
from pathlib import Path

SHIPPED = {"smollm2-eagle3.1": "smollm2-eagle31"}
"""Names and their folders in eyas/drafters."""

DEFAULT_DRAFTER = {"smollm2": "smollm2-eagle3.1"}
"""Which of them drafts for a target when nothing else is said."""

NO_DRAFTER = "none"
"""What users say to decode plainly where a drafter would be chosen for them."""


def choose_drafter(drafter: str | None, target: str) -> str | None:
    """The drafter that was named; if none was, the one that comes with eyas for that target."""
    if drafter is None:
        return DEFAULT_DRAFTER.get(target)
    return None if drafter == NO_DRAFTER else drafter


def shipped_folder(name: str) -> Path | None:
    """Where the drafter of that name lies, if it is one of ours."""
    if name not in SHIPPED:
        return None
    return Path(str(files("eyas"))) / "drafters" / SHIPPED[name]
