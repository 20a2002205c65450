"""The drafting half of a step: what is asked of the drafter, for whom and by which means, and what is learnt of it.

wanted    how many tokens behind each request there should be room for, by the controller's choice
propose   the drafter reads what the target has seen since, and drafts: chains or trees, recorded or not. Of what it
          drafts, the controller keeps what is worth verifying, and grammars what is lawful
catch_up  what else the drafter reads, so that nobody waits for it later
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from eyas.engine.controller import Choice, Controller, RowFacts
from eyas.engine.draft import LUMP, Draft, GoesOn, PagedDrafter, Tree
from eyas.engine.grammar import lawful
from eyas.engine.graphs import RecordedSteps
from eyas.engine.request import Live
from eyas.engine.scheduler import Row, Scheduler
from eyas.engine.verdict import wanted_at


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """What the target is asked about."""

    drafts: dict[int, Draft]
    """By request; those without drafts are left out."""
    made: tuple[Tensor, int] | None = None
    """What came of it, if the target has read them already: `Said.largest_RQ` and its stride."""


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

    def wanted(self, decoding: Sequence[Live], *, recorded: bool) -> dict[int, int]:
        """How many drafts there should be room for behind each request that decodes."""
        self._choice = choice = self._controller.choose([_facts(live) for live in decoding])
        # Nobody looks on the way while a recorded chain is drafted.
        limits = choice.depths if recorded and self._forced_tree is None else choice.limits
        slots = {}
        for live, limit in zip(decoding, limits, strict=True):
            tree = self._tree(live) if limit else None
            slots[live.key] = limit if tree is None else tree.slots
        return slots

    def propose(
        self, rows: Sequence[Row], recorded: RecordedSteps | None, *, everyone: bool, tell: Callable[[], None]
    ) -> Proposal:
        """Drafts for rows that have room for some. `everyone`: they are all rows of the step."""
        lives, keys = [row.live for row in rows], [row.live.key for row in rows]
        controller, started = self._controller, self._clock()
        reads = sum(live.target_length - live.drafter_length for live in lives)
        first: tuple[int, float | None] = reads, None

        def goes_on(keys: Sequence[int], confidences: Sequence[Sequence[float]]) -> list[bool]:
            nonlocal first
            if first[1] is None:
                first = reads, self._clock() - started
            return controller.goes_on(keys, confidences)

        made, shapes = None, self._shapes(rows)
        nodes: Sequence[Collection[int]]
        if shapes is None:
            limits = [row.drafts for row in rows]
            drafts, made = self._chains(lives, limits, recorded, goes_on, everyone=everyone, tell=tell)
            nodes = [range(count) for count in controller.keeps(keys, [draft.confidences for draft in drafts])]
            deepest = max(draft.depth for draft in drafts)
            deeper = sum(draft.depth - 1 for draft in drafts)  # the first draft comes of the reading itself
        else:
            self.read(lives)
            drafts = self._drafter.tree(lives, shapes, wanted_at, look=self._look)
            nodes = [range(len(draft.tokens)) for draft in drafts]
            if self._forced_tree is None:
                sure = [draft.confidences for draft in drafts]
                nodes = controller.prunes(keys, [draft.parents for draft in drafts], sure)
            deepest, deeper = max(shape.depth for shape in shapes), sum(shape.grown for shape in shapes)
        offered = {key: draft.only(kept) for key, draft, kept in zip(keys, drafts, nodes, strict=True)}
        if made is None:  # else it was verified together with drafts that may be unlawful, and says so
            seconds, trees = self._clock() - started, shapes is not None
            controller.observe_draft(deepest, reads + deeper, seconds, first, trees=trees)
            for live in lives:
                if live.walk is not None:
                    offered[live.key] = lawful(offered[live.key], live.walk, live.tokens)
        return Proposal(drafts=offered, made=made)

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
        if any(states >= self._drafter.patience(len(behind)) for _, states in behind):
            due = [row.live for row, _ in behind]
        if due:
            self.read(due, but_last=True)

    def read(self, lives: Sequence[Live], *, but_last: bool = False) -> None:
        """Let the drafter read what waits for it, perhaps all but the last state."""
        self._drafter.read(lives, but_last=but_last)
        for live in lives:
            self._scheduler.note_read(live, live.target_length - but_last)

    def _chains(
        self,
        lives: Sequence[Live],
        limits: Sequence[int],
        recorded: RecordedSteps | None,
        goes_on: GoesOn,
        *,
        everyone: bool,
        tell: Callable[[], None],
    ) -> tuple[list[Draft], tuple[Tensor, int] | None]:
        """Chains for requests, by a recorded step where there is one.

        If they are all that the target is to read, and none of them asks whether a draft is worth it, the target
        reads them at once.
        """
        drafts, made = None, None
        if recorded is not None and recorded.drafts(lives):
            strangers = recorded.strangers(lives)
            if strangers:
                self.read(strangers, but_last=True)
                recorded.adopt(strangers)
            if everyone and all(live.request.speculation.mode == "fixed" for live in lives):
                both = recorded.draft_and_verify(lives, limits, tell)
                if both is not None:
                    drafts, made = both
            if drafts is None:
                drafts = recorded.draft(lives, limits, tell)
        if drafts is None:
            self.read(lives)
            return self._drafter.chain(lives, limits, wanted_at, goes_on, look=self._look), None
        for live in lives:
            self._scheduler.note_read(live, live.target_length)
        return drafts, made

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


def _facts(live: Live) -> RowFacts:
    speculation = live.request.speculation
    return RowFacts(
        key=live.key,
        context=len(live.tokens),
        mode=speculation.mode,
        depth=speculation.depth,
        pending=live.target_length - live.drafter_length,
    )
