"""Looks up the passes of rounds by shape, and captures them as CUDA graphs on first use or ahead.

    rows     rounded up to one of ROWS
    depth    the deepest draft of any row, so that rows have as many tokens as one of TOKENS
    blocks   of the longest row, rounded up to USUAL_BLOCKS times a power of 4
    tokens   of all prompt chunks together, rounded up to one of CHUNKS; longer passes run uncaptured

Passes take their input from the state (`round_state.py`), prompts from buffers of their own. Capturing a pass runs it
on blank rows, so the real rows must be sent afterwards.

Shapes: R rows, Q tokens of a row, V vocabulary.
"""

from bisect import bisect_left
from collections.abc import Callable, Hashable
from functools import partial
from itertools import pairwise, product

import torch
from torch import Tensor

from eyas.engine.runner.device_queue import DeviceQueue
from eyas.engine.runner.exact_passes import DraftMask, ExactPasses
from eyas.engine.runner.graph_capture import Function, GraphCapture, InputBuffers
from eyas.engine.runner.round_passes import PromptTokens, RoundPasses
from eyas.engine.runner.sampling_needs import NOTHING, Needs
from eyas.engine.speculation.captured_shapes import CapturedShapes
from eyas.engine.speculation.draft import Tree
from eyas.engine.speculation.step_report import Arm, Rehearsal
from eyas.kernels.tree_nodes import TreeNodes
from eyas.plan.footprint import LONGEST_CHUNK, Room
from eyas.plan.shapes import CAPTURED_TREES, Shape, offered

ROWS = (1, 2, 4, 8, 16, 24, 32, 48, *range(64, 257, 32), *range(320, 1025, 64))
"""Numbers of requests with captured passes."""
TOKENS = (1, 2, 3, 4, 6, 8, 12, 16)
"""Tokens per request, the newest and its drafts, with captured passes; the controller chooses depths among these."""
CHUNKS = (32, 64, 128, 256, 512, 1024, 2048, 4096, LONGEST_CHUNK)
"""Numbers of prompt tokens with captured passes."""
CHUNK_ROWS = (1, 8, 64, 256, 1024)
"""Numbers of prompts with captured passes."""
USUAL_BLOCKS = 512
"""Blocks per request: 8,192 tokens in blocks of 16. Only the part in use costs time, so most engines need one width."""
REHEARSALS = 3
"""Runs per timed pass."""
READ, DRAFT, VERIFY, SAMPLE, CATCH_UP = "read prompts", "draft", "verify", "sample", "catch up"
PLACE = "place offers"
DRAFT_TREES, VERIFY_TREES, SAMPLE_TREES = "draft trees", "verify trees", "sample trees"
"""Kinds of captured passes."""


