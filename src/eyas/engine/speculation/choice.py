"""The question put to the controller, and its answer. No torch."""

from dataclasses import dataclass, field
from typing import Literal

from eyas.plan.shapes import Shape


# Not frozen, and each equal to itself alone: a step that drafts makes one for each of hundreds of requests.
@dataclass(eq=False, slots=True)
class RowFacts:
    """What the choice needs to know about one decoding request."""

    key: int
    context: int
    """Tokens that its newest one attends to."""
    mode: Literal["auto", "off", "fixed"] = "auto"
    depth: int | None = None
    """With `fixed`; at most the controller's `max_depth`."""
    pending: int = 1
    """Tokens that the drafter has not read yet."""


Kind = Literal["plain", "draft", "look", "probe"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Purpose:
    """Why a step runs as it does; the controller's own note, which comes back to it with the step's report."""

    kind: Kind
    at: int
    """Number of the step it was chosen for first."""
    auto: int
    """Requests that leave their depth to the controller."""
    fixed: bool = False
    """Whether some requests have a depth of their own."""
    backlog: bool = False
    """Whether the drafter reads more than usual first."""
    rate: float = 0.0
    """Tokens per second that it is expected to give."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """How deep to draft for each request of a step, and why."""

    depths: tuple[int, ...]
    shape: Shape
    """For requests on auto; the others draft chains."""
    reason: str
    holds: int = 1
    """Steps that it is meant for, this one included, as long as it fits those that decode."""
    rests: bool = False
    """Whether the drafter has collapsed and need not follow requests on auto any longer."""
    purpose: Purpose | None = field(default=None, repr=False, compare=False)

    @property
    def depth(self) -> int:
        """The deepest of all."""
        return max(self.depths, default=0)

    @property
    def uniform(self) -> bool:
        """Whether all requests draft alike, so that the step's time says what this takes."""
        return len(set(self.depths)) == 1
