"""How likely drafts are accepted, learned from the rounds that ran. No torch.

a(j) is the chance that the draft of depth j is accepted when all before it were; S(j) = a(1) ... a(j) is the chance
that it is accepted at all, and a round of depth k gives 1 + S(1) + ... + S(k) tokens in expectation.

    prior    a drafter's recorded acceptance, or a guess. It weighs as much as a few rounds, and fades like them. A
             depth that was never tried is taken for a little worse than the depth before it
    fading   old rounds weigh less than new ones
    change   when the latest rounds contradict the estimate, what lies before them is nearly forgotten: the text or the
             drafter has changed
    extra    drafts that a tree of a shape has accepted beyond its line of first candidates
"""

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from math import sqrt

from eyas.engine.speculation.step_report import RoundOutcome
from eyas.plan.shapes import Shape

GUESS = 0.65
"""Acceptance of first drafts of a drafter of which nothing is known."""
DOUBT = 2.0
"""Rounds that a prior weighs, and what is left of the past after a change or a long rest."""
DECLINE = 0.95
"""A depth that was never tried is expected to have so much of the acceptance before it."""
MEMORY = 1000
"""Rounds after which one has faded to a third, and steps after which times of drafts are dropped."""
RECENT = 24
"""Rounds that are held against the estimate."""
SURPRISE = 4.0
"""Standard errors that they may lie off."""
TREE_EXTRA, TREE_DOUBT = 0.2, 2.5
"""Extra drafts of trees that nobody has grown yet, and rounds that this guess weighs."""


class Acceptance:
    """All estimates for one drafter."""

    def __init__(self, max_depth: int, recorded: Sequence[float] = ()) -> None:
        """`recorded` are a(1), a(2), ... of this drafter from elsewhere, as deep as they are known."""
        self.max_depth = max_depth
        self.rounds = 0
        self.surprises = 0
        """Changes found so far."""
        self.collapsed = False
        """Whether hardly any first draft was accepted of late."""
        self._hits, self._tries = [0.0] * max_depth, [0.0] * max_depth
        self._recorded = list(recorded)
        reached = DOUBT
        for index, chance in enumerate((list(recorded) or [GUESS])[:max_depth]):
            self._hits[index], self._tries[index] = reached * chance, reached
            reached *= chance  # of so many rounds, few get deep
        self._proven = 0
        """First drafts accepted since there was doubt."""
        self._latest: deque[bool] = deque(maxlen=RECENT)
        """Whether first drafts were accepted."""
        self._extras: dict[Shape, tuple[float, float]] = {}
        """Drafts beyond first candidates that trees had accepted, and how many trees there were."""
        self._survivals: list[float] = []
        self._events: list[str] = []

    @property
    def proven(self) -> bool:
        """Whether as many drafts were accepted as a prior weighs: no useless drafter comes so far."""
        return self._proven >= DOUBT

    @property
    def by_depth(self) -> list[float]:
        """a(1), a(2), ..."""
        chances = [self._hits[0] / self._tries[0]]  # a prior was counted as rounds, so there are some
        for depth in range(1, self.max_depth):
            belief = self._recorded[depth] if depth < len(self._recorded) else DECLINE * chances[-1]
            chances.append((self._hits[depth] + belief) / (self._tries[depth] + 1))
        return chances

    @property
    def survivals(self) -> Sequence[float]:
        """S(1), S(2), ..."""
        if not self._survivals:
            survival = 1.0
            for chance in self.by_depth:
                survival *= chance
                self._survivals.append(survival)
        return self._survivals

    def gain(self, arm: int | Shape) -> float:
        """Drafts that a round is expected to have accepted."""
        if isinstance(arm, int):
            return sum(self.survivals[:arm])
        extra, trees = self._extras.get(arm, (0.0, 0.0))
        return sum(self.survivals[: arm.depth]) + (extra + TREE_DOUBT * TREE_EXTRA) / (trees + TREE_DOUBT)

    def observe(self, fates: Sequence[tuple[int, int]]) -> None:
        """Take chains: how many drafts each had, and how many were accepted. Behind a refused one nothing is known."""
        for (drafted, accepted), times in Counter(fates).items():
            self._count(range(min(accepted, drafted)), drafted > accepted, times)
        self._compare([accepted > 0 for drafted, accepted in fates if drafted])

    def observe_trees(self, shape: Shape, outcomes: Iterable[RoundOutcome]) -> None:
        """Take trees of a shape. How far first candidates went, their ranks tell."""
        for outcome in outcomes:
            firsts = next((at for at, rank in enumerate(outcome.ranks) if rank != 1), len(outcome.ranks))
            extra, trees = self._extras.get(shape, (0.0, 0.0))
            kept = 1 - 1 / MEMORY
            self._extras[shape] = kept * extra + outcome.accepted - firsts, kept * trees + 1
            self._count(range(firsts), firsts < len(outcome.ranks), 1)
            self._compare([firsts > 0])

    def doubt(self) -> None:
        """Believe less in what was counted so far: it was long ago."""
        self._recorded = []
        self._proven = 0
        if self._tries[0] > DOUBT:
            part = DOUBT / self._tries[0]
            self._hits = [part * hits for hits in self._hits]
            self._tries = [part * tries for tries in self._tries]
            self._survivals = []

    def take_events(self) -> list[str]:
        """What an operator should know and has not been told."""
        events, self._events = self._events, []
        return events

    def _count(self, hits: range, missed: bool, times: int) -> None:
        """Count rounds alike, of which each adds one try to what is left of those before it."""
        kept = (1 - 1 / MEMORY) ** times
        new = (1 - kept) * MEMORY
        for index in range(min(len(hits) + missed, self.max_depth)):
            self._tries[index] = kept * self._tries[index] + new
            self._hits[index] = kept * self._hits[index] + new * (index < len(hits))
        self._proven += times * (len(hits) > 0)
        self._survivals = []

    def _compare(self, accepted: Sequence[bool]) -> None:
        """Hold the latest rounds against the estimate."""
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
        """Say once that the drafter has collapsed, and once that it is back."""
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
