"""What a step costs on this machine, learned while steps run. No torch.

    verify   one pass of the target, against its tokens, and a slope times the context that its rows attend to. Where
             passes are captured, those of one request are apart: its four tokens take less than four requests' one
    draft    the drafter's passes, against their tokens: the first reads what the target has seen since, each further
             one has a token for every request that goes on
    tree     the same where trees grow, over all passes together: between them the host does more than for chains
    rest     what a step takes beside its passes, against its requests: scheduling, this very choice, committing. Where
             the device is fast that is most of a step, and for drafts the host does more, the more of them there are:
             a curve for each depth where passes are captured. Where steps overlap it is all of the host's time, and a
             step takes whichever is longer
    debt     what the drafter reads beforehand for requests that have rested; no price of drafts, but a loss of probes

Where passes come in captured shapes (`captured_plan.py`), counts are those of the shape, padding included, and drafting
is timed as a whole: a curve for each depth, against rows.

Time is no smooth function of tokens: kernels work in tiles and change with the shape. So no formula is fitted; a
`Curve` keeps a typical time for each bucket of token counts, by these rules:

    the first time of a bucket is dropped: it holds compilation, allocation and cold caches
    the lower median of its latest times counts, from the second on: a shared machine has outliers, all of them late
    a larger pass is never expected to take less: that keeps jumps and evens out noise
    between two buckets time is linear; past the last it goes on as over the last octave, and never quite flat; from
    one bucket alone it is proportional to tokens, the assumption least kind to speculation, and so it is before the
    first, except for the drafter, to which flat is less kind. The host's time is level past the last: from what it
    takes for one request nothing follows for hundreds, and what plain steps take is not to be guessed too high
    a bucket that nobody visits is forgotten in the end: its neighbours are better witnesses of the machine as it is
    times of a rehearsal, with nobody's rows and before any request, say what there is no time of yet: as much more or
    less than rehearsed as passes of the nearest sizes took. They do not age: they tell the shape of the curve

Invariant: a curve that knows no bucket says infinity, so nothing is chosen on the strength of an unknown cost.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import inf, sqrt

from eyas.engine.speculation.captured_plan import CapturedShapes
from eyas.engine.speculation.observations import DraftTiming
from eyas.engine.speculation.policy import POLICY
from eyas.plan.shapes import Shape

OVERLAPPED_BELOW = 4
"""Where steps overlap, only those that wait for the host tell its time, and so do those in which something else was
late: the typical time has one of so many parts of all times below it."""


def bucket_of(count: int, per_octave: int = POLICY.target_buckets_per_octave) -> int:
    """The largest count that is taken for the same; powers of two, the usual tiles, end a bucket."""
    if count <= per_octave:
        return count
    width = max(1, (1 << ((count - 1).bit_length() - 1)) // per_octave)
    return -(-count // width) * width


class CostCurve:
    """Typical seconds of a pass against its tokens."""

    def __init__(
        self,
        per_octave: int = POLICY.target_buckets_per_octave,
        *,
        flat_below: bool = False,
        level_above: bool = False,
    ) -> None:
        self._per_octave, self._flat_below, self._level_above = per_octave, flat_below, level_above
        self._times: dict[int, deque[tuple[int, float, int]]] = {}
        """By bucket: number of the observation, seconds, context."""
        self._visited: dict[int, int] = {}
        """By bucket: number of its last observation."""
        self._typical: dict[int, float] = {}
        """By bucket: median seconds, less what the contexts took."""
        self._known: list[int] = []
        """Buckets with a typical time, in order."""
        self._expected: dict[int, float] = {}
        """By bucket: what all typical times say together, until one of them changes."""
        self._rehearsed: list[tuple[int, float]] = []
        """Counts and seconds, in order."""
        self._slope = Slope()
        self._slope_used = 0.0
        self._observations, self._refit_at = 0, POLICY.cost_refit_every
        self.news = 0
        """Buckets that became known so far."""
        self.below = 2
        """The typical time has one of so many parts of all times below it: 2 is the median."""
        self.enough, self.stale_after = POLICY.cost_samples, POLICY.cost_stale_after
        """Times that a bucket needs to be known, and observations after which one no longer counts."""

    @property
    def known(self) -> Sequence[int]:
        """Buckets that have been measured."""
        return self._known

    @property
    def tells_any(self) -> bool:
        """Whether anything was measured or rehearsed."""
        return bool(self._known or self._rehearsed)

    @property
    def _rehearsed_counts(self) -> list[int]:
        return [count for count, _ in self._rehearsed]

    @property
    def per_context_token(self) -> float:
        """Seconds that one more token of context takes."""
        return self._slope_used

    def bucket_of(self, count: int) -> int:
        """The largest count that this curve takes for the same."""
        return bucket_of(count, self._per_octave)

    def reaches(self, count: int) -> bool:
        """Whether as many tokens have been timed."""
        return any(counts and count <= counts[-1] for counts in (self._known, self._rehearsed_counts))

    def tells(self, count: int) -> bool:
        """Whether the time of such a pass would be more than a guess."""
        return self.reaches(count) or (
            bool(self._known) and self._known[-1] >= POLICY.cost_buckets_apart * self._known[0]
        )

    def samples(self, count: int) -> int:
        """Times that count for such a pass."""
        return len(self._times.get(self.bucket_of(count), ()))

    def age(self, count: int) -> int:
        """Observations since such a pass was last seen."""
        return self._observations - self._visited.get(self.bucket_of(count), 0)

    def rehearse(self, seconds: Mapping[int, float]) -> None:
        """Take the times of a rehearsal, by count."""
        self._rehearsed = sorted((dict(self._rehearsed) | dict(seconds)).items())
        self._expected = {}
        self.news += 1

    def observe(self, count: int, seconds: float, context: int = 0) -> None:
        """Take the time of one pass."""
        self._observations += 1
        bucket = self.bucket_of(count)
        self._visited[bucket] = self._observations
        times = self._times.get(bucket)
        if times is None:
            self._times[bucket] = deque(maxlen=POLICY.cost_window)
            return
        if context and bucket in self._typical:
            usual_context = sum(context for _, _, context in times) / len(times)
            usual = self._typical[bucket] + self._slope_used * usual_context
            self._slope.observe(context - usual_context, seconds - usual, usual)
        times.append((self._observations, seconds, context))
        while len(times) > self.enough and self._observations - times[0][0] > self.stale_after:
            times.popleft()
        if len(times) == self.enough and bucket not in self._typical:
            insort(self._known, bucket)
            self.news += 1
        if len(times) >= self.enough:
            self._settle(bucket)
        if self._observations >= self._refit_at:
            self._refit_at = self._observations + POLICY.cost_refit_every
            self._refit()

    def skip(self, observations: int) -> None:
        """So many passes ran that nobody timed: what is known gets older all the same."""
        self._observations += observations

    def pass_by(self) -> None:
        """Something was timed of which this tells nothing: in the end all of it is forgotten."""
        self._observations += 1
        if self._known and self._observations >= self._refit_at:
            self._refit_at = self._observations + POLICY.cost_refit_every
            self._refit()

    def at(self, count: int, context: int = 0) -> float:
        """Expected seconds of a pass."""
        if count <= 0:
            return 0.0
        if not self._expected:
            self._pool()
        bucket = self.bucket_of(count)
        expected = self._expected.get(bucket)
        if expected is None:
            expected = self._expected[bucket] = self._guess(bucket)
        return expected + self._slope_used * context

    def _pool(self) -> None:
        """Expect what is typical, but never less of a larger pass: where medians fall, they are averaged.

        This is isotonic regression (pool adjacent violators); it keeps true jumps and evens out noise between them.
        """
        pools: list[tuple[float, int, int]] = []  # seconds, times, buckets
        for bucket in self._known:
            pool = (self._typical[bucket], len(self._times[bucket]), 1)
            while pools and pools[-1][0] > pool[0]:
                seconds, times, buckets = pools.pop()
                both = times + pool[1]
                pool = ((seconds * times + pool[0] * pool[1]) / both, both, buckets + pool[2])
            pools.append(pool)
        pooled = [seconds for seconds, _, buckets in pools for _ in range(buckets)]
        self._expected = dict(zip(self._known, pooled, strict=True))

    def _guess(self, count: int) -> float:
        known, expected = self._known, self._expected
        if self._rehearsed:
            late = [(bucket, expected[bucket] - _through(self._rehearsed, bucket)) for bucket in known]
            return max(0.0, _through(self._rehearsed, count) + (_level(late, count) if late else 0.0))
        if not known:
            return inf
        place = bisect_left(known, count)
        if place == 0:
            return expected[known[0]] * (1.0 if self._flat_below else count / known[0])
        if place < len(known):
            low, high = known[place - 1], known[place]
            return expected[low] + (expected[high] - expected[low]) * (count - low) / (high - low)
        top = known[-1]
        if self._level_above:
            return expected[top]
        low = known[max(0, bisect_left(known, top // 2 + 1) - 1)]
        if top < POLICY.cost_buckets_apart * low or low == top:
            return expected[top] * count / top
        slope = max((expected[top] - expected[low]) / (top - low), POLICY.cost_flattest * expected[top] / top)
        return expected[top] + slope * (count - top)

    def _settle(self, bucket: int) -> None:
        times = sorted(seconds - self._slope_used * context for _, seconds, context in self._times[bucket])
        self._typical[bucket] = max(0.0, times[(len(times) - 1) // self.below])
        self._expected = {}

    def _refit(self) -> None:
        for bucket in [b for b, at in self._visited.items() if self._observations - at > self.stale_after]:
            del self._times[bucket], self._visited[bucket]
            if self._typical.pop(bucket, None) is not None:
                self._known.remove(bucket)
                self._expected = {}
        self._slope_used = self._slope.value
        for bucket in self._known:
            self._settle(bucket)


def _of_overlapped(rest: CostCurve, *, drafts: bool) -> None:
    """Make a curve of the host's time one for steps that overlap.

    What is late there is late for some steps on end, and a choice is held for as many: few times of a depth may all be
    wrong, and would forbid it and all deeper ones. Then nobody would time it ever again, so they are forgotten as well.
    Plain steps, with which all is compared, are timed now and then in any case.
    """
    rest.below = OVERLAPPED_BELOW
    if drafts:
        rest.enough, rest.stale_after = POLICY.host_samples, POLICY.host_stale_after


def _level(points: Sequence[tuple[int, float]], count: int) -> float:
    """Linear between points, level before the first and behind the last."""
    place = bisect_left(points, (count, -inf))
    if place == len(points) or place == 0:
        return points[max(0, place - 1)][1]
    (low, at_low), (high, at_high) = points[place - 1], points[place]
    return at_low + (at_high - at_low) * (count - low) / (high - low)


def _through(points: Sequence[tuple[int, float]], count: int) -> float:
    """The same, but behind the last it goes on as between the last two; one alone is proportional to counts there."""
    last, at_last = points[-1]
    if count <= last:
        return _level(points, count)
    low, at_low = points[-2] if len(points) > 1 else (0, 0.0)
    return at_last + max(0.0, at_last - at_low) * (count - last) / (last - low)


class Slope:
    """Seconds per token of context: one regression inside all buckets, so that what tokens cost does not enter it.

    What counts is the slope less twice its standard error: a slope that is only noise would let times taken at other
    contexts look shorter or longer than they were.
    """

    MEMORY, CLIP = 500, 0.25

    def __init__(self) -> None:
        self._sums = [0.0] * 6
        """Of 1, x, y, x * x, x * y, y * y, where x is context and y are seconds, both against the usual; fading."""

    @property
    def value(self) -> float:
        """The slope that is beyond doubt; never negative."""
        count, x, y, xx, xy, yy = self._sums
        if count < 3 or xx - x * x / count <= 0:
            return 0.0
        spread = xx - x * x / count
        slope = (xy - x * y / count) / spread
        unexplained = max(0.0, yy - y * y / count - slope * slope * spread) / count
        return max(0.0, slope - 2 * sqrt(unexplained / spread))

    def observe(self, away: float, late: float, usual: float) -> None:
        """Take a pass that had so much more context than usual, and took so much longer; outliers are cut."""
        late = min(max(late, -self.CLIP * usual), self.CLIP * usual)
        terms = (1.0, away, late, away * away, away * late, late * late)
        fade = 1 - 1 / self.MEMORY
        self._sums = [fade * old + new for old, new in zip(self._sums, terms, strict=True)]


class CostModel:
    """What the parts of a step cost."""

    def __init__(self) -> None:
        self.verify, self.verify_alone = (CostCurve(POLICY.target_buckets_per_octave) for _ in range(2))
        self.first_draft, self.further_draft, self.pass_of_tree = (
            CostCurve(POLICY.drafter_buckets_per_octave, flat_below=True) for _ in range(3)
        )
        self.overlapped = False
        """Whether the host works on one step while the device runs the next."""
        self.rests: dict[int, CostCurve] = {}
        """By the depth of chains, 0 for plain steps; where drafts are not captured, 1 stands for all, trees too."""
        self.tree_rest = self._new_rest(drafts=True)
        """Of captured trees: what the host does with their nodes says nothing about chains."""
        self.debt = CostCurve(POLICY.drafter_buckets_per_octave, flat_below=True)
        drafts = self.first_draft, self.further_draft, self.pass_of_tree
        self.shapes: CapturedShapes | None = None
        """Those of passes, where they are captured."""
        self.chains: dict[int, CostCurve] = {}
        """All passes of a draft against rows, by depth; where they are captured."""
        self.trees: dict[Shape, CostCurve] = {}
        """The same for trees, by shape."""
        self._curves = [self.verify, self.verify_alone, self.tree_rest, *drafts]

    def overlap(self) -> None:
        """The host works on one step while the device runs the next."""
        self.overlapped = True
        _of_overlapped(self.tree_rest, drafts=True)
        for depth, curve in self.rests.items():
            _of_overlapped(curve, drafts=depth > 0)

    @property
    def news(self) -> int:
        """How often something became known of which there was only a guess."""
        return sum(curve.news for curve in self._curves)

    def observe_draft(self, timing: DraftTiming) -> None:
        """Take the time of a step's drafting."""
        passes, tokens, seconds = timing.passes, timing.tokens, timing.seconds
        if timing.rows is not None:
            curve = self.tree_of(timing.shape) if timing.trees else self.chain_of(passes)
            curve.observe(timing.rows, seconds)
            return
        if timing.trees:
            self.pass_of_tree.observe(max(1, round(tokens / passes)), seconds / passes)
            return
        first_tokens, first_seconds = timing.first or (tokens / passes, seconds / passes)
        self.first_draft.observe(max(1, round(first_tokens)), first_seconds)
        if passes > 1:
            further = passes - 1
            self.further_draft.observe(
                max(1, round((tokens - first_tokens) / further)), (seconds - first_seconds) / further
            )

    def chain_of(self, depth: int) -> CostCurve:
        """The curve of captured drafts of a depth."""
        if depth not in self.chains:
            self.chains[depth] = CostCurve(POLICY.drafter_buckets_per_octave, flat_below=True)
            self._curves.append(self.chains[depth])
        return self.chains[depth]

    def tree_of(self, shape: Shape) -> CostCurve:
        """The same for trees of a shape."""
        if shape not in self.trees:
            self.trees[shape] = CostCurve(POLICY.drafter_buckets_per_octave, flat_below=True)
            self._curves.append(self.trees[shape])
        return self.trees[shape]

    def verify_of(self, rows: int) -> CostCurve:
        """The curve of the target's passes for so many requests."""
        return self.verify_alone if self.shapes is not None and self.shapes.rows_for(rows) == 1 else self.verify

    def plain_tokens(self, rows: int) -> int:
        """Tokens of a pass without drafts."""
        return rows if self.shapes is None else self.shapes.rows_for(rows)

    def rest_of(self, depth: int) -> CostCurve:
        """The curve of the host's time for steps that draft so deep."""
        if depth not in self.rests:
            self.rests[depth] = self._new_rest(drafts=depth > 0)
            self._curves.append(self.rests[depth])
        return self.rests[depth]

    def _new_rest(self, *, drafts: bool) -> CostCurve:
        curve = CostCurve(POLICY.host_buckets_per_octave, level_above=True)
        if self.overlapped:
            _of_overlapped(curve, drafts=drafts)
        return curve

    def observe_step(
        self, requests: int, seconds: float, *, passes: float, depth: int, trees: bool = False, thinking: float = 0.0
    ) -> None:
        """Take what a step took as a whole, `passes` being the seconds of its passes; `trees` are captured ones.

        `thinking` is what the controller took of them. It thinks most while it knows least: then every step would seem
        to be the host's, and what is tried first would never be found to be cheap.
        """
        curve = self.tree_rest if trees else self.rest_of(depth)
        if not self.overlapped:
            curve.observe(requests, max(0.0, seconds - passes))
        elif seconds > POLICY.host_bound * passes:
            curve.observe(requests, seconds - thinking)  # the device has waited for the host
        elif curve.samples(requests) and (not curve.known or curve.at(requests) > passes):
            curve.observe(requests, passes)  # the host had waited, so that it takes no longer than this
        if self.overlapped:
            for other in (self.tree_rest, *self.rests.values()):
                if other is not curve:
                    other.pass_by()

    def step(self, requests: int, passes: float, *, depth: int, trees: bool = False) -> float:
        """Expected seconds of a step whose passes take so long."""
        rest = self.rest(requests, depth=depth, trees=trees)
        return max(passes, rest) if self.overlapped else passes + rest

    def rest(self, requests: int, *, depth: int, trees: bool = False) -> float:
        """Expected seconds of the host: none until some were seen; for drafts no less than without.

        Depths that nobody has seen lie between those that were, plain steps among them. Trees that nobody has seen
        are taken for chains.
        """
        if trees and self.tree_rest.known:
            return max(self.rest(requests, depth=0), self.tree_rest.at(requests))
        seen = {0: 0.0} | {at: curve.at(requests) for at, curve in self.rests.items() if curve.known}
        depths = sorted(seen)
        return _level(list(zip(depths, accumulate((seen[at] for at in depths), max), strict=True)), depth)

    def draft(self, passes: int, first: float, further: float) -> float:
        """Expected seconds of so many passes: tokens of the first, and of all others together."""
        if not passes:
            return 0.0
        return self.first_draft.at(max(1, round(first))) + self.further(passes - 1, further)

    def chain(self, depth: int, rows: int) -> float:
        """Expected seconds of a captured draft of all rows: as timed, or in line with other depths that were."""
        if depth in self.chains and self.chains[depth].tells_any:
            return self.chains[depth].at(rows)
        timed = [(other, self.chains[other].at(rows)) for other in sorted(self.chains) if self.chains[other].tells_any]
        return _through(timed, depth) if timed else inf

    def tree(self, shape: Shape, rows: int) -> float:
        """The same for trees; those that were never timed take for ever."""
        return self.trees[shape].at(rows) if shape in self.trees and self.trees[shape].tells_any else inf

    def grow(self, passes: int, first: float, further: float) -> float:
        """The same where trees grow: what was timed, and never less than chains would take."""
        seconds = self.draft(passes, first, further)
        if not self.pass_of_tree.known:
            return seconds
        return max(seconds, passes * self.pass_of_tree.at(max(1, round((first + further) / passes))))

    def further(self, passes: int, tokens: float) -> float:
        """Expected seconds of passes behind the first. Until there were any, they are taken for as long as that."""
        if not passes:
            return 0.0
        curve = self.further_draft if self.further_draft.known else self.first_draft
        return passes * curve.at(max(1, round(tokens / passes)))
