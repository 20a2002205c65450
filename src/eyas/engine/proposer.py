"""The drafting half of a step: what is asked of the drafter, for whom and by which means.

draft_slots  how many tokens behind each request there should be room for, by the controller's choice
propose      the drafter reads what the target has seen since, and drafts: chains or trees. Of what it drafts, the
             controller keeps what is worth verifying, and grammars what they allow
settle       what the target said about the drafts of a row
catch_up     what else the drafter reads, so that nobody waits for it later

Where rounds live on the device (`round_loop.py`), it is asked for the choice alone.

An engine without a drafter has a `NoProposer`, which proposes nothing.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Protocol

from torch import Tensor

from eyas.engine.drift_probe import DriftProbe
from eyas.engine.grammar.base import filter_by_grammar
from eyas.engine.request import SequenceState
from eyas.engine.runner.drafter import LUMP, DrafterRunner
from eyas.engine.runner.hidden_states import HiddenStates
from eyas.engine.scheduler import ScheduledRow, Scheduler
from eyas.engine.speculation.controller import Choice, Controller, RowFacts
from eyas.engine.speculation.draft import Draft, Tree
from eyas.engine.speculation.observations import DraftTiming
from eyas.engine.speculation.policy import POLICY
from eyas.engine.speculation.step_report import StepReport
from eyas.engine.speculation.suffix_acceptance import RoundOffer
from eyas.engine.verify import TargetOutput, VerifyResult, outcome_of, sampling_metadata, states_of

StatesOf = Callable[[SequenceState], Tensor]
"""The states [T, X] of a request that wait for the drafter."""


class Proposes(Protocol):
    """What the engine asks of a proposer."""

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """Layers of the target whose states are needed."""

    @property
    def chosen(self) -> Choice | None:
        """What was chosen for this step; None: nothing decodes, or it is like the last that was chosen for."""

    @property
    def repeated(self) -> Choice | None:
        """What this step is like, if it is one of the first that are like one that was chosen for."""

    @property
    def round_tree(self) -> Tree | None:
        """What the requests of a round grow; None: chains."""

    @property
    def budget(self) -> int | None:
        """Drafts of all requests on auto together that are verified in this step; None: all."""

    @property
    def timed(self) -> bool:
        """Whether somebody learns from what this step takes."""

    @property
    def drafter_depth(self) -> int | None:
        """How deep the drafter drafts in a round at most: None as deep as rows have room, 0 not at all."""

    @property
    def round_offers(self) -> Mapping[int, RoundOffer]:
        """What was looked up for requests of a round."""

    def learn_offer(self, seq: SequenceState, offer: RoundOffer) -> None:
        """Take what came in the place of an offer, now that the round's tokens are committed."""

    @property
    def looks_up(self) -> bool:
        """Whether requests of a round may be looked up."""

    def learn_round(self, rows: int, *, looked_up: bool, tokens: int, seconds: float) -> None:
        """Take what a round that only decoded gave, and how long after the one before it."""

    def follows(self, seq: SequenceState) -> bool:
        """Whether the drafter reads along."""

    def admit(self, seq: SequenceState) -> None:
        """Take note of a request that came, and decide whether the drafter follows it."""

    def take_released(self) -> list[SequenceState]:
        """Requests that the drafter does not follow any longer, and whose memory of states nobody reads."""

    def draft_slots(self, decoding: Sequence[SequenceState]) -> dict[int, int]:
        """How many drafts there should be room for behind each request that decodes."""

    def drift_due(self) -> bool:
        """Whether it is time to look at a round, which needs all that was launched to have landed. Once a step."""

    def probe_drift(self, rows: Sequence[ScheduledRow], states_of: StatesOf | None = None) -> None:
        """Look at one of the rounds of a step, if it is time to. What waits is kept here, or told by `states_of`."""

    def follow_drift(self, seqs: Sequence[SequenceState], drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Take the fate of chains of drafts, now that their tokens are committed. Some requests may have ended."""

    def propose(self, rows: Sequence[ScheduledRow], report: StepReport) -> Mapping[int, Draft]:
        """Drafts for the rows of a pass, by request, as far as they have room for some."""

    def take_states(self, result: VerifyResult, nodes: Sequence[int], output: TargetOutput) -> None:
        """Keep the states of what a row has read, the accepted drafts `nodes` included, until they are read."""

    def settle(self, result: VerifyResult, *, ended: bool, report: StepReport) -> None:
        """Take what the target said about a row's drafts, now that its tokens are committed."""

    def catch_up(self, rows: Sequence[ScheduledRow]) -> None:
        """Read what would make somebody wait later."""

    def rehearse(self) -> None:
        """Do for the first time what takes longer then."""

    def forget(self, key: int, *, ended: bool = True) -> None:
        """Drop what is kept for a request that ended, or lost its blocks."""


class NoProposer:
    """Drafts nothing, for an engine without a drafter."""

    layer_ids: tuple[int, ...] = ()
    chosen: Choice | None = None
    repeated: Choice | None = None
    round_tree: Tree | None = None
    budget: int | None = None
    timed = False
    drafter_depth: int | None = 0
    round_offers: Mapping[int, RoundOffer] = MappingProxyType({})
    looks_up = False

    def learn_offer(self, seq: SequenceState, offer: RoundOffer) -> None:
        """There are none."""

    def learn_round(self, rows: int, *, looked_up: bool, tokens: int, seconds: float) -> None:
        """It is nobody's concern."""

    def follows(self, seq: SequenceState) -> bool:
        """Nobody reads along."""
        return False

    def admit(self, seq: SequenceState) -> None:
        """Nobody follows it."""

    def take_released(self) -> list[SequenceState]:
        """None was followed."""
        return []

    def draft_slots(self, decoding: Sequence[SequenceState]) -> dict[int, int]:
        """No room for drafts."""
        return {}

    def stand_aside(self) -> None:
        """It always does."""

    def drift_due(self) -> bool:
        """Never."""
        return False

    def probe_drift(self, rows: Sequence[ScheduledRow], states_of: StatesOf | None = None) -> None:
        """Nothing drifts."""

    def follow_drift(self, seqs: Sequence[SequenceState], drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """There were no drafts."""

    def propose(self, rows: Sequence[ScheduledRow], report: StepReport) -> Mapping[int, Draft]:
        """Nothing."""
        return {}

    def take_states(self, result: VerifyResult, nodes: Sequence[int], output: TargetOutput) -> None:
        """None are needed."""

    def settle(self, result: VerifyResult, *, ended: bool, report: StepReport) -> None:
        """There were no drafts."""

    def catch_up(self, rows: Sequence[ScheduledRow]) -> None:
        """Nothing waits."""

    def rehearse(self) -> None:
        """Nothing to rehearse."""

    def forget(self, key: int, *, ended: bool = True) -> None:
        """Nothing is kept."""


class Proposer:
    """Drafts for the requests of a step by one drafter."""

    drafter_depth: int | None = None
    round_offers: Mapping[int, RoundOffer] = MappingProxyType({})
    looks_up = False

    def __init__(
        self,
        drafter: DrafterRunner,
        controller: Controller,
        scheduler: Scheduler,
        *,
        layer_ids: tuple[int, ...],
        drift_probe: DriftProbe,
        tree: Tree | None,
        clock: Callable[[], float],
    ) -> None:
        self.layer_ids, self.drafter, self.drift_probe = layer_ids, drafter, drift_probe
        self.rounds = False
        """Whether chains are drafted and verified on the device in one go (`round_loop.py`)."""
        self._drafter, self._controller, self._scheduler = drafter, controller, scheduler
        self._forced_tree, self._clock = tree, clock
        self.chosen: Choice | None = None
        """What was chosen for this step; None: nothing decodes, or it is like the last that was chosen for."""
        self.repeated: Choice | None = None
        """What it is like, if it is one of the first such steps."""
        self.round_tree: Tree | None = None
        """What the requests of a round grow, where rounds live on the device; None: chains."""
        self._choice: Choice | None = None
        self._slots: dict[int, int] = {}
        """Room for drafts by it."""
        self._usual_slots = 0
        """The same for a request on auto: where rounds live on the device, all of them draft alike."""
        self._steps = 0
        """Since that choice."""
        self._drafting = 0
        """Requests that it drafts for."""
        self._look_due = False
        self._released: list[SequenceState] = []
        self.left_out: frozenset[int] = frozenset()
        """Requests that the drafter does not draft for in the next step, since they have better drafts."""
        self._chosen_without = self.left_out
        """The same when the choice in force was made."""

    @property
    def timed(self) -> bool:
        """Whether the controller learns from what this step takes: it was chosen for."""
        return self.chosen is not None

    def follows(self, seq: SequenceState) -> bool:
        """Whether the drafter reads along."""
        return seq.speculates

    def admit(self, seq: SequenceState) -> None:
        """Let the drafter follow a request on auto unless it rests."""
        if _is_on_auto(seq):
            seq.speculates = self._controller.follows_new()

    def learn_offer(self, seq: SequenceState, offer: RoundOffer) -> None:
        """There are none."""

    def learn_round(self, rows: int, *, looked_up: bool, tokens: int, seconds: float) -> None:
        """It is nobody's concern."""

    def take_released(self) -> list[SequenceState]:
        """Requests that the drafter does not follow any longer."""
        released, self._released = self._released, []
        return released

    def _release(self, seqs: Sequence[SequenceState]) -> None:
        """A drafter that rests leaves requests on auto alone, to their end: they cost what they would without one."""
        for seq in seqs:
            if _is_on_auto(seq):
                seq.speculates = False
                self._drafter.forget(seq.key)
                self._released.append(seq)

    def draft_slots(self, decoding: Sequence[SequenceState]) -> dict[int, int]:
        """How many drafts there should be room for behind each request that decodes."""
        self.chosen = self.repeated = None
        if not decoding:
            return {}
        if self._holds and self._fits(decoding):
            self._steps += 1
            self.repeated = self._choice if self._steps <= 1 + POLICY.timed_repeats else None
            return self._slots if self._drafting else {}
        facts = [_facts(seq, drafts=seq.key not in self.left_out) for seq in decoding]
        self._chosen_without = self.left_out
        self._choice = self.chosen = choice = self._controller.choose(facts, after=max(1, self._steps))
        self._steps = 1
        if choice.rests:
            self._release(decoding)
        # Nobody looks on the way while the device drafts.
        limits = choice.depths if self.rounds else choice.limits
        if self.rounds:
            self.round_tree = self._tree_of_round(decoding)
        self._slots, self._usual_slots = {}, 0
        for seq, limit in zip(decoding, limits, strict=True):
            tree = self.round_tree
            if not self.rounds and limit:
                tree = self._tree(seq)
            self._slots[seq.key] = limit if tree is None or not limit else tree.slots
            if _is_on_auto(seq):
                self._usual_slots = self._slots[seq.key]
        self._drafting = sum(1 for limit in limits if limit)
        return self._slots if self._drafting else {}

    def stand_aside(self) -> None:
        """The next step has drafts from elsewhere: nothing is chosen for it, and the choice in force stays."""
        self.chosen = self.repeated = None

    @property
    def _holds(self) -> bool:
        """Whether the choice in force is meant for one step more."""
        return self._choice is not None and self._steps < self._choice.holds and not self._controller.surprised

    def _fits(self, decoding: Sequence[SequenceState]) -> bool:
        """Whether the choice in force is one for these requests: about as many, and none that it says nothing about.

        New ones on auto draft as the others do.
        """
        if abs(len(decoding) - len(self._slots)) > len(self._slots) // 4 or self.left_out != self._chosen_without:
            return False
        new = [seq for seq in decoding if seq.key not in self._slots]
        if self._choice is not None and self._choice.rests:
            return not any(seq.speculates for seq in new)
        if any(seq.request.speculation.depth for seq in new) or not self._has_passes(len(decoding)):
            return False
        if self._drafting:
            self._slots |= {seq.key: self._usual_slots if _is_on_auto(seq) else 0 for seq in new}
        return True

    def _has_passes(self, rows: int) -> bool:
        """Whether the choice in force can be kept for so many: trees, and deep drafts, have passes for few of them.

        Else others would be captured now, which takes most of a second in which nobody is answered.
        """
        choice, shapes = self._choice, self._controller.costs.shapes
        if choice is None or shapes is None or not self._drafting:
            return True
        if shapes.rows_for(rows) <= shapes.rows_for(len(choice.depths)):
            return True
        return shapes.have(rows, choice.shape, max(choice.depths))

    @property
    def budget(self) -> int | None:
        """Drafts of all requests on auto together that are verified in this step; None: all."""
        return None if self._choice is None else self._choice.budget

    def drift_due(self) -> bool:
        """Whether it is time to look at a round."""
        self._look_due = self.drift_probe.due(self._drafting)
        return self._look_due

    def probe_drift(self, rows: Sequence[ScheduledRow], states_of: StatesOf | None = None) -> None:
        """Look at one of the rounds of a step, if it is time to."""
        seqs = [row.seq for row in rows if row.drafts]
        if states_of is None:
            if self.drift_probe.due(len(seqs)):
                self.drift_probe.look(seqs)
        elif seqs and self._look_due:
            seq = min(seqs, key=self.drift_probe.last_look)
            aux_TX = states_of(seq)
            self._drafter.states.add(seq, HiddenStates(aux_TX, 0, len(aux_TX)))
            self.drift_probe.look([seq])
            self._drafter.states.forget(seq.key)
            self._look_due = False

    def follow_drift(self, seqs: Sequence[SequenceState], drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Take the fate of chains of drafts."""
        self.drift_probe.follow_chains(seqs, drafted, accepted)

    def propose(self, rows: Sequence[ScheduledRow], report: StepReport) -> Mapping[int, Draft]:
        """Chains or trees for the rows of a pass, as far as they have room for some."""
        rows = [row for row in rows if row.drafts]
        if not rows:
            return {}
        shapes, seqs, keys = self._shapes(rows), [row.seq for row in rows], [row.seq.key for row in rows]
        controller, started, reads = self._controller, self._clock(), _unread(seqs)
        choice = self._choice
        assert choice is not None, "drafts have room by choice"
        first: tuple[int, float] | None = None

        def continue_drafting(keys: Sequence[int], confidences: Sequence[Sequence[float]]) -> list[bool]:
            nonlocal first
            if first is None:
                first = reads, self._clock() - started
            return controller.while_drafting.continue_drafting(choice, keys, confidences)

        self.read(seqs)
        if shapes is None:
            limits = [row.drafts for row in rows]
            drafts = self._drafter.chain(seqs, limits, sampling_metadata, continue_drafting, look=self._look)
            offered = self._kept(choice, rows, drafts)
            deepest = max(draft.depth for draft in drafts)
            deeper = sum(draft.depth - 1 for draft in drafts)  # the first draft comes of the reading itself
        else:
            drafts = self._drafter.tree(seqs, shapes, sampling_metadata, look=self._look)
            nodes: Sequence[Collection[int]] = [range(len(draft.tokens)) for draft in drafts]
            if self._forced_tree is None:
                sure = [draft.confidences for draft in drafts]
                nodes = controller.while_drafting.prunes(choice, keys, [draft.parents for draft in drafts], sure)
            offered = {key: draft.only(kept) for key, draft, kept in zip(keys, drafts, nodes, strict=True)}
            deepest, deeper = max(shape.depth for shape in shapes), sum(shape.grown for shape in shapes)
        seconds = self._clock() - started
        report.draft = DraftTiming(
            passes=deepest, tokens=reads + deeper, seconds=seconds, first=first, trees=shapes is not None
        )
        return self._allowed(seqs, offered)

    def _kept(self, choice: Choice, rows: Sequence[ScheduledRow], drafts: Sequence[Draft]) -> dict[int, Draft]:
        """Of each row's chain what the controller finds worth verifying."""
        keys = [row.seq.key for row in rows]
        kept = self._controller.while_drafting.keeps(choice, keys, [draft.confidences for draft in drafts])
        return {key: draft.only(range(count)) for key, draft, count in zip(keys, drafts, kept, strict=True)}

    def _allowed(self, seqs: Sequence[SequenceState], offered: dict[int, Draft]) -> dict[int, Draft]:
        """Of each draft what the request's grammar allows."""
        laws = {
            seq.key: filter_by_grammar(offered[seq.key], seq.matcher, seq.tokens)
            for seq in seqs
            if seq.matcher is not None
        }
        return offered | laws

    def catch_up(self, rows: Sequence[ScheduledRow]) -> None:
        """Read prompts, and requests that have not been drafted for in a long while.

        Once one of the latter is due all are read, or as many passes would follow as there are requests. A draft
        begins with reading, so for it a state is left.
        """
        behind = [
            (row, row.seq.target_length - row.seq.drafter_length)
            for row in rows
            if row.seq.finished is None and row.seq.speculates
        ]
        due = [row.seq for row, states in behind if row.count > 1 and states >= LUMP]
        patience = self._drafter.patience(len(behind))
        if any(states >= patience for _, states in behind):
            due = [row.seq for row, _ in behind]
        if due:
            self.read(due, but_last=True)

    def take_states(self, result: VerifyResult, nodes: Sequence[int], output: TargetOutput) -> None:
        """Keep the states of what a row has read, accepted drafts `nodes` included, until the drafter reads them."""
        seq = result.row.seq
        if output.aux_NX is not None and seq.speculates:
            self._drafter.states.add(seq, states_of(result, nodes, output.aux_NX))

    def settle(self, result: VerifyResult, *, ended: bool, report: StepReport) -> None:
        """Take what the target said about a row's drafts, now that its tokens are committed."""
        seq = result.row.seq
        if result.row.drafts:
            report.rounds.append(outcome_of(seq.key, result))
        self.drift_probe.follow(seq, result.draft, len(result.nodes), ended=ended)

    def rehearse(self) -> None:
        """A first check-up takes many times what the others take."""
        self.drift_probe.rehearse()

    def forget(self, key: int, *, ended: bool = True) -> None:
        """Drop what is kept for a request that ended, or lost its blocks."""
        self._drafter.forget(key)
        if ended:
            self.drift_probe.forget(key)

    def read(self, seqs: Sequence[SequenceState], *, but_last: bool = False) -> None:
        """Let the drafter read what waits for it, perhaps all but the last state."""
        self._drafter.read(seqs, but_last=but_last)
        for seq in seqs:
            self._scheduler.note_read(seq, seq.target_length - but_last)

    @property
    def _look(self) -> int:
        """Candidates to note for every draft of this step."""
        return 1 if self._choice is None else self._choice.look

    def _shapes(self, rows: Sequence[ScheduledRow]) -> list[Tree] | None:
        """The trees to grow in this step, those of one branch included; None where every row drafts a chain."""
        trees = [self._tree(row.seq) for row in rows]
        if not any(trees):
            return None
        return [
            Tree(depth=row.drafts, width=1, budget=row.drafts) if tree is None else tree.within(row.drafts)
            for row, tree in zip(rows, trees, strict=True)
        ]

    def _tree_of_round(self, seqs: Sequence[SequenceState]) -> Tree | None:
        """The tree for all requests of a round, the shallowest of what each should grow: rounds have one shape."""
        trees = [tree for seq in seqs if (tree := self._tree(seq)) is not None]
        return min(trees, key=lambda tree: tree.depth, default=None)

    def _tree(self, seq: SequenceState) -> Tree | None:
        """The tree to grow for a request: one that is forced on all, or what the controller chose for those on auto.

        While the drift alarm fires, these grow no deeper than is healthy.
        """
        tree, auto, drift = self._forced_tree, seq.request.speculation.mode == "auto", self._controller.drift
        if tree is None and auto and self._choice is not None and self._choice.shape.kind == "tree":
            shape = self._choice.shape
            tree = Tree(depth=shape.depth, width=shape.width, budget=shape.budget)
        if tree is not None and auto and drift.firing:
            tree = replace(tree, depth=min(tree.depth, drift.deepest))
        return tree


def _unread(seqs: Sequence[SequenceState]) -> int:
    """States that the drafter has not read yet."""
    return sum(seq.target_length - seq.drafter_length for seq in seqs)


def _is_on_auto(seq: SequenceState) -> bool:
    """Whether the controller says how deep it drafts."""
    return seq.speculates and seq.request.speculation.mode == "auto"


def _facts(seq: SequenceState, *, drafts: bool) -> RowFacts:
    speculation = seq.request.speculation
    pending = seq.target_length - seq.drafter_length
    mode = speculation.mode if seq.speculates and drafts else "off"
    return RowFacts(seq.key, len(seq.tokens), mode, speculation.depth, pending)
