"""What a step tells the controller when it is over, and what a rehearsal tells it before the first. No torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from eyas.engine.speculation.choice import Choice
from eyas.engine.speculation.draft import Candidates
from eyas.engine.speculation.suffix_acceptance import RoundOffer
from eyas.plan.shapes import Shape

Arm = int | Shape
"""A way to run a step: the depth of its chains, 0 for plain decoding, the shape of its trees, or of suffix drafts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundOutcome:
    """The fate of one request's drafts."""

    key: int
    drafted: int
    accepted: int
    ranks: Sequence[int] = ()
    """Of a tree: for every accepted depth and the one after it, which candidate of the drafter (1, 2, ...) was the
    target's token, 0 if none. Ranks alone tell how first candidates fared."""


def outcome_of_tree(
    key: int, drafted: int, accepted: int, tokens: Sequence[int], candidates: Sequence[Candidates]
) -> RoundOutcome:
    """The fate of a tree, so deep, with the drafter's candidates behind the accepted tokens."""
    seen = list(zip(tokens, candidates, strict=False))
    ranks = [some.tokens.index(token) + 1 if token in some.tokens else 0 for token, some in seen]
    return RoundOutcome(key=key, drafted=drafted, accepted=accepted, ranks=ranks)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rehearsal:
    """Seconds of steps that ran for nobody, before any request."""

    steps: Mapping[tuple[int, Arm], float]
    """Of a whole step, by rows and what was drafted; a GPU's passes are timed one behind the other."""


@dataclass(kw_only=True, slots=True)
class StepReport:
    """Everything that one step tells. Reports come in the order of the steps."""

    choice: Choice | None = None
    """What it followed; None where nothing decoded."""
    requests: int = 0
    """Requests that decoded."""
    seconds: float | None = None
    """Of the whole step, if it only decoded. Where steps overlap, from one landing to the next."""
    thinking: float = 0.0
    """Of these, what the controller took."""
    catching_up: float = 0.0
    """Of these, what the drafter took to read what had waited while nothing was drafted."""
    rounds: list[RoundOutcome] = field(default_factory=list)
    """Of requests that were drafted for."""
    chains: Sequence[tuple[int, int]] = ()
    """Instead of `rounds`, drafted and accepted of each chain."""
    draft_seconds: float = 0.0
    """Of the drafter's passes that drafted."""
    depth: int = 0
    """Drafts of a row in the pass of those that decoded."""
    suffix_drafted: int = 0
    """Suffix drafts that were verified."""
    offers: Mapping[int, RoundOffer] = field(default_factory=dict)
    """Drafts that were looked up, by request."""
    ended: list[int] = field(default_factory=list)
    """Requests that ended with it."""

    @property
    def accepted(self) -> int:
        """Drafts of all requests together."""
        return sum(accepted for _, accepted in self.chains) + sum(outcome.accepted for outcome in self.rounds)

    @property
    def fates(self) -> Sequence[tuple[int, int]]:
        """Drafted and accepted, of every request that drafted a chain."""
        return self.chains or [(outcome.drafted, outcome.accepted) for outcome in self.rounds if not outcome.ranks]
