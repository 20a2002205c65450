"""How likely drafts are accepted, learned from the rounds that ran. No torch.

a(j) is the chance that the draft of depth j is accepted when all before it were; S(j) = a(1) ... a(j) is the chance
that it is accepted at all, and the expected tokens of a round of depth k are 1 + S(1) + ... + S(k).

    by depth        for the drafter as a whole. It starts from what the drafter's folder has recorded. Without a
                    record, depth 1 starts from an optimistic guess worth a few rounds, so that a new drafter is tried;
                    a deeper one starts from, and without news returns to, a little less than
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
from itertools import accumulate, chain
from math import exp, log, sqrt
from operator import mul

from eyas.engine.speculation.decayed_counts import DecayedCounts
from eyas.engine.speculation.observations import RoundOutcome
from eyas.engine.speculation.policy import POLICY
from eyas.engine.speculation.sibling_acceptance import SiblingAcceptance


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

    def settle(self, tries: float = POLICY.request_tries) -> None:
        """Set the level: the log of the odds ratio, drawn towards no difference by tries that never were."""
        better = (self.hits + tries) / (self.expected_hits + tries)
        worse = (self.misses + tries) / (self.expected_misses + tries)
        self.level = max(-POLICY.most_levels, min(POLICY.most_levels, round(log(better / worse) / POLICY.level_width)))


class Acceptance:
    """All estimates for one drafter."""

    def __init__(self, max_depth: int, recorded: Sequence[float] = ()) -> None:
        """`recorded` are a(1), a(2), ... of this drafter from elsewhere, as deep as they are known."""
        self.max_depth = max_depth
        self.rounds = 0
        self.surprises = 0
        """How often the latest rounds have contradicted the estimate."""
        self._now = 0
        self._memory, self._request_tries = POLICY.acceptance_memory, POLICY.request_tries
        self._surprise_errors = POLICY.surprise_errors
        self.latest: deque[float] = deque(maxlen=POLICY.latest_rounds)
        """Whether the first draft was accepted, for the latest rounds."""
        self.watch = Watch()
        self._offered: deque[Sequence[float]] = deque(maxlen=POLICY.offered_rounds)
        """How sure the drafter was of all drafts of the latest rounds, verified or not."""
        self._of_offered: list[list[float]] = []
        """The chances that these were accepted at all."""
        self._kept: dict[int, list[float]] = {}
        self._depths = DecayedCounts(max_depth)
        if recorded:
            reached = POLICY.recorded_rounds  # of so many rounds, few get deep: what is said of there weighs less
            for depth, chance in enumerate(recorded[:max_depth]):
                self._depths.add([depth], [chance], reached)
                reached *= chance
        else:
            self._depths.add([0], [POLICY.first_guess], POLICY.guess_rounds)
        self._sure = DecayedCounts(POLICY.calibrated_depths * POLICY.confidence_bins)
        self.siblings = SiblingAcceptance()
        self._requests: dict[int, Own] = {}
        self._by_depth: list[float] = []
        self._survivals: dict[int, list[float]] = {}
        self._calibration: list[tuple[float, float]] = []
        """For each bin, the chance as a linear function of confidence: evidence, and belief in the drafter's word."""

    def steady(self) -> None:
        """Believe in the long run rather than in the latest rounds: choices are few, and made for many steps."""
        self._memory, self._request_tries = POLICY.captured_acceptance_memory, POLICY.captured_request_tries
        self._surprise_errors = POLICY.captured_surprise_errors

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
        self._depths.fade(self._memory)
        own = self._requests.setdefault(outcome.key, Own())
        own.fade(1 - 1 / POLICY.request_memory)
        own.count(tries, sum(outcomes), sum(self.by_depth[:tries]))
        own.since = self._now
        if confidences:
            self._sure.add(map(_bin, range(len(confidences)), confidences), outcomes)
            self._sure.fade(self._memory)
            self._offered.append(confidences)
        self.siblings.observe(ranks, outcome.candidates)
        self.rounds += 1
        self.latest.append(outcomes[0])
        if self.rounds % POLICY.change_check_every == 0 and len(self.latest) == POLICY.latest_rounds:
            self._mind_change()

    def end_steps(self, steps: int) -> None:
        """Requests that do not draft have rested for so many more."""
        self._now += steps

    def note_probe(self) -> None:
        """The latest rounds were a probe: the past weighs less."""
        self._depths.limit(0, POLICY.probe_memory)

    def note_trial(self) -> None:
        """The latest rounds were a trial that pays."""
        self._depths.limit(0, POLICY.trial_memory)

    def refresh(self) -> None:
        """Bring the estimates up to date; between two calls they stand still, which keeps rounds cheap to count."""
        self._by_depth, self._survivals, self._calibration, self._kept, self._of_offered = [], {}, [], {}, []

    @property
    def by_depth(self) -> Sequence[float]:
        """a(1), a(2), ... for the drafter as a whole."""
        if not self._by_depth:
            belief, weight = POLICY.first_guess, 0.0  # the first guess was counted as evidence, so that it can fade
            for index in range(self.max_depth):
                self._by_depth.append(self._depths.rate(index, belief, weight))
                belief, weight = POLICY.decline_per_depth * self._by_depth[-1], POLICY.guess_rounds
        return self._by_depth

    def survivals(self, level: int) -> Sequence[float]:
        """S(1), S(2), ... for requests of a level."""
        if level not in self._survivals:
            odds, survival, all_so_far = exp(POLICY.level_width * level), 1.0, []
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
            own.fade(POLICY.resting_decay ** (self._now - own.since))
            own.since = self._now
        own.settle(self._request_tries)
        return own.level

    def chances_of(self, confidences: Iterable[float], depth: int = 1) -> list[float]:
        """The chances that drafts from a depth on are accepted when all before them were, by how sure they seemed."""
        calibration, chances = self.calibration(), []
        for index, sure in enumerate(confidences, depth - 1):
            level, slope = calibration[_bin(index, sure)]
            chances.append(level + slope * sure)
        return chances

    def calibration(self) -> Sequence[tuple[float, float]]:
        """Chances as lines, level + slope * confidence: for each depth in turn, a line per bin of confidence."""
        if not self._calibration:
            for cell in range(POLICY.calibrated_depths * POLICY.confidence_bins):
                at_zero = self._sure.rate(cell, 0.0, POLICY.confidence_bin_tries)
                self._calibration.append((at_zero, self._sure.rate(cell, 1.0, POLICY.confidence_bin_tries) - at_zero))
        return self._calibration

    def kept(self, depth: int, part: float) -> float:
        """What the likeliest part of all drafts of chains gives, in parts of what all of them give.

        From the confidences of the latest rounds. Until there are enough of that depth, shallow drafts are taken for
        likelier than deep ones and otherwise for equal, which is least kind to few.
        """
        if depth not in self._kept:
            if not self._of_offered:
                self._of_offered = [list(accumulate(self.chances_of(sure), mul)) for sure in self._offered]
            rounds = [survivals[:depth] for survivals in self._of_offered if len(survivals) >= depth]
            if len(rounds) < POLICY.offered_fewest:
                rounds = [list(accumulate(self.by_depth[:depth], mul))]
            self._kept[depth] = [0.0, *accumulate(sorted(chain.from_iterable(rounds), reverse=True))]
        sums = self._kept[depth]
        at = min(part, 1.0) * (len(sums) - 1)
        below = min(int(at), len(sums) - 2)
        return (sums[below] + (at - below) * (sums[below + 1] - sums[below])) / max(sums[-1], 1e-9)

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
        share = sum(self.latest) / len(self.latest)
        chance = self._depths.rate(0, POLICY.first_guess, 0.0)
        error = sqrt(max(chance * (1 - chance), 0.02) / len(self.latest))
        if abs(share - chance) > self._surprise_errors * error:
            chance = self._believe_newest()
        self.watch.look(share, chance)

    def _newest(self) -> list[float]:
        return list(self.latest)[-POLICY.newest_rounds :]

    def _believe_newest(self) -> float:
        """Forget what lies before the newest rounds; the chance of a first draft that they leave."""
        self.surprises += 1
        self._depths.fade(0.001)
        self._depths.add([0] * POLICY.newest_rounds, self._newest())
        return self._depths.rate(0, POLICY.first_guess, 0.0)


