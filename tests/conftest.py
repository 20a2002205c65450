"""Fixtures shared by every room; heavy imports stay inside so that light tests start at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from eyas.target.model import Target


@pytest.fixture(scope="session")
def default_target() -> Target:
    """The embedded default target in float32, obtained once into the user's cache."""
    from eyas.target.locate import DEFAULT_TARGET
    from eyas.target.model import Target

    return Target.load(DEFAULT_TARGET, dtype="float32")
