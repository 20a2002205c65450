"""Whether a request's suffix drafts are verified, how many of them, and whether the drafter drafts instead. No torch.

Suffix drafts take no pass of the drafter: they cost what the target's pass takes longer for them. Each is worth its
chance to be accepted at all (`suffix_acceptance.py`), as drafts of the drafter are worth theirs; what a second is worth
is the rate at which the engine gives tokens. So sources are compared by expected tokens less their cost in tokens:

    nothing    0, always among the choices
    suffix     the tokens of the offer, as many as are worth verifying
    drafter    as deep as is best for the request by what the controller knows: its acceptance, and times of passes
    both       the drafter's chain, and what the text has behind it

The drafter's own controller decides about everything else as if requests that verify suffix drafts asked for none.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from math import isfinite

from eyas.engine.speculation.acceptance import Acceptance
from eyas.engine.speculation.captured_plan import CapturedShapes
from eyas.engine.speculation.cost_model import CostModel
from eyas.engine.speculation.policy import POLICY
from eyas.engine.speculation.verify_budget import share_budget


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodingBatch:
    """The requests of a step that decode."""

    rows: int
    context: int
    """Tokens that their newest ones attend to."""
    drafting: int = 0
    """Those that the drafter may draft for: they share its passes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterPromise:
    """What the drafter would do."""

    acceptance: Acceptance
    deepest: int
    rate: float
    """Tokens per second by the latest plan, 0 if that was to draft nothing."""


