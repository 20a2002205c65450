"""What is observed of a step: the time of its parts, and the fate of its drafts. No torch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from eyas.plan.shapes import CHAIN, Shape


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
    rows: int | None = None
    """Where a draft is captured: its rows, padding included. Then all passes are timed together."""
    shape: Shape = CHAIN
    """Then of its trees."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetTiming:
    """What a target pass took, until its tokens were known."""

    tokens: int
    """Where it is captured, padding included."""
    context: int
    """Tokens that its rows attend to."""
    seconds: float
    rows: int | None = None
    """Where it is captured, padding included."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CatchUpTiming:
    """What the drafter took to read what had waited while nothing was drafted.

    It is time of this step, and a probe is charged for it. But it is no price of drafts: those that follow do not pay
    it again, and the longer nothing is drafted the surer the next one would.
    """

    requests: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Rehearsal:
    """Seconds of captured passes that ran for nobody, before any request: by their tokens or rows, padding included."""

    verify: Mapping[int, float]
    """The target's passes of several rows and the sampler behind them, by tokens."""
    draft: Mapping[int, Mapping[int, float]]
    """The drafter's, by depth and rows."""
    catch_up: Mapping[int, float]
    """What it reads after a rest, by rows."""
    trees: Mapping[Shape, Mapping[int, float]] = field(default_factory=dict)
    """The drafter's growing of trees, by shape and rows."""
    verify_alone: Mapping[int, float] = field(default_factory=dict)
    """The target's passes of one row, by tokens."""


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


@dataclass(frozen=True, kw_only=True, slots=True)
class ChainOutcomes:
    """The fate of all chains of a step, by columns: of hundreds of rounds, only those that somebody asks for are put
    together.
    """

    keys: Sequence[int]
    drafted: Sequence[int]
    accepted: Sequence[int]
    confidences: Callable[[int], Sequence[float]]
    """How sure the drafter was of the drafts of a round, by its number."""

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, number: int) -> RoundOutcome:
        return RoundOutcome(
            key=self.keys[number],
            drafted=self.drafted[number],
            accepted=self.accepted[number],
            confidences=self.confidences(number),
        )
