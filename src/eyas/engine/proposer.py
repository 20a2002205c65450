"""Who drafts: the seam between the engine's step and whatever proposes tokens.

    plan      how many drafts each request may have in the next step, before the step is scheduled
    draft     queue what makes them for a round
    observe   learn from a step that was committed

`drafter_proposer.py` drafts by a drafter, `suffix/proposer.py` looks drafts up in the text, beside a drafter or
without one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from eyas.engine.request import SequenceState
from eyas.engine.speculation.choice import Choice
from eyas.engine.speculation.draft import Tree
from eyas.engine.speculation.suffix_acceptance import RoundOffer

if TYPE_CHECKING:
    from eyas.engine.runner.round import Round
    from eyas.engine.speculation.step_report import StepReport


@dataclass(kw_only=True, slots=True)
class DraftPlan:
    """How a step drafts."""

    slots: Mapping[int, int] = field(default_factory=dict)
    """The most drafts of requests that decode, by key."""
    tree: Tree | None = None
    """What every request grows; None: chains."""
    drafter_depth: int | None = None
    """How deep the drafter drafts at most; None: as deep as rows have room."""
    choice: Choice | None = None
    """What the step follows; None: nothing decodes, or no drafter was asked."""
    offers: Mapping[int, RoundOffer] = field(default_factory=dict)
    """Drafts that were looked up, by request."""


PLAIN = DraftPlan()


class Proposer:
    """What the engine's step asks of whoever drafts. This one drafts nothing, for an engine without a drafter."""

    layer_ids: tuple[int, ...] = ()
    """Layers of the target whose states it reads."""

    @property
    def needs_landing(self) -> bool:
        """Whether every launched step must be committed before the next is planned. Asked once a step."""
        return False

    def admit(self, seq: SequenceState) -> None:
        """Take note of a request that came."""

    def plan(self, decoding: Sequence[SequenceState]) -> DraftPlan:
        """How these requests draft in the next step."""
        return PLAIN

    def draft(self, made: "Round", plan: DraftPlan) -> None:
        """Queue what makes the drafts of a round."""

    def observe(self, report: "StepReport") -> None:
        """Learn from a step that was committed."""

    def forget(self, key: int) -> None:
        """Drop what is kept for a request that ended."""

    def warm_up(self) -> None:
        """Do for the first time what takes longer then."""