class Watch:
    """Says once, in words, that a drafter has collapsed, and once that it is back."""

    def __init__(self) -> None:
        self.collapsed = False
        self._events: list[str] = []

    def look(self, share: float, chance: float) -> None:
        """Judge by the share of the latest rounds whose first draft was accepted, and by the estimate behind it."""
        said = f"the drafter's first token was accepted in {share:.0%} of the last {POLICY.latest_rounds} rounds"
        if not self.collapsed and share < POLICY.collapsed_below and chance < 2 * POLICY.collapsed_below:
            self.collapsed = True
            self._events.append(
                f"{said}; requests on auto decode plainly except for probes. Check that the drafter belongs to this "
                "target (`eyas check`), and whether prompts or template differ from what it was trained on"
            )
        elif self.collapsed and share > POLICY.recovered_above:
            self.collapsed = False
            self._events.append(f"{said}; the drafter is back, and so is speculation wherever it pays")

    def take(self) -> list[str]:
        """What has not been taken yet."""
        events, self._events = self._events, []
        return events


def _bin(index: int, sure: float) -> int:
    depth = index if index < POLICY.calibrated_depths else POLICY.calibrated_depths - 1
    return depth * POLICY.confidence_bins + (
        int(sure * POLICY.confidence_bins) if sure < 1 else POLICY.confidence_bins - 1
    )
