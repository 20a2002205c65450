"""Suffix drafts beside those of a drafter, or without one: a proposer around another.

    plan     requests that may have suffix drafts are looked up; the choice says whose are verified, and how deep
    draft    what was looked up is sent to the device, which drafts it where the request has come to be as expected
    observe  what came is compared with all that was looked up, verified or not

Verification needs nothing of this: a suffix draft is a chain like another.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from eyas.engine.proposer import DraftPlan, Proposer
from eyas.engine.request import SequenceState
from eyas.engine.runner.round import Round
from eyas.engine.runner.round_runner import RoundRunner
from eyas.engine.runner.round_state import SentOffer
from eyas.engine.speculation.controller import Controller
from eyas.engine.speculation.step_report import StepReport
from eyas.engine.speculation.suffix_acceptance import RoundOffer
from eyas.engine.speculation.suffix_choice import OVER_DRAFTER, SuffixChoice, gained
from eyas.engine.suffix.drafts import SuffixDrafts

MOST_IN_A_ROUND = 16
"""Requests of a round up to which they are looked up: passes of many are full without."""


class SuffixProposer(Proposer):
    """Proposes what the text says, or what the inner proposer does, or both."""

    def __init__(self, inner: Proposer, drafts: SuffixDrafts, controller: Controller, runner: RoundRunner) -> None:
        self.inner, self.drafts, self.layer_ids = inner, drafts, inner.layer_ids
        self._controller, self._runner = controller, runner
        self._choice = SuffixChoice(controller.costs, runner.shapes, exact=runner.graphs.exact)
        self._drafter_rate = 0.0
        """Tokens per second and request that the drafter's latest plan promises; 0 without one."""
        self._saved = 0.0
        """Seconds that look-ups are expected to save, less those that they took; since that was booked."""

    @property
    def needs_landing(self) -> bool:
        """Whether the inner proposer needs it."""
        return self.inner.needs_landing

    def admit(self, seq: SequenceState) -> None:
        """Take note of a request that came."""
        self.inner.admit(seq)
        if seq.request.speculation.by_suffix:
            self.drafts.admit(seq)

    def forget(self, key: int) -> None:
        """Drop what is kept for a request that ended."""
        self.inner.forget(key)
        self.drafts.forget(key)

    def warm_up(self) -> None:
        """Do for the first time what takes longer then."""
        self.inner.warm_up()

    def plan(self, decoding: Sequence[SequenceState]) -> DraftPlan:
        """What requests are offered, and what the drafter does."""
        rows, gate = len(decoding), self.drafts.gate
        asked = [seq for seq in decoding if seq.request.speculation.by_suffix] if rows <= MOST_IN_A_ROUND else []
        plain = self._controller.costs.at(rows, 0) if asked else None
        is_open = bool(asked) and gate.is_open(rows, plain)
        due = [seq for seq in asked if seq.request.speculation.depth or (is_open and gate.due(seq.key))]
        if not due:
            return self._plan_of_drafter(decoding)
        began, deepest = self.drafts.clock(), self._runner.shapes.offered_for(rows)[-1]
        found = {seq.key: self.drafts.offer(seq, deepest) for seq in due}
        offers = {key: offer for key, offer in found.items() if offer is not None}
        self._saved -= self.drafts.clock() - began
        plan = self._plan_round(decoding, offers, 1 / (plain or 1.0))
        for seq in due:
            gate.note(seq.key, sent=seq.key in offers and offers[seq.key].sent)
        if plain is not None:
            gate.book(rows, self._saved, plain)
        self._saved = 0.0
        return plan

    def _plan_round(
        self, decoding: Sequence[SequenceState], offers: Mapping[int, RoundOffer], plain_rate: float
    ) -> DraftPlan:
        """How a round drafts, where plain steps give a request so many tokens per second.

        Either all drafts of a round are suffix drafts, and the drafter does not run; or it runs for all, as it does
        without any, suffix drafts that promise more are verified in the place of its own, for free, and where it is
        worth a larger pass they go on behind chains that say the same.
        """
        rows, likely = len(decoding), {key: offer for key, offer in offers.items() if offer.chances}
        if not any(seq.speculates and seq.request.speculation.depth for seq in decoding):
            chances, rate = [offer.chances for offer in likely.values()], rows * max(self._drafter_rate, plain_rate)
            depth = max((seq.request.speculation.depth or 0 for seq in decoding if seq.key in likely), default=0)
            if not depth:
                depth = self._choice.round_depth(rows, chances, rows * self._drafter_rate)
                seconds = self._choice.seconds(rows, depth, chances)
                self._saved += (rows + gained(chances, depth)) / rate - seconds if depth else 0.0
            if depth:
                slots = {key: min(depth, offer.most) for key, offer in likely.items()}
                for offer in likely.values():
                    offer.sent = True
                return DraftPlan(slots=slots, drafter_depth=0, offers=offers)
        plan = replace(self._plan_of_drafter(decoding), offers=offers)
        depth, rate = max(plan.slots.values(), default=0), rows * max(self._drafter_rate, plain_rate)
        return self._beside_drafter(plan, likely, rows, depth, rate) if depth and plan.tree is None else plan

    def _plan_of_drafter(self, decoding: Sequence[SequenceState]) -> DraftPlan:
        """What the drafter alone would do."""
        plan = self.inner.plan(decoding)
        drafts = plan.choice is not None and plan.choice.depth and plan.choice.purpose
        self._drafter_rate = drafts.rate / len(decoding) if drafts else 0.0
        return plan

    def _beside_drafter(
        self, plan: DraftPlan, likely: Mapping[int, RoundOffer], rows: int, depth: int, rate: float
    ) -> DraftPlan:
        """Offers for a round in which the drafter drafts so deep: in the place of its drafts, or behind them."""
        slots, behind, gain = dict(plan.slots), list[Sequence[float]](), 0.0
        for key, offer in likely.items():
            own = self._controller.acceptance.survivals[: slots.get(key, 0)]
            reached, usual = own[-1] if own else 1.0, sum(own)
            slots[key] = len(own) or depth  # which the pass has for every row
            more = sum(offer.chances[: slots[key]])
            if more > OVER_DRAFTER * usual:
                offer.sent, reached, gain = True, 1.0, gain + more - usual
            # Both are right, as if they knew nothing of each other; what the text has behind is right as ever then.
            behind.append([reached * chance for chance in offer.chances[slots[key] :]])
        deeper = self._choice.round_beyond(rows, depth, behind, rate)
        if deeper > depth:
            without = self._choice.seconds(rows, depth, (), behind=depth)
            self._saved -= self._choice.seconds(rows, deeper, behind, behind=depth) - without
            gain += gained(behind, deeper - depth)
            for key, offer in likely.items():
                offer.sent, offer.confirmed = True, not offer.sent
                slots[key] = min(deeper, offer.most)
        self._saved += gain / rate
        return replace(plan, slots=slots, drafter_depth=depth if deeper > depth else plan.drafter_depth)

    def draft(self, made: Round, plan: DraftPlan) -> None:
        """Queue the drafter's passes, and put what was looked up in the place of its drafts or behind them."""
        drafts = plan.offers and made.depth and not made.of_prompts
        found = [plan.offers.get(row.seq.key) for row in made.rows] if drafts else []
        sent = [SentOffer(x.known, x.tokens, x.confirmed) if x and x.sent else None for x in found]
        if not any(sent):
            self.inner.draft(made, plan)
            return
        made.offers, runner = plan.offers, self._runner
        place = runner.graphs.placing(made.bucket, made.depth, made.drafter_depth)
        self.inner.draft(made, plan)
        runner.send_rows(made)
        runner.state.send_offers(runner.queue, sent)
        runner.queue.run(place)

    def observe(self, report: StepReport) -> None:
        """Learn from what came in the place of offers, and tell the inner proposer of its own drafts."""
        if report.choice is None and report.seconds is not None and report.requests:
            seconds = report.seconds - report.thinking - report.catching_up
            self._choice.observe(report.requests, report.depth, report.suffix_drafted, seconds)
        if report.offers:
            began = self.drafts.clock()
            for key, offer in report.offers.items():
                self.drafts.observe(key, offer)
            self._saved -= self.drafts.clock() - began
            if any(offer.sent for offer in report.offers.values()):
                report = replace(report, choice=None)  # its time and its tokens are not those of the drafter's plan
        self.inner.observe(report)
