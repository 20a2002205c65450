"""How likely drafts are accepted, learned from the rounds that ran. No torch.

a(j) is the chance that the draft of depth j is accepted when all before it were; S(j) = a(1) ... a(j) is the chance
that it is accepted at all, and the expected tokens of a round of depth k are 1 + S(1) + ... + S(k).

    by depth        for the drafter as a whole. Depth 1 starts from an optimistic guess worth a few rounds, so that a
                    new drafter is tried; a deeper one starts from, and without news returns to, a little less than
                    the depth before it
    by request      one number, how much better or worse the odds are here than for the drafter as a whole, and no
                    difference until the request's own rounds say so
    by confidence   how often drafts were accepted whose probability under the drafter lay in the same tenth. It is
                    known before the target has spoken
    by rank         where among the drafter's candidates the target's token stood, when it was not the first
                    (sibling_acceptance.py)

Old rounds fade. When the latest ones contradict the estimate, what lies before them fades at once: then the text or
the drafter has changed, and the past is no guide.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import exp, log, sqrt

from eyas.engine.speculation.decayed_counts import DecayedCounts
from eyas.engine.speculation.sibling_acceptance import SiblingAcceptance
from eyas.engine.speculation.step_report import RoundOutcome

FIRST_GUESS = 0.6
"""Acceptance of a drafter of which nothing is known."""
GUESS_ROUNDS = 2.0
"""What the guess weighs. A drafter that never hits loses about as many plain steps before it is seen through."""
MEMORY = 400
"""Rounds after which an observation has faded to a third, unless they tell that something has changed."""
PROBE_MEMORY = 12
"""Rounds that all which was known before a probe may weigh: probes are few, and ask how things are now."""
DECLINE = 0.95
"""Acceptance of a depth, as a part of that of the depth before it, as long as nothing else is known."""
REQUEST_MEMORY = 32
"""Rounds of a request after which the same has happened to what they say about it."""
REQUEST_TRIES = 5.0
"""Tries of its own that weigh as much as the belief that a request is like the others."""
RESTING = 0.99
"""How much of a request's own evidence is left after a step in which it did not draft."""
LATEST, NEWEST = 24, 8
"""Rounds whose first drafts tell whether something has changed, and those that are believed if it has."""
LOOK_EVERY = 4
"""Rounds between two looks at them."""
SURPRISE = 4.0
"""Standard errors between the latest rounds and the estimate that are no accident."""
COLLAPSED, RECOVERED = 0.05, 0.25
"""Acceptance of the first draft below which a drafter is reported, and above which it is welcomed back."""
BINS = 10
"""Bins of confidence."""
CALIBRATED_DEPTHS = 3
"""Depths that have a calibration of their own; deeper ones share the last."""
BIN_TRIES = 4.0
"""Drafts of a bin that weigh as much as the drafter's own word."""
LEVEL = 0.25
"""Width of a level: requests whose log odds lie within it are taken for alike."""
MOST_LEVELS = 12
"""Levels above and below the drafter as a whole."""


@dataclass(slots=True)
class Own:
    """What a request's rounds had, and what they would have had from the drafter as a whole."""

    hits: float = 0.0
    expected_hits: float = 0.0
    misses: float = 0.0
    expected_misses: float = 0.0
    level: int = 0
    since: int = 0
    """The step up to which its rest is accounted for."""

    def count(self, tries: int, hits: float, expected: float) -> None:
        """Take tries, some of which hit, where the drafter as a whole was expected to hit so often."""
        self.hits += hits
        self.misses += tries - hits
        self.expected_hits += expected
        self.expected_misses += tries - expected

    def fade(self, keep: float) -> None:
        """Forget a part."""
        self.hits *= keep
        self.expected_hits *= keep
        self.misses *= keep
        self.expected_misses *= keep

    def settle(self) -> None:
        """Set the level: the log of the odds ratio, drawn towards no difference by tries that never were."""
        better = (self.hits + REQUEST_TRIES) / (self.expected_hits + REQUEST_TRIES)
        worse = (self.misses + REQUEST_TRIES) / (self.expected_misses + REQUEST_TRIES)
        self.level = max(-MOST_LEVELS, min(MOST_LEVELS, round(log(better / worse) / LEVEL)))


