"""Reports of steps and rehearsals to the controller. No torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from eyas.engine.speculation.choice import Choice
from eyas.engine.speculation.draft import Candidates
from eyas.engine.speculation.suffix_acceptance import RoundOffer
from eyas.plan.shapes import Shape

Arm = int | Shape
"""A way to run a step: chain depth (0 is plain decoding), tree shape, or shape of suffix drafts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundOutcome:
    """Result of one request's drafts."""

    key: int
    drafted: int
    accepted: int
    ranks: Sequence[int] = ()
    """For trees: at each accepted depth and the next one, the rank of the target's token among the drafter's candidates
    (1, 2, ..., or 0 for none)."""


def outcome_of_tree(
    key: int, drafted: int, accepted: int, tokens: Sequence[int], candidates: Sequence[Candidates]
) -> RoundOutcome:
    """Make the outcome of a tree from the tokens that came and the drafter's candidates."""
    seen = list(zip(tokens, candidates, strict=False))
    ranks = [some.tokens.index(token) + 1 if token in some.tokens else 0 for token, some in seen]
    return RoundOutcome(key=key, drafted=drafted, accepted=accepted, ranks=ranks)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rehearsal:
    """Step times measured with dummy requests."""

    steps: Mapping[tuple[int, Arm], float]
    """Seconds of a whole step by rows and arm; on a GPU the sum of its passes."""


@dataclass(kw_only=True, slots=True)
class StepReport:
    """Results of one step. Reports come in the order of the steps."""

    choice: Choice | None = None
    """The choice it followed; None if nothing decoded."""
    requests: int = 0
    seconds: float | None = None
    """Duration of the step, if it only decoded; with overlapping steps, from landing to landing."""
    planning: float = 0.0
    """Part of it that planning took."""
    catching_up: float = 0.0
    """Part of it in which the drafter read states that had waited without drafting."""
    rounds: list[RoundOutcome] = field(default_factory=list)
    """Outcomes of requests with drafts."""
    chains: Sequence[tuple[int, int]] = ()
    """(drafted, accepted) of each chain, instead of `rounds`."""
    draft_seconds: float = 0.0
    """Device seconds of the drafting pass."""
    depth: int = 0
    """Drafts per row in the pass of the decoding requests."""
    suffix_drafted: int = 0
    offers: Mapping[int, RoundOffer] = field(default_factory=dict)
    """Suffix drafts by request."""
    ended: list[int] = field(default_factory=list)

    @property
    def accepted(self) -> int:
        return sum(accepted for _, accepted in self.chains) + sum(outcome.accepted for outcome in self.rounds)

    @property
    def fates(self) -> Sequence[tuple[int, int]]:
        """(drafted, accepted) of every chain."""
        return self.chains or [(outcome.drafted, outcome.accepted) for outcome in self.rounds if not outcome.ranks]
