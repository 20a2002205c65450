"""Drafts by one drafter: the controller says how deep, and the drafter's passes of a round are queued here.

Reading is lazy: the target's states of tokens that the drafter has not read wait in a ring on the device, and a pass
that drafts reads them first. The host keeps a bound of how many may wait. Before they could outgrow the ring, or what a
draft reads, the drafter reads them in a pass of its own.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from eyas.engine.drift_probe import DriftProbe
from eyas.engine.masks import draft_mask
from eyas.engine.proposer import PLAIN, DraftPlan, Proposer
from eyas.engine.request import SequenceState
from eyas.engine.runner.round import Round
from eyas.engine.runner.round_runner import RoundRunner
from eyas.engine.speculation.choice import Choice
from eyas.engine.speculation.controller import Controller, RowFacts
from eyas.engine.speculation.draft import Tree
from eyas.engine.speculation.step_report import StepReport


class DrafterProposer(Proposer):
    """Drafts for the requests of a step."""

    def __init__(
        self,
        runner: RoundRunner,
        controller: Controller,
        *,
        layer_ids: tuple[int, ...],
        drift_probe: DriftProbe,
        tree: Tree | None,
    ) -> None:
        """With a `tree`, drafts are trees of that shape alone."""
        self.layer_ids, self.drift_probe = layer_ids, drift_probe
        self._runner, self._controller, self._forced_tree = runner, controller, tree
        self._choice: Choice | None = None
        """The choice in force."""
        self._slots: dict[int, int] = {}
        """Room for drafts by it."""
        self._usual_slots = 0
        """Room of a request on auto: all of them draft alike."""
        self._tree: Tree | None = None
        self._steps = 0
        """Since that choice."""
        self._drafting = 0
        """Requests that it drafts for."""
        self._look_due = False
        self._behind: list[SequenceState] = []
        """Requests that it would draft for if the drafter had read all of them."""

    @property
    def needs_landing(self) -> bool:
        """Whether it is time to look for drift, which needs all that was launched to have landed."""
        self._look_due = self.drift_probe.due(self._drafting)
        return self._look_due

    def admit(self, seq: SequenceState) -> None:
        """Let the drafter follow a request on auto unless it rests."""
        if _is_on_auto(seq):
            seq.speculates = self._controller.follows_new()

    def plan(self, decoding: Sequence[SequenceState]) -> DraftPlan:
        """How deep each request drafts, by the choice in force or by a new one."""
        if not decoding:
            return PLAIN
        in_force, surprised = self._choice, self._controller.surprised
        if in_force is not None and self._steps < in_force.holds and not surprised and self._fits(decoding):
            self._steps += 1
            return self._planned()
        choice = self._controller.choose([_facts(seq) for seq in decoding], after=max(1, self._steps))
        self._choice, self._steps = choice, 1
        for seq in decoding if choice.rests else ():
            if _is_on_auto(seq):  # left alone to its end: with a drafter that rests it costs what it would without
                seq.speculates = False
                self._runner.unfollow(seq)
        self._tree = self._tree_of_round(decoding, choice)
        self._slots, self._usual_slots = {}, 0
        for seq, depth in zip(decoding, choice.depths, strict=True):
            self._slots[seq.key] = depth if self._tree is None or not depth else self._tree.slots
            if _is_on_auto(seq):
                self._usual_slots = self._slots[seq.key]
            seq.catches_up = seq.lags and depth > 0
        self._behind = [seq for seq in decoding if seq.catches_up]
        self._drafting = sum(1 for depth in choice.depths if depth)
        return self._planned()

    def _planned(self) -> DraftPlan:
        slots = self._slots if self._drafting else {}
        if self._behind:  # until they have read again, which the scheduler sees to
            self._behind = [seq for seq in self._behind if seq.lags]
            slots = slots | {seq.key: 0 for seq in self._behind}
        return DraftPlan(slots=slots, tree=self._tree, choice=self._choice)

    def _fits(self, decoding: Sequence[SequenceState]) -> bool:
        """Whether the choice in force is one for these requests: about as many, and none that it says nothing about.

        New ones on auto draft as the others do.
        """
        if abs(len(decoding) - len(self._slots)) > len(self._slots) // 4:
            return False
        new = [seq for seq in decoding if seq.key not in self._slots]
        if self._choice is not None and self._choice.rests:
            return not any(seq.speculates for seq in new)
        if any(seq.request.speculation.depth for seq in new) or not self._has_passes(len(decoding)):
            return False
        if self._drafting:
            self._slots |= {seq.key: self._usual_slots if _is_on_auto(seq) else 0 for seq in new}
            for seq in new:
                seq.catches_up = seq.lags and self._slots[seq.key] > 0
            self._behind += [seq for seq in new if seq.catches_up]
        return True

    def _has_passes(self, rows: int) -> bool:
        """Whether the choice in force can be kept for so many: trees, and deep drafts, have passes for few of them.

        Else others would be captured now, which takes most of a second in which nobody is answered.
        """
        choice, shapes = self._choice, self._runner.shapes
        if choice is None or not self._drafting:
            return True
        if shapes.rows_for(rows) <= shapes.rows_for(len(choice.depths)):
            return True
        return shapes.have(rows, choice.shape, max(choice.depths))

    def _tree_of_round(self, seqs: Sequence[SequenceState], choice: Choice) -> Tree | None:
        """The tree for all requests of a round, which have one shape: one that is forced on all, or what was chosen.

        While the drift alarm fires, trees of requests on auto grow no deeper than is healthy.
        """
        tree, drift = self._forced_tree, self._controller.drift
        if all(seq.request.speculation.mode != "auto" for seq in seqs):
            return tree
        if tree is None and choice.shape.kind == "tree":
            tree = Tree.of(choice.shape)
        if tree is not None and drift.firing:
            tree = replace(tree, depth=min(tree.depth, drift.deepest))
        return tree

    def draft(self, made: Round, plan: DraftPlan) -> None:
        """Let the drafter read what must be read, and draft chains or trees; for chunks of prompts, nothing.

        Before that, one of the requests is looked at for drift, if it is time to.
        """
        if made.of_prompts:
            return
        if self._look_due:
            self._look_due = False
            seqs = [row.seq for row in made.rows if row.drafts and row.seq.followed]
            if seqs:
                seq = min(seqs, key=self.drift_probe.last_look)
                self.drift_probe.look(seq, self._runner.states_of(seq))
        runner, graphs, slot_R, depth = self._runner, self._runner.graphs, made.slot_R, made.drafter_depth
        waits, follows = runner.waiting[slot_R].tolist(), runner.follows[slot_R].tolist()
        waiting = max(states if followed else 0 for states, followed in zip(waits, follows, strict=True))
        reads = 1 + depth
        if depth and graphs.exact:
            reads = max(1, waiting)
        elif depth and waiting > reads:
            reads = graphs.most_reads(made.bucket)
        late = waiting > reads if depth else waiting + 1 + made.depth > runner.state.most_waiting
        catch_up = graphs.catching_up(made.bucket, made.blocks) if late else None
        draft = self._pass_of(made, 1 + depth if late else reads) if depth else None
        runner.send_rows(made)
        made.catch_up_seconds = runner.queue_timed(catch_up)
        made.draft_seconds = runner.queue_timed(draft)
        known = [0 if depth else 1 if late else states for states in waits]
        drafts = zip(known, made.drafts, strict=True)
        runner.waiting[slot_R] = [states + 1 + min(most, made.depth) for states, most in drafts]
        made.drafter_reads = bool(late or depth)

    def _pass_of(self, made: Round, reads: int) -> Callable[[], object]:
        runner, graphs = self._runner, self._runner.graphs
        if made.trees is not None:
            return graphs.drafting_trees(made.trees, made.blocks, reads, made.needs)
        # With a step in flight nobody knows yet what a grammar says.
        heeds = made.masked and graphs.exact and runner.synchronous
        mask = draft_mask(made, runner.model.vocab_size) if heeds else None
        return graphs.drafting(made.bucket, made.blocks, reads, made.drafter_depth, made.needs, mask=mask)

    def observe(self, report: StepReport) -> None:
        """Tell the controller, and the drift alarm."""
        self.drift_probe.follow(report.chains)
        self._controller.observe(report)

    def forget(self, key: int) -> None:
        """Drop what is kept for a request that ended."""
        self.drift_probe.forget(key)

    def warm_up(self) -> None:
        """A first look for drift takes many times what the others take."""
        self.drift_probe.warm_up()


def _is_on_auto(seq: SequenceState) -> bool:
    """Whether the controller says how deep it drafts."""
    return seq.speculates and seq.request.speculation.mode == "auto"


def _facts(seq: SequenceState) -> RowFacts:
    speculation = seq.request.speculation
    pending = seq.target_length - seq.drafter_length
    return RowFacts(seq.key, len(seq.tokens), speculation.mode if seq.speculates else "off", speculation.depth, pending)
