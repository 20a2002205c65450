"""The drafting half of a step: what is asked of the drafter, for whom and by which means, and what is learnt of it.

wanted    how many tokens behind each request there should be room for, by the controller's choice
propose   the drafter reads what the target has seen since, and drafts: chains or trees, recorded or not. Of what it
          drafts, the controller keeps what is worth verifying, and grammars what is lawful
catch_up  what else the drafter reads, so that nobody waits for it later
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from eyas.engine.controller import Choice, Controller, RowFacts
from eyas.engine.draft import LUMP, Draft, PagedDrafter, Tree
from eyas.engine.grammar import lawful
from eyas.engine.graphs import RecordedSteps, Spent
from eyas.engine.request import Live
from eyas.engine.scheduler import Row, Scheduler
from eyas.engine.verdict import Said, wanted_at


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """What the target is asked about."""

    drafts: dict[int, Draft]
    """By request; those without drafts are left out."""
    seconds: float = 0.0
    """What drafting took, a long rest made up for included; where the target has read the drafts already, of the device
    alone."""
    said: Said | None = None
    """What came of it, if it has."""


class Proposer:
    """Drafts for the requests of a step by one drafter."""

    def __init__(
        self,
        drafter: PagedDrafter,
        controller: Controller,
        scheduler: Scheduler,
        *,
        tree: Tree | None,
        clock: Callable[[], float],
    ) -> None:
        self._drafter, self._controller, self._scheduler = drafter, controller, scheduler
        self._forced_tree, self._clock = tree, clock
        self._choice: Choice | None = None
        self._chosen_for: list[int] = []
        self._steps = 0
        """Since that choice."""

    @property
    def chosen(self) -> bool:
        """Whether this step was chosen for; if not, it is like the one that was, and tells nothing new."""
        return self._steps == 1

    def wanted(self, decoding: Sequence[Live], *, recorded: bool) -> dict[int, int]:
        """How many drafts there should be room for behind each request that decodes."""
        keys = [live.key for live in decoding]
        if self._choice is not None and self._steps < self._choice.holds and keys == self._chosen_for:
            self._steps += 1
            return {}
        facts = [_facts(live) for live in decoding]
        self._choice = choice = self._controller.choose(facts, after=max(1, self._steps))
        self._chosen_for, self._steps = keys, 1
        # Nobody looks on the way while a recorded chain is drafted.
        limits = choice.depths if recorded and self._forced_tree is None else choice.limits
        slots = {}
        for live, limit in zip(decoding, limits, strict=True):
            tree = self._tree(live) if limit else None
            slots[live.key] = limit if tree is None else tree.slots
        return slots

    def propose(self, rows: Sequence[Row], recorded: RecordedSteps | None, meanwhile: Callable[[], None]) -> Proposal:
        """Drafts for the rows of a step, as far as they have room for some.

        If all of them only decode and nobody needs to look at the drafts first, a recorded step verifies them at once.
        While a device is busy, `meanwhile` is done.
        """
        drafting = [row for row in rows if row.drafts]
        if not drafting:
            return Proposal(drafts={})
        shapes = self._shapes(drafting)
        if recorded is not None and shapes is None:
            if self._unseen(rows) and recorded.drafts([row.live for row in rows]):
                proposal = self._propose_unseen(rows, recorded, meanwhile)
                if proposal is not None:
                    return proposal
            proposal = self._propose_recorded(drafting, recorded, meanwhile)
            if proposal is not None:
                return proposal
        return self._propose_eagerly(drafting, shapes)

    def _unseen(self, rows: Sequence[Row]) -> bool:
        """Whether nobody needs to look at drafts, and behind every row there could be some."""
        choice = self._choice
        return choice is not None and choice.unseen and all(_can_draft(row) for row in rows)

    def _propose_unseen(
        self, rows: Sequence[Row], recorded: RecordedSteps, meanwhile: Callable[[], None]
    ) -> Proposal | None:
        """Chains for all rows, verified already. Some may break a grammar's law; then what the target said shows it."""
        lives, limits = [row.live for row in rows], [row.drafts for row in rows]
        late = self._bring(lives, recorded)
        reads = _unread(lives)
        made = recorded.draft_and_verify(lives, limits, meanwhile)
        if made is None:
            return None
        drafts, spent, said = made
        self._note_drafts(lives, reads, limits, spent)
        offered = {live.key: draft for live, draft in zip(lives, drafts, strict=True) if draft.tokens}
        return Proposal(drafts=offered, seconds=late + spent.first + spent.further, said=said)

    def _propose_recorded(
        self, rows: Sequence[Row], recorded: RecordedSteps, meanwhile: Callable[[], None]
    ) -> Proposal | None:
        """Chains for rows that have room for drafts."""
        lives, limits = [row.live for row in rows], [row.drafts for row in rows]
        if not recorded.drafts(lives):
            return None
        late = self._bring(lives, recorded)
        reads = _unread(lives)
        made = recorded.draft(lives, limits, meanwhile)
        if made is None:
            return None
        drafts, spent = made
        self._note_drafts(lives, reads, limits, spent)
        offered = self._lawful(lives, self._kept(rows, drafts))
        return Proposal(drafts=offered, seconds=late + spent.first + spent.further)

    def _propose_eagerly(self, rows: Sequence[Row], shapes: Sequence[Tree] | None) -> Proposal:
        """Chains, or trees of these shapes, for rows that have room for drafts, every operation launched by itself."""
        lives, keys = [row.live for row in rows], [row.live.key for row in rows]
        controller, started, reads = self._controller, self._clock(), _unread(lives)
        first: tuple[int, float] | None = None

        def goes_on(keys: Sequence[int], confidences: Sequence[Sequence[float]]) -> list[bool]:
            nonlocal first
            if first is None:
                first = reads, self._clock() - started
            return controller.goes_on(keys, confidences)

        self.read(lives)
        if shapes is None:
            limits = [row.drafts for row in rows]
            drafts = self._drafter.chain(lives, limits, wanted_at, goes_on, look=self._look)
            offered = self._kept(rows, drafts)
            deepest = max(draft.depth for draft in drafts)
            deeper = sum(draft.depth - 1 for draft in drafts)  # the first draft comes of the reading itself
        else:
            drafts = self._drafter.tree(lives, shapes, wanted_at, look=self._look)
            nodes: Sequence[Collection[int]] = [range(len(draft.tokens)) for draft in drafts]
            if self._forced_tree is None:
                sure = [draft.confidences for draft in drafts]
                nodes = controller.prunes(keys, [draft.parents for draft in drafts], sure)
            offered = {key: draft.only(kept) for key, draft, kept in zip(keys, drafts, nodes, strict=True)}
            deepest, deeper = max(shape.depth for shape in shapes), sum(shape.grown for shape in shapes)
        seconds = self._clock() - started
        controller.observe_draft(deepest, reads + deeper, seconds, first, trees=shapes is not None)
        return Proposal(drafts=self._lawful(lives, offered), seconds=seconds)

    def _bring(self, lives: Sequence[Live], recorded: RecordedSteps) -> float:
        """Let all that waits for the drafter lie where recorded steps read it; too much of it is read at once.

        The seconds of that reading come back. They are told apart: taken for a part of every such pass, they would keep
        drafts from paying for as long as all that is drafted are probes, each after a rest.
        """
        strangers, seconds = recorded.strangers(lives), 0.0
        rested = [live for live in strangers if _unread([live]) > recorded.most_read]
        if rested:
            started = self._clock()
            self.read(rested, but_last=True)
            seconds = self._clock() - started
            self._controller.observe_debt(len(rested), seconds)
        if strangers:
            recorded.adopt(strangers)
        return seconds

    def _note_drafts(self, lives: Sequence[Live], reads: int, limits: Sequence[int], spent: Spent) -> None:
        """Take note of a recorded draft: all is read, and the device took so long."""
        for live in lives:
            self._scheduler.note_read(live, live.target_length)
        deeper = sum(max(0, limit - 1) for limit in limits)
        self._controller.observe_draft(spent.passes, reads + deeper, spent.first + spent.further, (reads, spent.first))

    def _kept(self, rows: Sequence[Row], drafts: Sequence[Draft]) -> dict[int, Draft]:
        """Of each row's chain what the controller finds worth verifying."""
        keys = [row.live.key for row in rows]
        kept = self._controller.keeps(keys, [draft.confidences for draft in drafts])
        return {key: draft.only(range(count)) for key, draft, count in zip(keys, drafts, kept, strict=True)}

    def _lawful(self, lives: Sequence[Live], offered: dict[int, Draft]) -> dict[int, Draft]:
        """Of each draft what the request's grammar allows."""
        laws = {live.key: lawful(offered[live.key], live.walk, live.tokens) for live in lives if live.walk is not None}
        return offered | laws

    def catch_up(self, rows: Sequence[Row]) -> None:
        """Read prompts, and requests that have not been drafted for in a long while.

        Once one of the latter is due all are read, or as many passes would follow as there are requests. A draft
        begins with reading, so for it a state is left.
        """
        behind = [
            (row, row.live.target_length - row.live.drafter_length)
            for row in rows
            if row.live.finished is None and row.live.speculates
        ]
        due = [row.live for row, states in behind if row.count > 1 and states >= LUMP]
        patience = self._drafter.patience(len(behind))
        if any(states >= patience for _, states in behind):
            due = [row.live for row, _ in behind]
        if due:
            self.read(due, but_last=True)

    def note_chunk(self, row: Row) -> None:
        """Take note of a recorded chunk: if nothing waited before it, the drafter has read all but its last state."""
        live = row.live
        if self._drafter.remembers and live.finished is None and live.speculates and live.drafter_length == row.start:
            self._drafter.keep_last(live)
            self._scheduler.note_read(live, row.start + row.count - 1)

    def read(self, lives: Sequence[Live], *, but_last: bool = False) -> None:
        """Let the drafter read what waits for it, perhaps all but the last state."""
        self._drafter.read(lives, but_last=but_last)
        for live in lives:
            self._scheduler.note_read(live, live.target_length - but_last)

    @property
    def _look(self) -> int:
        """Candidates to note for every draft of this step."""
        return 1 if self._choice is None else self._choice.look

    def _shapes(self, rows: Sequence[Row]) -> list[Tree] | None:
        """The trees to grow in this step, those of one branch included; None where every row drafts a chain."""
        trees = [self._tree(row.live) for row in rows]
        if not any(trees):
            return None
        return [
            Tree(depth=row.drafts, width=1, budget=row.drafts) if tree is None else tree.within(row.drafts)
            for row, tree in zip(rows, trees, strict=True)
        ]

    def _tree(self, live: Live) -> Tree | None:
        """The tree to grow for a request: one that is forced on all, or what the controller chose for those on auto.

        While the drift alarm fires, these grow no deeper than is healthy.
        """
        tree, auto, drift = self._forced_tree, live.request.speculation.mode == "auto", self._controller.drift
        if tree is None and auto and self._choice is not None and self._choice.shape.kind == "tree":
            shape = self._choice.shape
            tree = Tree(depth=shape.depth, width=shape.width, budget=shape.budget)
        if tree is not None and auto and drift.firing:
            tree = replace(tree, depth=min(tree.depth, drift.deepest))
        return tree


def _can_draft(row: Row) -> bool:
    """Whether a row only decodes, and the target has left states of it for the drafter to start from."""
    live = row.live
    return row.count == 1 and row.samples and live.speculates and live.drafter_length < live.target_length


def _unread(lives: Sequence[Live]) -> int:
    """States that the drafter has not read yet."""
    return sum(live.target_length - live.drafter_length for live in lives)


def _facts(live: Live) -> RowFacts:
    speculation = live.request.speculation
    return RowFacts(
        key=live.key,
        context=len(live.tokens),
        mode=speculation.mode,
        depth=speculation.depth,
        pending=live.target_length - live.drafter_length,
    )
