"""The interface between the engine's step and whatever proposes draft tokens.

    plan      how many drafts each request may have, before the next step is scheduled
    draft     queue the passes that produce a round's drafts
    observe   learn from a committed step

`drafter_proposer.py` runs a drafter model. `suffix/proposer.py` looks drafts up in text, with or without a drafter.
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
    """The drafts of a step."""

    slots: Mapping[int, int] = field(default_factory=dict)
    """The most drafts of each decoding request, by key."""
    tree: Tree | None = None
    """The draft tree of every request; None means chains."""
    drafter_depth: int | None = None
    """Limit of the drafter's own depth; None means the slots decide."""
    choice: Choice | None = None
    """The controller's choice; None if nothing decodes or the drafter was not consulted."""
    offers: Mapping[int, RoundOffer] = field(default_factory=dict)
    """Suffix drafts by request."""


PLAIN = DraftPlan()


class Proposer:
    """Interface of proposers. This base class proposes nothing and serves engines without a drafter."""

    layer_ids: tuple[int, ...] = ()
    """Target layers whose hidden states it reads."""

    @property
    def needs_landing(self) -> bool:
        """Whether all launched steps must be committed before the next is planned. Called once per step."""
        return False

    def admit(self, seq: SequenceState) -> None:
        """Register a new request."""

    def plan(self, decoding: Sequence[SequenceState]) -> DraftPlan:
        """Plan the drafts of these requests in the next step."""
        return PLAIN

    def draft(self, round_: "Round", plan: DraftPlan) -> None:
        """Queue the passes that produce a round's drafts."""

    def observe(self, report: "StepReport") -> None:
        """Learn from a committed step."""

    def forget(self, key: int) -> None:
        """Drop the state of a finished request."""

    def warm_up(self) -> None:
        """Run what is slow the first time."""
