"""Estimates how likely drafts are accepted, from the rounds that ran. No torch.

a(j) is the probability that the draft at depth j is accepted given that all before it were. S(j) = a(1) ... a(j) is the
probability that it is accepted at all. A round of depth k yields 1 + S(1) + ... + S(k) tokens in expectation.

    prior    the drafter's recorded acceptance, or a guess. It weighs as much as a few rounds and fades like them. A
             depth that was never tried is assumed to be a little worse than the one before it
    fading   older rounds weigh less
    change   if the latest rounds contradict the estimate, earlier ones are nearly forgotten: text or drafter changed
    extra    drafts that trees of a shape had accepted beyond their chain of first candidates
"""

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from math import sqrt

from eyas.engine.speculation.step_report import RoundOutcome
from eyas.plan.shapes import Shape

GUESS = 0.65
"""Assumed acceptance of an unknown drafter at depth 1."""
DOUBT = 2.0
"""Weight of a prior in rounds, and of the past after a change or a long rest."""
DECLINE = 0.95
"""Acceptance of an untried depth relative to the depth before it."""
MEMORY = 1000
"""Rounds after which a round's weight is 1/e; also steps after which times of drafting steps are dropped."""
RECENT = 24
"""Rounds compared with the estimate."""
SURPRISE = 4.0
"""Deviation in standard errors that counts as a change."""
TREE_EXTRA, TREE_DOUBT = 0.2, 2.5
"""Assumed extra drafts of an untried tree shape, and the weight of this guess in rounds."""


class Acceptance:
    """Acceptance estimates for one drafter."""

    def __init__(self, max_depth: int, recorded: Sequence[float] = ()) -> None:
        """`recorded` are known values of a(1), a(2), ... for this drafter."""
        self.max_depth = max_depth
        self.rounds = 0
        self.surprises = 0
        """Number of changes detected."""
        self.collapsed = False
        """Whether recent rounds accepted almost no first draft."""
        self._hits, self._tries = [0.0] * max_depth, [0.0] * max_depth
        self._recorded = list(recorded)
        reached = DOUBT
        for index, chance in enumerate((list(recorded) or [GUESS])[:max_depth]):
            self._hits[index], self._tries[index] = reached * chance, reached
            reached *= chance  # only these rounds reach the next depth
        self._proven = 0
        """First drafts accepted since `doubt` was last called."""
        self._latest: deque[bool] = deque(maxlen=RECENT)
        """Whether the first drafts of recent rounds were accepted."""
        self._extras: dict[Shape, tuple[float, float]] = {}
        """Per tree shape: drafts accepted beyond first candidates, and number of trees, both fading."""
        self._survivals: list[float] = []
        self._events: list[str] = []

    @property
    def proven(self) -> bool:
        """Whether enough drafts were accepted to rule out a useless drafter."""
        return self._proven >= DOUBT

    @property
    def by_depth(self) -> list[float]:
        """[a(1), a(2), ...]"""
        chances = [self._hits[0] / self._tries[0]]  # not 0: the prior counts as tries
        for depth in range(1, self.max_depth):
            belief = self._recorded[depth] if depth < len(self._recorded) else DECLINE * chances[-1]
            chances.append((self._hits[depth] + belief) / (self._tries[depth] + 1))
        return chances

    @property
    def survivals(self) -> Sequence[float]:
        """[S(1), S(2), ...]"""
        if not self._survivals:
            survival = 1.0
            for chance in self.by_depth:
                survival *= chance
                self._survivals.append(survival)
        return self._survivals

    def gain(self, arm: int | Shape) -> float:
        """Expected number of accepted drafts in a round."""
        if isinstance(arm, int):
            return sum(self.survivals[:arm])
        extra, trees = self._extras.get(arm, (0.0, 0.0))
        return sum(self.survivals[: arm.depth]) + (extra + TREE_DOUBT * TREE_EXTRA) / (trees + TREE_DOUBT)

    def observe(self, fates: Sequence[tuple[int, int]]) -> None:
        """Count chains, given as (drafted, accepted). Drafts behind a rejected one say nothing."""
        for (drafted, accepted), times in Counter(fates).items():
            self._count(range(min(accepted, drafted)), drafted > accepted, times)
        self._compare([accepted > 0 for drafted, accepted in fates if drafted])

    def observe_trees(self, shape: Shape, outcomes: Iterable[RoundOutcome]) -> None:
        """Count trees of a shape. The ranks show how far the chain of first candidates went."""
        for outcome in outcomes:
            firsts = next((at for at, rank in enumerate(outcome.ranks) if rank != 1), len(outcome.ranks))
            extra, trees = self._extras.get(shape, (0.0, 0.0))
            kept = 1 - 1 / MEMORY
            self._extras[shape] = kept * extra + outcome.accepted - firsts, kept * trees + 1
            self._count(range(firsts), firsts < len(outcome.ranks), 1)
            self._compare([firsts > 0])

    def doubt(self) -> None:
        """Reduce the weight of the past."""
        self._recorded = []
        self._proven = 0
        if self._tries[0] > DOUBT:
            part = DOUBT / self._tries[0]
            self._hits = [part * hits for hits in self._hits]
            self._tries = [part * tries for tries in self._tries]
            self._survivals = []

    def take_events(self) -> list[str]:
        """Return messages for the operator and clear them."""
        events, self._events = self._events, []
        return events

    def _count(self, hits: range, missed: bool, times: int) -> None:
        """Count `times` equal rounds, each after fading the earlier ones."""
        kept = (1 - 1 / MEMORY) ** times
        new = (1 - kept) * MEMORY
        for index in range(min(len(hits) + missed, self.max_depth)):
            self._tries[index] = kept * self._tries[index] + new
            self._hits[index] = kept * self._hits[index] + new * (index < len(hits))
        self._proven += times * (len(hits) > 0)
        self._survivals = []

    def _compare(self, accepted: Sequence[bool]) -> None:
        """Compare the latest rounds with the estimate."""
        self.rounds += len(accepted)
        self._latest.extend(accepted[:: -(-len(accepted) // RECENT)] if accepted else ())
        count = len(self._latest)
        if count < RECENT or not accepted:
            return
        share, chance = sum(self._latest) / count, self.by_depth[0]
        spread = min(max(chance, 1 / count), 1 - 1 / count)
        if abs(share - chance) > SURPRISE * sqrt(spread * (1 - spread) / count):
            self.surprises += 1
            proven = self._proven if share > chance else 0
            self.doubt()
            self._proven = proven
            self._hits[0] = share * self._tries[0]
            self._latest.clear()
            self._survivals = []
        self._watch(share)

    def _watch(self, share: float) -> None:
        """Report when the drafter collapses and when it recovers."""
        said = f"the drafter's first token was accepted in {share:.0%} of the last {RECENT} rounds"
        if not self.collapsed and max(share, self.by_depth[0]) * RECENT <= 1:
            self.collapsed = True
            self._events.append(
                f"{said}; requests on auto decode plainly except for probes. Check that the drafter belongs to this "
                "target (`eyas check`), and whether prompts or template differ from what it was trained on"
            )
        elif self.collapsed and self.proven:
            self.collapsed = False
            self._events.append(f"{said}; the drafter is back, and so is speculation wherever it pays")
