"""Input and output of the controller. No torch."""

from dataclasses import dataclass, field
from typing import Literal

from eyas.plan.shapes import Shape


# Not frozen and compared by identity, because a drafting step creates hundreds of these.
@dataclass(eq=False, slots=True)
class RowFacts:
    """Input of the controller for one decoding request."""

    key: int
    context: int
    """Tokens that its newest token attends to."""
    mode: Literal["auto", "off", "fixed"] = "auto"
    depth: int | None = None
    """Requested depth, for `fixed`; at most the controller's `max_depth`."""
    pending: int = 1
    """Tokens that the drafter has not read."""


Kind = Literal["plain", "draft", "look", "probe"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Purpose:
    """Why a depth was chosen; comes back to the controller with the step's report."""

    kind: Kind
    at: int
    """Number of the step for which it was first chosen."""
    auto: int
    """Number of requests on auto."""
    fixed: bool = False
    """Whether some requests have a fixed depth."""
    backlog: bool = False
    """Whether the drafter must read more than usual first."""
    rate: float = 0.0
    """Expected tokens per second."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Draft depth of each request, and why."""

    depths: tuple[int, ...]
    shape: Shape
    """Shape of the drafts of requests on auto; the others draft chains."""
    reason: str
    holds: int = 1
    """Steps for which the choice holds, this one included, while the batch is similar."""
    rests: bool = False
    """Whether the drafter has collapsed and should stop following requests on auto."""
    purpose: Purpose | None = field(default=None, repr=False, compare=False)

    @property
    def depth(self) -> int:
        return max(self.depths, default=0)

    @property
    def uniform(self) -> bool:
        """Whether all requests draft equally deep, so that the step's time counts for that depth."""
        return len(set(self.depths)) == 1
