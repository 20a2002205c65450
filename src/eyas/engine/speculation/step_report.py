"""What a step tells the controller: the time of its parts and the fate of its drafts, all at once, when it is over.

The engine fills in a report while it steps. A part that is None was not timed: prompts were among what was read, or the
step was like one that was timed before.
"""

from dataclasses import dataclass, field

from eyas.engine.speculation.choice import Choice, StepUnderWay
from eyas.engine.speculation.observations import CatchUpTiming, ChainOutcomes, DraftTiming, RoundOutcome, TargetTiming


@dataclass(frozen=True, slots=True)
class RepeatedStep:
    """What a step took that was like one that was chosen for."""

    step: StepUnderWay
    requests: int
    seconds: float
    thinking: float = 0.0
    """Of these, what the controller took."""


@dataclass(kw_only=True, slots=True)
class StepReport:
    """Everything that one step tells."""

    choice: Choice | None = None
    """What it followed, if it was chosen for; None where it only read prompts, or was like the step before it."""
    catch_up: CatchUpTiming | None = None
    draft: DraftTiming | None = None
    target: TargetTiming | None = None
    rounds: list[RoundOutcome] = field(default_factory=list)
    """Of requests that were drafted for, one by one."""
    chains: ChainOutcomes | None = None
    """The same in one go, where rounds live on the device; `rounds` is empty then."""
    seconds: float | None = None
    """Of the whole step, if it only decoded: beside its passes the host has work of its own. Where steps overlap, from
    one collected step to the next."""
    thinking: float = 0.0
    """Of these, what the controller took: to learn, and to choose for the next."""
    repeated: RepeatedStep | None = None
    """Instead, where it was like the step before it and only decoded."""
    ended: list[int] = field(default_factory=list)
    """Requests that ended with it."""

    @property
    def accepted(self) -> int:
        """Drafts of all requests together."""
        chains = self.chains
        return sum(chains.accepted) if chains is not None else sum(outcome.accepted for outcome in self.rounds)