class RoundGraphs:
    """The passes of an engine by shape."""

    def __init__(
        self,
        capture: GraphCapture,
        queue: DeviceQueue,
        passes: RoundPasses,
        *,
        room: Room,
        blocks: int,
        tree: Tree | None,
    ) -> None:
        """`blocks` is the usual block table width, for which passes are captured ahead."""
        max_num_seqs, most_tokens, longest_chunk = room.recorded_rows, room.recorded_tokens, room.max_num_batched_tokens
        max_depth, max_offers = room.max_depth, room.max_offers
        self.capture, self._queue = capture, queue
        self._passes, self._state, self._drafter = passes, passes.state, passes.drafter
        self.exact = isinstance(passes, ExactPasses)
        """Whether passes fit any number of rows and any depth exactly."""
        few = range(1, max_num_seqs) if self.exact else ROWS
        self._rows = (*(rows for rows in few if rows < max_num_seqs), max_num_seqs)
        self._deepest, self._most_tokens, self._usual_blocks = max_depth + 1, most_tokens, blocks
        self._tokens = range(1, self._deepest + 1) if self.exact else TOKENS
        self._chunks = sorted({min(chunk, longest_chunk) for chunk in CHUNKS})
        self._chunk_rows = sorted({min(rows, max_num_seqs) for rows in CHUNK_ROWS})
        trees = list[Shape]()
        if passes.drafter is not None and tree is None:
            words = len(passes.drafter.token_W)
            trees = [shape for shape in CAPTURED_TREES if shape.depth <= max_depth and shape.width <= words]
        self.shapes = CapturedShapes(
            rows=self._rows,
            depths=tuple(sorted({min(tokens, self._deepest) - 1 for tokens in self._tokens} - {0}))
            if passes.drafter or max_offers
            else (),
            most_tokens=most_tokens,
            trees=tuple(trees),
            offered=(max_offers,) if max_offers > max_depth else (),
        )
        self._forced_tree, self._offers = None if passes.drafter is None else tree, max_offers > 0
        self._inputs: dict[tuple[object, ...], InputBuffers] = {}
        self.nodes: dict[tuple[int, ...], TreeNodes] = {}
        """Tree memory by rows, depth, width and budget."""

    @property
    def bytes(self) -> int:
        """Memory besides the state."""
        return self.capture.bytes + sum(nodes.bytes for nodes in self.nodes.values())

    def most_reads(self, rows: int) -> int:
        """Most waiting states per row that a drafting pass reads: the tokens of the deepest pass for so many rows."""
        return 1 + max((self._deepest - 1, *self.shapes.offered_for(rows)))

    def _own_depths(self, rows: int, depth: int) -> list[int]:
        """Depths that the drafter may have drafted in a pass with suffix drafts."""
        if self._drafter is None:
            return [0]
        return [0, *self.shapes.depths_for(rows)] if depth >= self._deepest else [0, depth]

    def _depths_for(self, rows: int) -> list[int]:
        return self.shapes.offered_for(rows) if self._offers else self.shapes.depths_for(rows)

    def chunk_rows_for(self, rows: int) -> int:
        """Rows of the prompt pass for so many chunks."""
        return rows if self.exact else next((bucket for bucket in self._chunk_rows if bucket >= rows), rows)

    @torch.inference_mode()
    def capture_ahead(self) -> int:
        """Capture prompt passes and decoding passes of common shapes; returns the number of graphs."""
        if self.exact:
            return 0
        blocks = self._usual_blocks
        for tokens in self._chunks:
            for fewer, rows in pairwise((0, *self._chunk_rows)):
                if fewer < tokens:  # otherwise the smaller bucket has a row for every token
                    # Also without the drafter, which follows no request after a collapse.
                    for followed in {False, self._drafter is not None}:
                        self.reading(tokens, rows, blocks, followed=followed)
                    self.sampling(rows, 0, NOTHING)
        for rows in self._rows:
            if self._drafter is not None:
                self.catching_up(rows, blocks)
            for depth, needs in product((0, *self._depths_for(rows)), (NOTHING, Needs(sampled=True))):
                if rows > self._most_tokens:
                    continue
                own = self._drafter is not None and depth < self._deepest  # whether the drafter drafts that deep
                self.verifying(rows, blocks, depth)
                if depth == 0:
                    self.verifying(rows, blocks, depth, followed=False)
                self.sampling(rows, depth, needs)
                for own_depth in self._own_depths(rows, depth) if self._offers and depth else ():
                    self.placing(rows, depth, own_depth)
                for reads in {1 + depth, self.most_reads(rows)} if depth and own else ():
                    self.drafting(rows, blocks, reads, depth, needs)
            for trees, needs in product(self._trees_for(rows), (NOTHING, Needs(sampled=True))):
                self.verifying_trees(trees, blocks)
                self.sampling_trees(trees, needs)
                for reads in {1 + trees.depth, self.most_reads(rows)}:
                    self.drafting_trees(trees, blocks, reads, needs)
        return len(self.capture)

    @torch.inference_mode()
    def rehearse(self) -> Rehearsal:
        """Time passes of some sizes on blank rows, to seed the controller's step times."""
        blocks, queue = self._usual_blocks, self._queue
        steps = dict[tuple[int, Arm], float]()

        def seconds(*passes: Callable[[], object]) -> float:
            for one in passes:
                queue.run(one)
            began = queue.mark()
            for one in passes * REHEARSALS:
                queue.run(one)
            ended = queue.mark()
            ended.wait()
            return ended.seconds_since(began) / REHEARSALS

        def timed(verify: Callable[[], object], sample: Callable[[None], object]) -> float:
            queue.run(self._state.blank_rows)
            return seconds(verify, partial(sample, None))

        for rows in sorted({*self._rows[::2], self._rows[-1]}):
            for depth in (0, *self._depths_for(rows)):
                drafter = None
                if depth and depth < self._deepest and self._drafter is not None:
                    drafter = self.drafting(rows, blocks, 1 + depth, depth, NOTHING)
                passes = timed(self.verifying(rows, blocks, depth), self.sampling(rows, depth, NOTHING))
                if drafter is not None or depth == 0:
                    steps[rows, depth] = passes + (0.0 if drafter is None else seconds(drafter))
                if self._offers and depth:
                    steps[rows, offered(depth)] = passes
        for rows, shape in product(self._rows, self.shapes.trees):
            if shape in self.shapes.trees_for(rows):
                trees = self.trees(rows, Tree.of(shape))
                assert trees is not None, "captured tree shapes fit the buffers"
                drafter = self.drafting_trees(trees, blocks, 1 + shape.depth, NOTHING)
                passes = timed(self.verifying_trees(trees, blocks), self.sampling_trees(trees, NOTHING))
                steps[rows, shape] = passes + seconds(drafter)
        return Rehearsal(steps=steps)

    def _trees_for(self, rows: int) -> list[TreeNodes]:
        """Trees that so many rows may grow: the forced shape, or all captured ones."""
        shapes = [Tree.of(shape) for shape in self.shapes.trees_for(rows)]
        forced = [] if self._forced_tree is None else [self._forced_tree]
        return [trees for tree in forced or shapes if (trees := self.trees(rows, tree)) is not None]

    def catching_up(self, rows: int, blocks: int) -> Callable[[], object]:
        """The pass in which the drafter reads waiting states."""
        return self._captured(CATCH_UP, self._passes.catch_up, rows=rows, blocks=blocks)

    def drafting(
        self, rows: int, blocks: int, reads: int, depth: int, needs: Needs, *, mask: DraftMask | None = None
    ) -> Callable[[], object]:
        """The pass that drafts chains. Only exact passes support a mask of allowed drafts."""
        passes, cuts = self._passes, _cuts(needs)
        if mask is not None:
            assert isinstance(passes, ExactPasses)
            return partial(passes.draft, rows=rows, reads=reads, depth=depth, blocks=blocks, needs=cuts, mask=mask)
        return self._captured(DRAFT, passes.draft, rows=rows, reads=reads, depth=depth, blocks=blocks, needs=cuts)

    def placing(self, rows: int, depth: int, own_depth: int) -> Callable[[], object]:
        """The pass that puts suffix drafts in place, around the drafter's `own_depth` drafts."""
        return self._captured(PLACE, self._passes.place, rows=rows, depth=depth, own_depth=own_depth)

    def verifying(self, rows: int, blocks: int, depth: int, *, followed: bool = True) -> Callable[[], object]:
        """The target's pass over chains; `followed` rows leave states for the drafter."""
        followed = followed and self._drafter is not None
        return self._captured(VERIFY, self._passes.verify, rows=rows, depth=depth, blocks=blocks, followed=followed)

    def sampling(self, rows: int, depth: int, needs: Needs) -> Callable[[Tensor | None], Tensor]:
        """The sampling pass. Not captured for options that vary too much between batches."""
        if needs.masked or needs.shaped:
            sample, device = self._passes.sample, self.capture.device
            return lambda mask_NV: sample(
                rows=rows,
                depth=depth,
                needs=needs,
                mask_NV=None if mask_NV is None else mask_NV.to(device, non_blocking=True),
            )
        captured = self._captured(SAMPLE, self._passes.sample, rows=rows, depth=depth, needs=needs)
        return lambda _: captured()

    def trees(self, rows: int, tree: Tree) -> TreeNodes | None:
        """Memory for trees of so many rows, cut to the draft vocabulary and the logits buffer; None if none fit."""
        assert self._drafter is not None
        depth, width = tree.depth, min(tree.width, len(self._drafter.token_W))
        candidates = width * (1 + (depth - 1) * width)
        budget = min(tree.budget, candidates, self._most_tokens // rows - 1)
        if budget < 1:
            return None
        shape = rows, depth, width, budget
        if shape not in self.nodes:
            self.nodes[shape] = TreeNodes.of(
                rows,
                depth=depth,
                width=width,
                budget=budget,
                device=self.capture.device,
                states_like=self._state.states_SLX,
            )
        return self.nodes[shape]

    def drafting_trees(self, trees: TreeNodes, blocks: int, reads: int, needs: Needs) -> Callable[[], object]:
        return self._captured(
            DRAFT_TREES, self._passes.draft_trees, trees=trees, reads=reads, blocks=blocks, needs=_cuts(needs)
        )

    def verifying_trees(self, trees: TreeNodes, blocks: int) -> Callable[[], object]:
        return self._captured(VERIFY_TREES, self._passes.verify_trees, trees=trees, blocks=blocks)

    def sampling_trees(self, trees: TreeNodes, needs: Needs) -> Callable[[Tensor | None], Tensor]:
        if needs.shaped:
            return lambda _: self._passes.sample_trees(trees=trees, needs=needs)
        captured = self._captured(SAMPLE_TREES, self._passes.sample_trees, trees=trees, needs=needs)
        return lambda _: captured()

    def reading(
        self, tokens: int, rows: int, blocks: int, *, followed: bool = True, asked: PromptTokens | None = None
    ) -> tuple[InputBuffers, Callable[[], object]]:
        """The pass over so many prompt tokens, with its input buffers. Not captured with prompt logprobs."""
        followed = followed and self._drafter is not None
        captured = asked is None and self.capture.enabled and tokens <= self._chunks[-1]
        count = self._chunks[bisect_left(self._chunks, tokens)] if captured else tokens
        bucket = count, rows, blocks, followed
        inputs = self._inputs.get(bucket) if captured else None
        if inputs is None:
            inputs = InputBuffers(
                {"ids": count, "behind": count, "kept": count, "start": rows + 1, "base": rows},
                self.capture.device,
            )
        read = partial(self._passes.read, inputs.device, rows=rows, blocks=blocks, followed=followed, asked=asked)
        if captured:
            self._inputs[bucket] = inputs
            return inputs, self._graph(READ, bucket, read) or read
        return inputs, read

    def _captured(self, kind: str, run: Callable[..., Tensor], **shape: Hashable) -> Function:
        """Return a captured pass over the state, or the plain function if it cannot be captured."""
        function = partial(run, **shape)
        if not self.capture.enabled:
            return function
        bucket = tuple(_shape(value) if isinstance(value, TreeNodes) else value for value in shape.values())
        return self._graph(kind, bucket, function) or function

    def _graph(self, kind: str, bucket: tuple[object, ...], function: Function) -> Function | None:
        return self.capture.get(kind, bucket, function, lambda: self._queue.run(self._state.blank_rows))


def _cuts(needs: Needs) -> Needs:
    """The needs that matter for drafting."""
    return Needs(sampled=needs.sampled, min_p=needs.min_p, top_k=needs.top_k, top_p=needs.top_p)


def _shape(trees: TreeNodes) -> tuple[int, int, int, int]:
    """Rows and shape of trees."""
    return len(trees.kept_count_R), trees.depth, trees.width, trees.budget
