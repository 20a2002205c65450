"""The drafter's half of rounds: which of its passes a round needs, and how much waits for it.

Reading is lazy: the target's states of tokens that the drafter has not read wait in a ring on the device, and a pass
that drafts reads them first. The host keeps a bound of how many may wait. Before they could outgrow the ring, or what a
draft reads, the drafter reads them in a pass of its own (`catch_up`).
"""

from collections.abc import Callable

from eyas.engine.masks import draft_mask
from eyas.engine.runner.round import Round
from eyas.engine.runner.round_runner import RoundRunner


class DraftRunner:
    """Queues the drafter's passes."""

    def __init__(self, runner: RoundRunner) -> None:
        self._runner = runner

    def draft(self, made: Round) -> None:
        """Let the drafter read what must be read, and draft chains or trees; for chunks of prompts, nothing."""
        if made.of_prompts:
            return
        runner, slot_R, depth = self._runner, made.slot_R, made.drafter_depth
        waits, follows = runner.waiting[slot_R].tolist(), runner.follows[slot_R].tolist()
        waiting = max(states if followed else 0 for states, followed in zip(waits, follows, strict=True))
        reads = 1 + depth
        if depth and runner.graphs.exact:
            reads = max(1, waiting)
        elif depth and waiting > reads:
            reads = runner.graphs.most_reads(made.bucket)
        late = waiting > reads if depth else waiting + 1 + made.depth > runner.state.most_waiting
        if late:
            reads = 1 + depth
        catch_up = runner.graphs.catching_up(made.bucket, made.blocks) if late else None
        draft = self._drafting(made, reads) if depth else None
        runner.send_rows(made)
        if catch_up is not None:
            made.catch_up_began = runner.queue.mark()
            runner.queue.run(catch_up)
            made.catch_up_ended = runner.queue.mark()
        if draft is not None:
            made.draft_began = runner.queue.mark()
            runner.queue.run(draft)
            made.draft_ended = runner.queue.mark()
        known = [0 if depth else 1 if late else states for states in waits]
        assert not isinstance(made.drafts, int)
        drafts = zip(known, made.drafts, strict=True)
        runner.waiting[slot_R] = [states + 1 + min(most, made.depth) for states, most in drafts]
        made.drafter_reads = bool(late or depth)

    def _drafting(self, made: Round, reads: int) -> Callable[[], object]:
        runner, graphs = self._runner, self._runner.graphs
        if made.trees is not None:
            return graphs.drafting_trees(made.trees, made.blocks, reads, made.needs)
        # With a step in flight nobody knows yet what a grammar says.
        heeds = made.masked and graphs.exact and runner.synchronous
        mask = draft_mask(made, runner.model.vocab_size) if heeds else None
        return graphs.drafting(made.bucket, made.blocks, reads, made.drafter_depth, made.needs, mask=mask)
