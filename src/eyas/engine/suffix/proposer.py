"""Suffix drafts beside a drafter's, or alone: a proposer that wraps another.

    plan     look up requests that may have suffix drafts, and choose which are verified and how deep
    draft    send the found drafts to the device, which uses them where the request went on as expected
    observe  compare all found drafts with the tokens that came, verified or not

Suffix drafts are verified like any chain.
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
"""Most requests of a round with look-ups; larger rounds fill the passes without them."""


class SuffixProposer(Proposer):
    """Proposes suffix drafts, the inner proposer's drafts, or both."""

    def __init__(self, inner: Proposer, drafts: SuffixDrafts, controller: Controller, runner: RoundRunner) -> None:
        self.inner, self.drafts, self.layer_ids = inner, drafts, inner.layer_ids
        self._controller, self._runner = controller, runner
        self._choice = SuffixChoice(controller.costs, runner.shapes, exact=runner.graphs.exact)
        self._drafter_rate = 0.0
        """Tokens per second and request expected by the drafter's latest plan; 0 without one."""
        self._saved = 0.0
        """Seconds that look-ups should save, minus their cost, not booked yet."""

    @property
    def needs_landing(self) -> bool:
        return self.inner.needs_landing

    def admit(self, seq: SequenceState) -> None:
        self.inner.admit(seq)
        if seq.request.speculation.by_suffix:
            self.drafts.admit(seq)

    def forget(self, key: int) -> None:
        self.inner.forget(key)
        self.drafts.forget(key)

    def warm_up(self) -> None:
        self.inner.warm_up()

    def plan(self, decoding: Sequence[SequenceState]) -> DraftPlan:
        """Plan suffix drafts and the drafter's drafts together."""
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
        """Plan a round; `plain_rate` is the tokens per second and request of plain steps.

        Either all drafts are suffix drafts and the drafter does not run, or it runs as usual. In that case suffix
        drafts replace the drafter's where they promise more, at no cost, and where a larger pass pays they extend
        chains that agree with them.
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
        return self._with_drafter(plan, likely, rows, depth, rate) if depth and plan.tree is None else plan

    def _plan_of_drafter(self, decoding: Sequence[SequenceState]) -> DraftPlan:
        """Plan the drafter's drafts alone."""
        plan = self.inner.plan(decoding)
        drafts = plan.choice is not None and plan.choice.depth and plan.choice.purpose
        self._drafter_rate = drafts.rate / len(decoding) if drafts else 0.0
        return plan

    def _with_drafter(
        self, plan: DraftPlan, likely: Mapping[int, RoundOffer], rows: int, depth: int, rate: float
    ) -> DraftPlan:
        """Add suffix drafts to a round in which the drafter drafts `depth` deep: in place of its drafts or behind."""
        slots, behind, gain = dict(plan.slots), list[Sequence[float]](), 0.0
        for key, offer in likely.items():
            own = self._controller.acceptance.survivals[: slots.get(key, 0)]
            reached, usual = own[-1] if own else 1.0, sum(own)
            slots[key] = len(own) or depth  # the pass has that many for every row
            more = sum(offer.chances[: slots[key]])
            if more > OVER_DRAFTER * usual:
                offer.sent, reached, gain = True, 1.0, gain + more - usual
            # Chance that both agree, taken as independent; the text's continuation is then as likely as ever.
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

    def draft(self, round_: Round, plan: DraftPlan) -> None:
        """Queue the drafter's passes, then put suffix drafts in place of its drafts or behind them."""
        drafts = plan.offers and round_.depth and not round_.of_prompts
        found = [plan.offers.get(row.seq.key) for row in round_.rows] if drafts else []
        sent = [SentOffer(x.known, x.tokens, x.confirmed) if x and x.sent else None for x in found]
        if not any(sent):
            self.inner.draft(round_, plan)
            return
        round_.offers, runner = plan.offers, self._runner
        place = runner.graphs.placing(round_.bucket, round_.depth, round_.drafter_depth)
        self.inner.draft(round_, plan)
        runner.send_rows(round_)
        runner.state.send_offers(runner.queue, sent)
        runner.queue.run(place)

    def observe(self, report: StepReport) -> None:
        """Learn from the tokens that came, and report the drafter's own drafts to the inner proposer."""
        if report.choice is None and report.seconds is not None and report.requests:
            seconds = report.seconds - report.planning - report.catching_up
            self._choice.observe(report.requests, report.depth, report.suffix_drafted, seconds)
        if report.offers:
            began = self.drafts.clock()
            for key, offer in report.offers.items():
                self.drafts.observe(key, offer)
            self._saved -= self.drafts.clock() - began
            if any(offer.sent for offer in report.offers.values()):
                report = replace(report, choice=None)  # time and tokens do not belong to the drafter's plan
        self.inner.observe(report)
