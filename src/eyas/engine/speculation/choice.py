"""How deep to draft in one step, and what is kept of the step until it has been observed. No torch.

A device may be a step ahead of the host: the next choice is then made before this step's numbers have arrived. So a
choice carries all that its own observation needs, and any number of them may be under way.
"""

from dataclasses import dataclass, field

from eyas.engine.speculation.planner import Situation
from eyas.engine.speculation.trial import DraftTrial
from eyas.plan.shapes import Plan, Shape


@dataclass(kw_only=True)
class StepUnderWay:
    """A step that was chosen for and has not been observed."""

    situation: Situation
    limits: dict[int, int] = field(default_factory=dict)
    bound: frozenset[int] = frozenset()
    """Requests that draft to their limit, come what may."""
    plan: Plan | None = None
    """What it follows, if it speculates."""
    rate: float = 0.0
    """Tokens per second it is planned to give."""
    once: bool = False
    """Whether it is plain for its time's sake alone: speculation pays, and the next may draft again."""
    probe: bool = False
    trial: DraftTrial | None = None
    """What it is a part of, if it drafts although that does not seem to pay."""
    plain: float = 0.0
    """Seconds that it would have taken without drafts, if it is a probe or was observed."""
    saved: float = 0.0
    """Seconds that its drafts have saved, once it was observed; a loss is negative."""
    with_probe: float = 0.0
    """Seconds it is expected to take with them."""
    made: dict[int, int] = field(default_factory=dict)
    """Drafts of each request so far."""
    survival: dict[int, float] = field(default_factory=dict)
    """The chance that all of them are accepted."""
    withheld: dict[int, tuple[int, float]] = field(default_factory=dict)
    """Where drafts were made and not all verified: how many were, and the chance of the next."""
    rounds: int = 0
    accepted: int = 0
    expected: float = 0.0
    """Seconds that the costs say of what ran."""
    seconds: float = 0.0
    timed: bool = False
    """Whether the target's pass is among the seconds."""
    depth: int = 0
    """Of what was drafted; where drafts are not captured, 1 stands for all depths."""
    trees: bool = False
    """Whether these were captured trees."""
    passes: float = 0.0
    """Seconds of its passes alone, once it was observed."""
    whole: float = 0.0
    """Seconds that the costs said of all of it."""
    observed: bool = False
    repeats: int = 0
    """Steps that followed like it, without a choice of their own."""

    def try_again(self, rounds: int, accepted: int, seconds: float) -> None:
        """Such a step came to an end; if this is a trial, it counts."""
        if self.trial is not None and rounds and self.observed:
            self.trial.take((rounds + accepted) / rounds * self.plain - seconds, accepted)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """How deep to draft for each request of a step, and why."""

    depths: tuple[int, ...]
    limits: tuple[int, ...]
    """How deep each may get where `continue_drafting` is asked after every pass; `depths` where nobody looks on the
    way."""
    shape: Shape
    """For requests on auto; the others draft chains."""
    reason: str
    look: int = 1
    """Candidates to note for every draft; 1: the draft alone."""
    budget: int | None = None
    """Drafts of all requests on auto together that are verified, where passes are captured; None: all."""
    holds: int = 1
    """Steps that it is meant for, this one included, as long as it fits those that decode. Of later ones nothing but
    the fate of drafts needs to be told, and what some of them took as a whole."""
    rests: bool = False
    """Whether the drafter has collapsed and need not follow requests on auto any longer."""
    under_way: StepUnderWay | None = field(default=None, repr=False, compare=False)
    """The controller's own notes; they come back to it with the step's report."""
