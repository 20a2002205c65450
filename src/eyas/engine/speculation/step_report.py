"""What a step tells the controller: the time of its parts and the fate of its drafts, all at once, when it is over.

The engine fills in a report while it steps. A part that is None was not timed: prompts were among what was read, or the
step was like one that was timed before.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from eyas.engine.speculation.choice import Choice


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftTiming:
    """What drafting took in a step."""

    passes: int
    """Of the drafter."""
    tokens: int
    """Of all of them together."""
    seconds: float
    first: tuple[int, float] | None = None
    """Tokens of the first pass and its seconds; without, all passes are taken for alike."""
    trees: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetTiming:
    """What a target pass took, until its tokens were known."""

    tokens: int
    context: int
    """Tokens that its rows attend to."""
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class CatchUpTiming:
    """What the drafter took to read what had waited while nothing was drafted.

    It is time of this step, and a probe is charged for it. But it is no price of drafts: those that follow do not pay
    it again, and the longer nothing is drafted the surer the next one would.
    """

    requests: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundOutcome:
    """The fate of a request's drafts."""

    key: int
    drafted: int
    accepted: int
    confidences: Sequence[float] = ()
    """How sure the drafter was of its first candidates."""
    ranks: Sequence[int] = ()
    """For every accepted depth and the one after it which candidate of the drafter (1, 2, ...) was the target's token,
    0 if none of those looked at. In a tree, where second candidates are accepted too, ranks alone tell how the first
    ones fared."""
    candidates: Sequence[Sequence[float]] = ()
    """How sure the drafter was of each of these."""


@dataclass(kw_only=True, slots=True)
class StepReport:
    """Everything that one step tells."""

    choice: "Choice | None" = None
    """What it followed, if it was chosen for; None where it only read prompts, or was like the step before it."""
    catch_up: CatchUpTiming | None = None
    draft: DraftTiming | None = None
    target: TargetTiming | None = None
    rounds: list[RoundOutcome] = field(default_factory=list)
    seconds: float | None = None
    """Of the whole step, if it only decoded: beside its passes the host has work of its own. Where steps overlap, from
    one collected step to the next."""
    ended: list[int] = field(default_factory=list)
    """Requests that ended with it."""