class Acceptance:
    """All estimates for one drafter."""

    def __init__(self, max_depth: int) -> None:
        self.max_depth = max_depth
        self.rounds = 0
        self._now = 0
        self.latest: deque[float] = deque(maxlen=LATEST)
        """Whether the first draft was accepted, for the latest rounds."""
        self.watch = Watch()
        self._depths = DecayedCounts(max_depth)
        self._depths.add([0], [FIRST_GUESS], GUESS_ROUNDS)
        self._sure = DecayedCounts(CALIBRATED_DEPTHS * BINS)
        self.siblings = SiblingAcceptance()
        self._requests: dict[int, Own] = {}
        self._by_depth: list[float] = []
        self._survivals: dict[int, list[float]] = {}
        self._calibration: list[tuple[float, float]] = []
        """For each bin, the chance as a linear function of confidence: evidence, and belief in the drafter's word."""

    def observe(self, outcome: RoundOutcome, *, withheld: float | None = None) -> None:
        """Take one round.

        Of the drafts after the first refused one nothing is known, and nothing is counted. A draft that was made and
        not verified, being unlikely, had a chance of `withheld`: that much of it counts as accepted, since otherwise
        only the likely drafts would tell how the drafter fares. Ranks know better, also of such a draft.
        """
        drafted, accepted, ranks, confidences = outcome.drafted, outcome.accepted, outcome.ranks, outcome.confidences
        outcomes = [float(rank == 1) for rank in ranks] or [1.0] * accepted + [0.0] * (accepted < drafted)
        if withheld is not None and accepted == drafted and not ranks:
            outcomes.append(withheld)
        del outcomes[self.max_depth :]
        tries = len(outcomes)
        if not tries:
            return
        self._depths.add(range(tries), outcomes)
        self._depths.fade(MEMORY)
        own = self._requests.setdefault(outcome.key, Own())
        own.fade(1 - 1 / REQUEST_MEMORY)
        own.count(tries, sum(outcomes), sum(self.by_depth[:tries]))
        own.since = self._now
        if confidences:
            self._sure.add(map(_bin, range(len(confidences)), confidences), outcomes)
            self._sure.fade(MEMORY)
        self.siblings.observe(ranks, outcome.candidates)
        self.rounds += 1
        self.latest.append(outcomes[0])
        if self.rounds % LOOK_EVERY == 0 and len(self.latest) == LATEST:
            self._mind_change()

    def end_steps(self, steps: int, *, probe: bool) -> None:
        """Requests that do not draft have rested for so many more; after a probe, the past weighs less."""
        self._now += steps
        if probe:
            self._depths.limit(0, PROBE_MEMORY)

    def refresh(self) -> None:
        """Bring the estimates up to date; between two calls they stand still, which keeps rounds cheap to count."""
        self._by_depth, self._survivals, self._calibration = [], {}, []

    @property
    def by_depth(self) -> Sequence[float]:
        """a(1), a(2), ... for the drafter as a whole."""
        if not self._by_depth:
            belief, weight = FIRST_GUESS, 0.0  # the first guess was counted as evidence, so that it can fade
            for index in range(self.max_depth):
                self._by_depth.append(self._depths.rate(index, belief, weight))
                belief, weight = DECLINE * self._by_depth[-1], GUESS_ROUNDS
        return self._by_depth

    def survivals(self, level: int) -> Sequence[float]:
        """S(1), S(2), ... for requests of a level."""
        if level not in self._survivals:
            odds, survival, all_so_far = exp(LEVEL * level), 1.0, []
            for chance in self.by_depth:
                survival *= chance * odds / (1 - chance + chance * odds)
                all_so_far.append(survival)
            self._survivals[level] = all_so_far
        return self._survivals[level]

    def levels(self, keys: Sequence[int]) -> list[int]:
        """How much better or worse than the whole requests fare, as of the last `settle` of each."""
        requests = self._requests
        return [requests[key].level if key in requests else 0 for key in keys]

    def settle(self, key: int) -> int:
        """The level brought up to date. Steps without a draft of its own take the request back towards the others."""
        own = self._requests.get(key)
        if own is None:
            return 0
        if self._now > own.since + 1:
            own.fade(RESTING ** (self._now - own.since))
            own.since = self._now
        own.settle()
        return own.level

    def chances_of(self, confidences: Iterable[float], depth: int = 1) -> list[float]:
        """The chances that drafts from a depth on are accepted when all before them were, by how sure they seemed."""
        if not self._calibration:
            for cell in range(CALIBRATED_DEPTHS * BINS):
                at_zero = self._sure.rate(cell, 0.0, BIN_TRIES)
                self._calibration.append((at_zero, self._sure.rate(cell, 1.0, BIN_TRIES) - at_zero))
        chances = []
        for index, sure in enumerate(confidences, depth - 1):
            level, slope = self._calibration[_bin(index, sure)]
            chances.append(level + slope * sure)
        return chances

    def of_nodes(self, parents: Sequence[int], confidences: Sequence[float]) -> list[float]:
        """The chances that the nodes of a tree are accepted at all; siblings stand in the order of their rank."""
        depths, chances, survivals = list[int](), dict[int, list[float]](), list[float]()
        families: dict[int, list[int]] = {}
        for node, parent in enumerate(parents):
            families.setdefault(parent, []).append(node)
            depths.append(1 if parent < 0 else depths[parent] + 1)
        for parent, nodes in families.items():
            (first,) = self.chances_of([confidences[nodes[0]]], depths[nodes[0]])
            chances[parent] = [first, *self.siblings.chances(first, [confidences[node] for node in nodes])]
        for node, parent in enumerate(parents):
            above = 1.0 if parent < 0 else survivals[parent]
            survivals.append(above * chances[parent][families[parent].index(node)])
        return survivals

    def forget(self, key: int) -> None:
        """Drop a request that has ended; what it taught about the drafter stays."""
        self._requests.pop(key, None)

    def _mind_change(self) -> None:
        share = sum(self.latest) / LATEST
        chance = self._depths.rate(0, FIRST_GUESS, 0.0)
        error = sqrt(max(chance * (1 - chance), 0.02) / LATEST)
        if abs(share - chance) > SURPRISE * error:
            self._depths.fade(0.001)
            self._depths.add([0] * NEWEST, list(self.latest)[-NEWEST:])
            chance = self._depths.rate(0, FIRST_GUESS, 0.0)
        self.watch.look(share, chance)


class Watch:
    """Says once, in words, that a drafter has collapsed, and once that it is back."""

    def __init__(self) -> None:
        self.collapsed = False
        self._events: list[str] = []

    def look(self, share: float, chance: float) -> None:
        """Judge by the share of the latest rounds whose first draft was accepted, and by the estimate behind it."""
        said = f"the drafter's first token was accepted in {share:.0%} of the last {LATEST} rounds"
        if not self.collapsed and share < COLLAPSED and chance < 2 * COLLAPSED:
            self.collapsed = True
            self._events.append(
                f"{said}; requests on auto decode plainly except for probes. Check that the drafter belongs to this "
                "target (`eyas check`), and whether prompts or template differ from what it was trained on"
            )
        elif self.collapsed and share > RECOVERED:
            self.collapsed = False
            self._events.append(f"{said}; the drafter is back, and so is speculation wherever it pays")

    def take(self) -> list[str]:
        """What has not been taken yet."""
        events, self._events = self._events, []
        return events


def _bin(index: int, sure: float) -> int:
    depth = index if index < CALIBRATED_DEPTHS else CALIBRATED_DEPTHS - 1
    return depth * BINS + (int(sure * BINS) if sure < 1 else BINS - 1)