class SuffixChoice:
    """Weighs suffix drafts against their cost and against the drafter's."""

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs
        self.trials = 0
        """Passes that were run to time them."""

    def take(
        self,
        batch: DecodingBatch,
        survivals: Mapping[int, Sequence[float]],
        *,
        bound: Collection[int] = (),
        drafter: "DrafterPromise | None" = None,
    ) -> dict[int, int]:
        """How many suffix drafts of each request are verified; requests with none are left out.

        `survivals` are the chances of each request's drafts to be accepted at all. Of requests that are `bound` all are
        verified, whatever they cost.
        """
        verify = self._costs.verify
        taken = {key: len(chances) for key, chances in survivals.items() if key in bound and chances}
        free = {key: chances for key, chances in survivals.items() if key not in bound and chances}
        if not free or not verify.tells_any:
            return taken
        if not verify.tells(batch.rows + 1):
            return taken | self._trial(free)
        forced = sum(taken.values())
        rate = self.rate(batch, free.values())
        if drafter is not None:
            rate = max(rate, drafter.rate)

        def price(drafts: int) -> float:
            return rate * verify.at(batch.rows + forced + drafts, batch.context)

        plain, better = price(0), dict[int, Sequence[float]]()
        for key, chances in free.items():
            net = max(gain - price(count) + plain for count, gain in enumerate(accumulate(chances), 1))
            instead = 0.0 if drafter is None else self._of_drafter(batch, rate, drafter, key)
            if net > max(POLICY.suffix_least_gain, POLICY.suffix_over_drafter * instead):
                better[key] = chances
        kept = share_budget(list(better.values()), price)
        return taken | {key: len(drafts) for key, drafts in zip(better, kept, strict=True) if drafts}

    def may_pay(self, batch: DecodingBatch, most: int, rate: float) -> bool:
        """Whether up to so many drafts would pay if they were as sure as drafts can be; unless too little is known."""
        verify, gained, rows = self._costs.verify, 0.0, batch.rows
        if not verify.tells(rows + 1):
            return True
        rate, plain = max(rate, self.rate(batch)), verify.at(rows, batch.context)
        for count in range(1, most + 1):
            gained += POLICY.suffix_surest**count
            if gained - rate * (verify.at(rows + count, batch.context) - plain) > POLICY.suffix_least_gain:
                return True
        return False

    def extend(self, batch: DecodingBatch, drafts: int, survivals: Sequence[float], rate: float) -> int:
        """How many of the drafts behind a drafter's chain are worth verifying in a pass that has so many already."""
        verify = self._costs.verify
        if not survivals or not verify.tells(batch.rows + drafts + 1):
            return 0
        best, most, gained = POLICY.suffix_least_gain, 0, 0.0
        rate = max(rate, self.rate(batch))
        without = verify.at(batch.rows + drafts, batch.context)
        for count, survival in enumerate(survivals, 1):
            gained += survival
            net = gained - rate * (verify.at(batch.rows + drafts + count, batch.context) - without)
            if net > best:
                best, most = net, count
        return most

    def rate(self, batch: DecodingBatch, survivals: Iterable[Sequence[float]] = ()) -> float:
        """Tokens per second, plainly or with the best number of these drafts: what a second is worth."""
        costs, best, gained = self._costs, 0.0, 0.0
        for count, chance in enumerate([0.0, *sorted(chain.from_iterable(survivals), reverse=True)]):
            gained += chance
            passes = costs.verify.at(batch.rows + count, batch.context)
            best = max(best, (batch.rows + gained) / max(costs.step(batch.rows, passes, depth=0), 1e-9))
        return best

    def _of_drafter(self, batch: DecodingBatch, rate: float, drafter: "DrafterPromise", key: int) -> float:
        """Tokens that the drafter is expected to give a request beyond their cost, at the best depth; 0 at the least.

        Requests that it drafts for share its passes.
        """
        costs, alike, best, gained = self._costs, max(1, batch.drafting), 0.0, 0.0
        (level,) = drafter.acceptance.levels([key])
        plain = costs.verify.at(batch.rows, batch.context)
        for depth, survival in enumerate(drafter.acceptance.survivals(level)[: drafter.deepest], 1):
            gained += survival
            seconds = costs.draft(depth, 2 * alike, (depth - 1) * alike)
            seconds += costs.verify.at(batch.rows + depth * alike, batch.context) - plain
            if isfinite(seconds):
                best = max(best, gained - rate * seconds / alike)
        return best

    def round_depth(
        self, batch: DecodingBatch, shapes: CapturedShapes, survivals: Collection[Sequence[float]], drafter_rate: float
    ) -> int:
        """How deep a captured round goes that verifies suffix drafts alone; 0 where it does not pay.

        All of its shape is paid. It must promise more tokens per second than plain steps, and than the drafter's plan.
        """
        costs, rows, depths = self._costs, batch.rows, shapes.offered_for(batch.rows)
        verify, tokens = costs.verify_of(rows), costs.plain_tokens(rows)
        if not depths or not any(survivals) or not verify.tells_any:
            return 0
        if not verify.tells(2 * tokens):
            likely = any(row and row[0] >= POLICY.suffix_trial_chance for row in survivals)
            if not likely or self.trials >= POLICY.suffix_trials:
                return 0
            self.trials += 1
            return min(depths, key=lambda depth: abs(depth - POLICY.suffix_trial_tokens))

        def rate(depth: int) -> float:
            passes = verify.at(tokens * (1 + depth), batch.context)
            gained = sum(sum(row[:depth]) for row in survivals)
            return (rows + gained) / max(costs.step(rows, passes, depth=depth), 1e-9)

        best = max(depths, key=rate)
        least = max((1 + POLICY.suffix_least_gain) * rate(0), POLICY.suffix_over_drafter * drafter_rate)
        return best if rate(best) > least else 0

    def round_beyond(
        self, batch: DecodingBatch, shapes: CapturedShapes, depth: int, gains: Collection[Sequence[float]], rate: float
    ) -> int:
        """How deep a captured round goes whose drafter drafts `depth` deep; that, where more does not pay.

        `gains` are the chances of each request's drafts beyond.
        """
        verify, tokens = self._costs.verify_of(batch.rows), self._costs.plain_tokens(batch.rows)
        best, most, own = POLICY.suffix_least_gain * batch.rows, depth, tokens * (1 + depth)
        for deeper in set(shapes.offered) & set(shapes.offered_for(batch.rows)):
            if deeper > depth and verify.tells(own) and verify.tells(tokens * (1 + deeper)):
                seconds = verify.at(tokens * (1 + deeper), batch.context) - verify.at(own, batch.context)
                net = sum(sum(row[: deeper - depth]) for row in gains) - max(rate, self.rate(batch)) * seconds
                if net > best:
                    best, most = net, deeper
        return most

    def _trial(self, survivals: Mapping[int, Sequence[float]]) -> dict[int, int]:
        """Drafts of a pass that is run because nobody knows what such passes take."""
        likely = {key: row for key, row in survivals.items() if row[0] >= POLICY.suffix_trial_chance}
        if not likely or self.trials >= POLICY.suffix_trials:
            return {}
        self.trials += 1
        return {key: min(len(row), POLICY.suffix_trial_tokens) for key, row in likely.items()}
