"""Suffix drafts beside those of a drafter, or without one: a proposer around the drafter's, or around none.

    draft_slots  every request that may have suffix drafts is looked up; the choice says whose are verified, and the
                 drafter's controller is asked about the others
    propose      suffix drafts for those; for the others what the drafter drafts, and what the text has behind it
    settle       what came is compared with all that was looked up, verified or not; the drafter's part of a draft is
                 told to its controller, which never hears of the rest

Verification needs nothing of this: a suffix draft is a chain like another.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from math import prod
from operator import mul
from typing import Any

from eyas.engine.grammar.base import filter_by_grammar
from eyas.engine.proposer import NoProposer, Proposer, StatesOf
from eyas.engine.request import SequenceState
from eyas.engine.scheduler import ScheduledRow
from eyas.engine.speculation.captured_plan import OFFERED_ROWS, CapturedShapes
from eyas.engine.speculation.choice import Choice
from eyas.engine.speculation.controller import Controller
from eyas.engine.speculation.draft import NO_DRAFT, Draft, Tree
from eyas.engine.speculation.policy import POLICY
from eyas.engine.speculation.step_report import StepReport
from eyas.engine.speculation.suffix_acceptance import RoundOffer, SuffixOffer
from eyas.engine.speculation.suffix_choice import DecodingBatch, DrafterPromise, SuffixChoice
from eyas.engine.suffix.drafts import SuffixDrafts
from eyas.engine.suffix.lookup_gate import LookupGate
from eyas.engine.suffix.lookup_pace import FEW_ROUNDS_OUT, MOST_ROUNDS_OUT, LookupPace
from eyas.engine.verify import TargetOutput, VerifyResult

MOST_BEHIND_A_CHAIN = 8
"""Suffix drafts behind a drafter's chain."""
MOST_IN_A_ROUND = 16
"""Requests of a round on the device up to which they are looked up: the host has little time for each, and passes of
many are full without."""


