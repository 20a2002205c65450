"""Drafting by an EAGLE drafter: plans how deep each request drafts and queues the drafter's passes of a round.

The drafter reads lazily: target states of tokens it has not read wait in a ring buffer on the device, and the next
drafting pass reads them first. The host tracks an upper bound of how many wait. Before they could exceed the ring or
what a drafting pass reads, the drafter reads them in a catch-up pass.
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
    """Proposes draft tokens from one drafter."""

    def __init__(
        self,
        runner: RoundRunner,
        controller: Controller,
        *,
        layer_ids: tuple[int, ...],
        drift_probe: DriftProbe,
        tree: Tree | None,
    ) -> None:
        """`tree` forces draft trees of that shape."""
        self.layer_ids, self.drift_probe = layer_ids, drift_probe
        self._runner, self._controller, self._forced_tree = runner, controller, tree
        self._choice: Choice | None = None
        self._slots: dict[int, int] = {}
        """Draft slots by request, under the current choice."""
        self._usual_slots = 0
        """Draft slots of each request on auto; they all draft alike."""
        self._tree: Tree | None = None
        self._steps = 0
        self._drafting = 0
        """Number of requests that it drafts for."""
        self._look_due = False
        self._behind: list[SequenceState] = []
        """Lagging requests that will be drafted for once the drafter has caught up."""

    @property
    def needs_landing(self) -> bool:
        """Whether a drift check-up is due, which needs all launched steps to have landed."""
        self._look_due = self.drift_probe.due(self._drafting)
        return self._look_due

    def admit(self, seq: SequenceState) -> None:
        """Follow a new request on auto, unless the drafter rests."""
        if _is_on_auto(seq):
            seq.speculates = self._controller.follows_new()

    def plan(self, decoding: Sequence[SequenceState]) -> DraftPlan:
        """Plan the drafts of each request, by the current choice or a new one."""
        if not decoding:
            return PLAIN
        in_force, surprised = self._choice, self._controller.surprised
        if in_force is not None and self._steps < in_force.holds and not surprised and self._fits(decoding):
            self._steps += 1
            return self._planned()
        choice = self._controller.choose([_row_facts(seq) for seq in decoding], after=max(1, self._steps))
        self._choice, self._steps = choice, 1
        for seq in decoding if choice.rests else ():
            if _is_on_auto(seq):  # not followed for the rest of its answer, since following has a cost
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
        if self._behind:  # no drafts until they have caught up, which the scheduler arranges
            self._behind = [seq for seq in self._behind if seq.lags]
            slots = slots | {seq.key: 0 for seq in self._behind}
        return DraftPlan(slots=slots, tree=self._tree, choice=self._choice)

    def _fits(self, decoding: Sequence[SequenceState]) -> bool:
        """Whether the current choice suits these requests: a similar number, and no new one with a fixed depth.

        New requests on auto draft as the others do.
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
        """Whether graphs exist for the current choice with so many rows; trees and deep chains have few.

        Otherwise they would be captured now, which stalls all requests for most of a second.
        """
        choice, shapes = self._choice, self._runner.shapes
        if choice is None or not self._drafting:
            return True
        if shapes.rows_for(rows) <= shapes.rows_for(len(choice.depths)):
            return True
        return shapes.have(rows, choice.shape, max(choice.depths))

    def _tree_of_round(self, seqs: Sequence[SequenceState], choice: Choice) -> Tree | None:
        """The tree shape of a round: the forced one, or the chosen one.

        While the drift alarm fires, trees are cut to the healthy depth if any request is on auto.
        """
        tree, drift = self._forced_tree, self._controller.drift
        if all(seq.request.speculation.mode != "auto" for seq in seqs):
            return tree
        if tree is None and choice.shape.kind == "tree":
            tree = Tree.of(choice.shape)
        if tree is not None and drift.firing:
            tree = replace(tree, depth=min(tree.depth, drift.deepest))
        return tree

    def draft(self, round_: Round, plan: DraftPlan) -> None:
        """Queue the catch-up and drafting passes of a decoding round, after a drift check-up if one is due."""
        if round_.of_prompts:
            return
        if self._look_due:
            self._look_due = False
            seqs = [row.seq for row in round_.rows if row.drafts and row.seq.followed]
            if seqs:
                seq = min(seqs, key=self.drift_probe.last_look)
                self.drift_probe.look(seq, self._runner.states_of(seq))
        runner, graphs, slot_R, depth = self._runner, self._runner.graphs, round_.slot_R, round_.drafter_depth
        waits, follows = runner.waiting[slot_R].tolist(), runner.follows[slot_R].tolist()
        waiting = max(states if followed else 0 for states, followed in zip(waits, follows, strict=True))
        reads = 1 + depth
        if depth and graphs.exact:
            reads = max(1, waiting)
        elif depth and waiting > reads:
            reads = graphs.most_reads(round_.bucket)
        late = waiting > reads if depth else waiting + 1 + round_.depth > runner.state.most_waiting
        catch_up = graphs.catching_up(round_.bucket, round_.blocks) if late else None
        draft = self._pass_of(round_, 1 + depth if late else reads) if depth else None
        runner.send_rows(round_)
        round_.catch_up_seconds = runner.queue_timed(catch_up)
        round_.draft_seconds = runner.queue_timed(draft)
        known = [0 if depth else 1 if late else states for states in waits]
        drafts = zip(known, round_.drafts, strict=True)
        runner.waiting[slot_R] = [states + 1 + min(most, round_.depth) for states, most in drafts]
        round_.drafter_reads = bool(late or depth)

    def _pass_of(self, round_: Round, reads: int) -> Callable[[], object]:
        runner, graphs = self._runner, self._runner.graphs
        if round_.trees is not None:
            return graphs.drafting_trees(round_.trees, round_.blocks, reads, round_.needs)
        # With a step in flight, the grammar's state is not known yet.
        heeds = round_.masked and graphs.exact and runner.synchronous
        mask = draft_mask(round_, runner.model.vocab_size) if heeds else None
        return graphs.drafting(round_.bucket, round_.blocks, reads, round_.drafter_depth, round_.needs, mask=mask)

    def observe(self, report: StepReport) -> None:
        self.drift_probe.follow(report.chains)
        self._controller.observe(report)

    def forget(self, key: int) -> None:
        self.drift_probe.forget(key)

    def warm_up(self) -> None:
        """Run the first drift check-up, which is much slower than later ones."""
        self.drift_probe.warm_up()


def _is_on_auto(seq: SequenceState) -> bool:
    """Whether the controller chooses its depth."""
    return seq.speculates and seq.request.speculation.mode == "auto"


def _row_facts(seq: SequenceState) -> RowFacts:
    speculation = seq.request.speculation
    pending = seq.target_length - seq.drafter_length
    return RowFacts(seq.key, len(seq.tokens), speculation.mode if seq.speculates else "off", speculation.depth, pending)