class SuffixProposer:
    """Proposes what the text says, or what the inner proposer does, or both."""

    def __init__(self, inner: Proposer | NoProposer, drafts: SuffixDrafts, controller: Controller) -> None:
        self.inner, self.drafts = inner, drafts
        self._controller, self._choice = controller, SuffixChoice(controller.costs)
        self._offers: dict[int, SuffixOffer] = {}
        """Of this step, by request, verified or not."""
        self._taken: dict[int, int] = {}
        """How many are verified, of requests that the drafter leaves alone for it."""
        self._inner_slots: Mapping[int, int] = {}
        self._behind: dict[int, SuffixOffer] = {}
        """What the text has behind the drafter's chains, as far as it is verified."""
        self._batch = DecodingBatch(rows=0, context=0)
        self._pays = False
        """Whether the surest drafts would pay in this step."""
        self.shapes: CapturedShapes | None = None
        """Of rounds, where these live on the device (`round_loop.py`)."""
        self.round_offers: dict[int, RoundOffer] = {}
        """What was looked up for requests of the next round."""
        self._pace, self._gate = LookupPace(), LookupGate()
        self.looks_up = False
        """Whether requests of the next round may be looked up."""
        self.drafter_depth: int | None = None
        """How deep the drafter drafts in the next round at most."""
        self._plan_rate = 0.0
        """Tokens per second that the drafter's latest plan promises; 0: it drafts nothing."""

    # --- what the inner proposer says --------------------------------------------------------------------------

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """Layers of the target whose states are needed."""
        return self.inner.layer_ids

    @property
    def chosen(self) -> Choice | None:
        """What the drafter's controller chose for this step."""
        return self.inner.chosen

    @property
    def repeated(self) -> Choice | None:
        """What this step is like."""
        return self.inner.repeated

    @property
    def round_tree(self) -> Tree | None:
        """What the requests of a round grow."""
        return self.inner.round_tree if self.drafter_depth != 0 else None

    @property
    def budget(self) -> int | None:
        """Drafts of the drafter that are verified in this step; None: all."""
        return self.inner.budget if self.drafter_depth != 0 else None

    @property
    def timed(self) -> bool:
        """Whether somebody learns from what this step takes: where no drafter drafts, the suffix choice does."""
        if self.inner.timed:
            return True
        if self.shapes is not None and not self.looks_up:
            return False
        return self.drafter_depth == 0 or isinstance(self.inner, NoProposer)

    def follows(self, seq: SequenceState) -> bool:
        """Whether the drafter reads along."""
        return self.inner.follows(seq)

    def admit(self, seq: SequenceState) -> None:
        """Take note of a request that came."""
        self.inner.admit(seq)
        if seq.request.speculation.by_suffix:
            self.drafts.admit(seq)

    def take_released(self) -> list[SequenceState]:
        """Requests that the drafter does not follow any longer."""
        return self.inner.take_released()

    def drift_due(self) -> bool:
        """Whether it is time to look at a round of the drafter."""
        return self.inner.drift_due()

    def probe_drift(self, rows: Sequence[ScheduledRow], states_of: StatesOf | None = None) -> None:
        """Look at one of the rounds of a step in which the drafter drafts."""
        self.inner.probe_drift([row for row in rows if row.seq.key not in self._taken], states_of)

    def follow_drift(self, seqs: Sequence[SequenceState], drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Take the fate of the drafter's chains."""
        self.inner.follow_drift(seqs, drafted, accepted)

    def take_states(self, result: VerifyResult, nodes: Sequence[int], output: TargetOutput) -> None:
        """Keep the states of what a row has read."""
        self.inner.take_states(result, nodes, output)

    def catch_up(self, rows: Sequence[ScheduledRow]) -> None:
        """Read what would make somebody wait later."""
        self.inner.catch_up(rows)

    def rehearse(self) -> None:
        """Do for the first time what takes longer then."""
        self.inner.rehearse()

    def forget(self, key: int, *, ended: bool = True) -> None:
        """Drop what is kept for a request that ended; preemption takes nothing from its text."""
        self.inner.forget(key, ended=ended)
        if ended:
            self.drafts.forget(key)
            self._pace.forget(key)

    # --- the step ----------------------------------------------------------------------------------------------

    def draft_slots(self, decoding: Sequence[SequenceState]) -> dict[int, int]:
        """How many drafts there should be room for behind each request that decodes."""
        if self.shapes is not None:
            return self._round_slots(decoding, self.shapes)
        self._offers, self._behind = {}, {}
        self._batch = batch = DecodingBatch(
            rows=len(decoding),
            context=sum(len(seq.tokens) for seq in decoding),
            drafting=sum(self.inner.follows(seq) for seq in decoding),
        )
        deepest = self.drafts.config.deepest
        self._pays = bool(decoding) and self._choice.may_pay(batch, deepest, self._rate())
        due = self._due(decoding, worth=self._pays, in_turn=batch.rows > 1)
        for seq in due:
            depth = seq.request.speculation.depth
            most = deepest if depth is None else depth
            offer = self.drafts.offer(seq, min(most, seq.limit - len(seq.tokens) - 1))
            if offer is not None:
                self._offers[seq.key] = offer
        survivals = {key: self.drafts.acceptance.survivals(key, offer) for key, offer in self._offers.items()}
        self._taken = self._choice.take(batch, survivals, bound=self.drafts.bound, drafter=self._promise())
        for seq in due:
            self._pace.note(seq.key, sent=seq.key in self._taken)
        if isinstance(self.inner, Proposer):
            self.inner.left_out = frozenset(self._taken)
        self._inner_slots = self.inner.draft_slots(decoding)
        slots = dict(self._inner_slots)
        if self._inner_slots and self._pays and self.round_tree is None and self._is_chain():
            for seq in decoding:
                if slots.get(seq.key) and seq.request.speculation.by_suffix:
                    slots[seq.key] += MOST_BEHIND_A_CHAIN
        return slots | self._taken

    def _due(self, decoding: Sequence[SequenceState], *, worth: bool, in_turn: bool = True) -> list[SequenceState]:
        """Who is looked up in this step: who must be, and where that may be worth it the others, each in turn."""
        return [
            seq
            for seq in decoding
            if seq.key in self.drafts.bound
            or (seq.request.speculation.by_suffix and worth and (not in_turn or self._pace.due(seq.key)))
        ]

    def _round_slots(self, decoding: Sequence[SequenceState], shapes: CapturedShapes) -> dict[int, int]:
        """The same for a round on the device, which is launched before the one before it has landed."""
        self.looks_up = len(decoding) <= MOST_IN_A_ROUND and self._gate.is_open(len(decoding))
        if not self.looks_up and not self.drafts.bound:
            # As if there were none: where nothing is looked up, nothing else may take the host time.
            self.round_offers, self.drafter_depth, self._taken = {}, None, {}
            return self._slots_of_drafter(decoding)
        due = self._due(decoding, worth=self.looks_up)
        slots = self._slots_of_round(decoding, due, shapes)
        longest = FEW_ROUNDS_OUT if len(decoding) <= OFFERED_ROWS else MOST_ROUNDS_OUT
        for seq in due:
            offer = self.round_offers.get(seq.key)
            self._pace.note(seq.key, sent=offer is not None and offer.sent, longest=longest)
        return slots

    def _slots_of_round(
        self, decoding: Sequence[SequenceState], due: Sequence[SequenceState], shapes: CapturedShapes
    ) -> dict[int, int]:
        """What those are offered that are due to be looked up, and what the drafter does.

        Either all drafts of a round are suffix drafts, and the drafter does not run; or it runs for all, as it does
        without any, suffix drafts that promise more are verified in the place of its own, for free, and where it is
        worth a larger pass they go on behind chains that say the same.
        """
        self.round_offers, self.drafter_depth, self._taken = {}, None, {}
        if not due:
            return self._slots_of_drafter(decoding)
        depths = shapes.offered_for(len(decoding)) if len(decoding) <= MOST_IN_A_ROUND else []
        forced = 0
        for seq in due if depths else ():
            speculation = seq.request.speculation
            ahead = sum(flight.most for flight in seq.flights)
            most = min(depths[-1], speculation.depth or depths[-1])
            left = seq.limit - len(seq.tokens) - 1
            offer = self.drafts.offer(seq, min(most, left - ahead), under_way=ahead) if left > ahead else None
            if offer is not None:
                self.round_offers[seq.key] = RoundOffer(known=len(seq.tokens), ahead=ahead, most=most, offer=offer)
                forced = max(forced, min(speculation.depth or 0, depths[-1]))
        survivals = {
            key: self.drafts.acceptance.survivals(key, offer.offer, least=POLICY.suffix_least_chance)[offer.ahead :]
            for key, offer in self.round_offers.items()
        }
        context = sum(len(seq.tokens) for seq in decoding)
        batch = DecodingBatch(rows=max(1, len(decoding)), context=context)
        depth = 0
        if not any(seq.speculates and seq.request.speculation.depth for seq in decoding):  # whom the drafter must serve
            depth = forced or self._choice.round_depth(batch, shapes, survivals.values(), self._plan_rate)
        if depth:
            self.inner.stand_aside()
            self.drafter_depth = 0
            slots = {key: depth for key, chances in survivals.items() if chances}
            self._send(slots)
            return self._within_most(slots)
        slots = dict(self._slots_of_drafter(decoding))
        deepest = max(slots.values(), default=0)
        if deepest and self.round_tree is None and self.budget is None:
            self._add_to_drafter(slots, survivals, batch, shapes, deepest)
        return slots

    def _slots_of_drafter(self, decoding: Sequence[SequenceState]) -> dict[int, int]:
        """What the drafter alone would do."""
        slots = self.inner.draft_slots(decoding)
        if self.inner.chosen is not None:
            self._plan_rate = self._rate()
        return slots

    def _add_to_drafter(
        self,
        slots: dict[int, int],
        survivals: Mapping[int, Sequence[float]],
        batch: DecodingBatch,
        shapes: CapturedShapes,
        depth: int,
    ) -> None:
        """Offers for a round in which the drafter drafts so deep: in the place of its drafts, or behind them."""
        own = {key: self._of_drafter(key, slots.get(key, 0)) for key, chances in survivals.items() if chances}
        instead = [
            key
            for key, drafts in own.items()
            if not drafts or sum(survivals[key][: len(drafts)]) > POLICY.suffix_over_drafter * sum(drafts)
        ]
        self._send(instead)
        for key in instead:
            slots[key] = slots.get(key) or depth  # which the pass has for every row
        behind = {}
        for key, drafts in own.items():
            # Both are right, as if they knew nothing of each other; what the text has behind is right as ever then.
            reached = 1.0 if key in instead else drafts[-1]
            behind[key] = [reached * chance for chance in survivals[key][slots[key] :]]
        deeper = self._choice.round_beyond(batch, shapes, depth, behind.values(), self._plan_rate)
        if deeper > depth:
            self.drafter_depth = depth
            self._send([key for key in own if key not in instead], confirmed=True)
            slots |= self._within_most(dict.fromkeys(own, deeper))

    def _within_most(self, slots: Mapping[int, int]) -> dict[int, int]:
        """No more than requests may have that were looked up."""
        return {key: min(depth, self.round_offers[key].most) for key, depth in slots.items()}

    def _send(self, keys: Iterable[int], *, confirmed: bool = False) -> None:
        """Let the offers of these be drafted."""
        for key in keys:
            self.round_offers[key] = replace(self.round_offers[key], sent=True, confirmed=confirmed)

    def _of_drafter(self, key: int, depth: int) -> Sequence[float]:
        """The chances of so many of the drafter's drafts to be accepted at all."""
        acceptance = self._controller.acceptance
        (level,) = acceptance.levels([key])
        return acceptance.survivals(level)[:depth]

    def learn_offer(self, seq: SequenceState, offer: RoundOffer) -> None:
        """Take what came in the place of an offer."""
        self.drafts.acceptance.observe(seq.key, offer.offer, seq.tokens[offer.known :])

    def learn_round(self, rows: int, *, looked_up: bool, tokens: int, seconds: float) -> None:
        """Take what a round that only decoded gave, and how long after the one before it."""
        if rows <= MOST_IN_A_ROUND:
            self._gate.observe(rows, looked_up=looked_up, tokens=tokens, seconds=seconds)

    @property
    def lookups_by_requests(self) -> dict[int, dict[str, Any]]:
        """Whether so many requests of a round are looked up, and why."""
        return self._gate.report()

    def propose(self, rows: Sequence[ScheduledRow], report: StepReport) -> Mapping[int, Draft]:
        """Suffix drafts for some rows, the drafter's for others, and what the text has behind them."""
        asked = []
        drafts: dict[int, Draft] = {}
        for row in rows:
            key = row.seq.key
            if row.drafts and key in self._taken:
                offer = self._offers[key].cut(min(self._taken[key], row.drafts))
                drafts[key] = self._allowed(row.seq, self._chain(key, offer))
            elif row.drafts:
                asked.append(_with_room(row, self._inner_slots.get(key, 0)))
        if asked:
            drafts |= self.inner.propose(asked, report)
            made = sum(len(draft.tokens) for draft in drafts.values())
            for row in rows:
                key = row.seq.key
                room = row.drafts - self._inner_slots.get(key, 0)
                if room > 0 and key not in self._taken and key in drafts and row.seq.request.speculation.by_suffix:
                    drafts[key] = self._continued(row.seq, drafts[key], room, made)
                    made += drafts[key].by_suffix
        return drafts

    def settle(self, result: VerifyResult, *, ended: bool, report: StepReport) -> None:
        """Learn from what came, and tell the inner proposer of its own drafts."""
        key, draft = result.row.seq.key, result.draft
        acceptance, own = self.drafts.acceptance, draft.by_drafter
        if key in self._offers:
            acceptance.observe(key, self._offers[key], result.tokens)
        if key in self._behind and len(result.nodes) >= own:
            acceptance.observe(key, self._behind[key], result.tokens[own:])
        if key in self._taken:
            row = _with_room(result.row, 0)
            result = replace(result, row=row, draft=NO_DRAFT, nodes=[], tokens=result.tokens[:1])
        elif draft.by_suffix:
            row = _with_room(result.row, self._inner_slots.get(key, 0))
            nodes, tokens = result.nodes[:own], result.tokens[: own + 1]
            result = replace(result, row=row, draft=draft.only(range(own)), nodes=nodes, tokens=tokens)
        self.inner.settle(result, ended=ended, report=report)

    def _promise(self) -> DrafterPromise | None:
        """What the drafter would do instead."""
        if not isinstance(self.inner, Proposer):
            return None
        controller = self._controller
        return DrafterPromise(acceptance=controller.acceptance, deepest=controller.drift.deepest, rate=self._rate())

    def _rate(self) -> float:
        """Tokens per second that the drafter's latest plan promises."""
        chosen = self.inner.chosen
        return 0.0 if chosen is None or chosen.under_way is None else chosen.under_way.rate

    def _is_chain(self) -> bool:
        """Whether the drafter drafts chains in this step: behind a tree there is no one place to go on."""
        chosen = self.inner.chosen
        return chosen is not None and chosen.shape.kind == "chain"

    def _continued(self, seq: SequenceState, draft: Draft, room: int, made: int) -> Draft:
        """A drafter's chain with what the text has behind it, as far as that is worth verifying."""
        if not draft.tokens or not draft.is_chain:
            return draft
        room = min(room, seq.limit - len(seq.tokens) - 1 - len(draft.tokens))
        found = self._offers.get(seq.key)
        agreed = found is not None and found.agrees(draft.tokens)
        offer = self.drafts.offer(seq, room, draft.tokens, agreed=agreed) if room > 0 else None
        if offer is None:
            return draft
        sure = self._controller.acceptance.chances_of(draft.confidences)
        if found is not None and agreed:
            # Two that know nothing of each other say the same: it is wrong only if both are.
            also = [*self.drafts.acceptance.chances(seq.key, found), *[0.0] * len(sure)]
            sure = [1 - (1 - one) * (1 - other) for one, other in zip(sure, also, strict=False)]
        reached = prod(sure)
        chances = self.drafts.acceptance.chances(seq.key, offer)
        survivals = [survival * reached for survival in accumulate(chances, mul)]
        count = self._choice.extend(self._batch, made, survivals, self._rate())
        if not count:
            return draft
        self._behind[seq.key] = offer = offer.cut(count)
        longer = Draft(
            tokens=draft.tokens + offer.tokens,
            parents=tuple(range(-1, len(draft.tokens) + count - 1)),
            confidences=draft.confidences + tuple(chances[:count]),
            candidates=draft.candidates,
            by_suffix=count,
        )
        return self._allowed(seq, longer)

    def _chain(self, key: int, offer: SuffixOffer) -> Draft:
        count = len(offer.tokens)
        return Draft(
            tokens=offer.tokens,
            parents=tuple(range(-1, count - 1)),
            confidences=tuple(self.drafts.acceptance.chances(key, offer)),
            by_suffix=count,
        )

    def _allowed(self, seq: SequenceState, draft: Draft) -> Draft:
        """What the request's grammar allows of it."""
        return draft if seq.matcher is None else filter_by_grammar(draft, seq.matcher, seq.tokens)


def _with_room(row: ScheduledRow, drafts: int) -> ScheduledRow:
    """A row with room for no more drafts than these."""
    return ScheduledRow(row.seq, row.start, row.count, min(row.drafts, drafts), row.samples)
