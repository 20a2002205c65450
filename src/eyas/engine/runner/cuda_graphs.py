"""CUDA graphs of read, draft and verify: a step of decoding is two copies in, two replays and two copies out.

Launching their kernels one by one takes the host longer than running them takes the device. So the padded passes of
`passes.py` are captured once for each bucket of shapes, when it is first met, and replayed with other numbers.

    rows     rounded up to one of ROWS
    tokens   the newest and the deepest draft of any row, rounded up to one of TOKENS; shorter rows are cut by their own
             count
    blocks   of the longest row that may come, or USUAL_BLOCKS and that times powers of 4 where there may be longer
             ones: a table costs what is read by it, so most engines have one width
    chunks   of prompts, several in one pass: their number rounded up to one of CHUNK_ROWS, all their tokens to one of
             CHUNKS

Capturing takes as long as dozens of replays. So there are few buckets, and `capture_graphs` goes through the usual
ones before anybody waits for them.

All graphs share one pool of memory, and the memory for states and logits: what a replay leaves there holds until
the next. Waiting states that still lie there when the next pass begins are copied first (`HiddenStateBuffer.preserve`).

Where no draft is withheld whatever it is, draft and verify are one graph: one copy in and one out. What drafting
took of it is told by marks inside, which are times of the device.

Nothing depends on it: whatever is not served here (long chunks, trees, passes above the token budget) is answered by
None, and the engine runs the pass eagerly. A shape that cannot be captured is told about, and its kind of pass stays
eager from then on.

Shapes: R rows, Q tokens of a row, P blocks of a row, V vocabulary, X concatenated auxiliary states, S and C rows of
shared memory.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from eyas.engine.kv_cache.cache import KVCache
from eyas.engine.request import SequenceState
from eyas.engine.runner import passes
from eyas.engine.runner.drafter import Draft, DrafterRunner
from eyas.engine.runner.graph_capture import CapturedGraph, Function, GraphCapture
from eyas.engine.runner.hidden_states import HiddenStateBuffer
from eyas.engine.scheduler import ScheduledRow
from eyas.engine.verify import TargetOutput
from eyas.plan.footprint import LONGEST_CHUNK

ROWS = (1, 2, 4, 8, 16, 24, 32, 48, *range(64, 257, 32), *range(320, 1025, 64))
TOKENS = (1, 2, 3, 4, 6, 8, 12, 16)
"""Where the controller chooses, chains are also drafted to one of these depths less one."""
USUAL_BLOCKS = 512
"""8,192 tokens in blocks of 16."""
ROWS_AHEAD = 64
"""Steps of more rows are captured when they are met: there are many of them, and each takes time and memory."""
CHUNKS = (32, 64, 128, 256, 512, LONGEST_CHUNK)
"""Tokens of prompts that are read by a graph."""
CHUNK_ROWS = (1, 8, 64)
"""Prompts that are read by a graph together."""
READ, DRAFT, VERIFY, BOTH = "read", "draft", "verify", "draft and verify"
"""Kinds of graphs."""


class DraftSeconds(NamedTuple):
    """What a captured draft took of the device."""

    passes: int
    first: float
    """Seconds of the first."""
    further: float
    """Seconds of all others."""


class CUDAGraphRunner:
    """Read, draft and verify over buckets of shapes."""

    def __init__(
        self,
        run: passes.RunTarget,
        cache: KVCache,
        drafter: DrafterRunner | None,
        *,
        capture: GraphCapture,
        max_num_seqs: int,
        most_tokens: int,
        longest_chunk: int,
        most_blocks: int,
        max_depth: int,
        vocab_size: int,
        dtype: torch.dtype,
        logits_dtype: torch.dtype,
    ) -> None:
        self._run, self._cache, self._drafter, self.capture = run, cache, drafter, capture
        self._rows = (*(rows for rows in ROWS if rows < max_num_seqs), max_num_seqs)
        self._deepest = max_depth + 1
        self._most_tokens = most_tokens
        self._usual_blocks = min(USUAL_BLOCKS, 1 << (most_blocks - 1).bit_length())
        self._chunks = sorted({min(chunk, longest_chunk) for chunk in CHUNKS})
        self._chunk_rows = sorted({min(rows, max_num_seqs, most_tokens) for rows in CHUNK_ROWS})
        self.logits_SV = torch.empty(most_tokens, vocab_size, dtype=logits_dtype, device=capture.device)
        self._nothing = HiddenStateBuffer()
        if drafter is not None:
            config = drafter.model.config
            width = config.num_aux_hidden_states * config.target_hidden_size
            drafter.states.reserve(
                torch.empty(width, dtype=dtype, device=capture.device),
                pass_tokens=most_tokens,
                staged_tokens=max_num_seqs * self._deepest,
                chunk_tokens=self._chunks[-1],
            )

    @property
    def _states(self) -> HiddenStateBuffer:
        """Where passes leave states; one of nothing without a drafter."""
        return self._nothing if self._drafter is None else self._drafter.states

    @property
    def bytes(self) -> int:
        """Memory taken beside weights and blocks."""
        states = 0 if self._drafter is None else self._drafter.states.bytes
        return self.capture.bytes + self.logits_SV.nbytes + states

    def capture_graphs(self) -> int:
        """Capture chunks, and steps of not too many requests, of usual lengths; how many graphs there are then."""
        for rows, chunk in product(self._chunk_rows, self._chunks):
            self._reading(rows, chunk, self._usual_blocks)
        counts = sorted({self._token_bucket(1 + depth) for depth in range(self._deepest)})
        if self._drafter is None:
            counts = [1]
        for rows, count in product((rows for rows in self._rows if rows <= ROWS_AHEAD), counts):
            if rows * count > self._most_tokens:
                continue
            self._verifying(rows, count, self._usual_blocks)
            if count > 1:
                for kind, reads, sampled in product((DRAFT, BOTH), {count, self._deepest}, (False, True)):
                    self._captured_draft(kind, rows, reads, self._usual_blocks, count - 1, sampled=sampled)
        return len(self.capture)

    # --- draft -------------------------------------------------------------------------------------------------

    @property
    def most_read(self) -> int:
        """States of a request that are read here at most."""
        return self._deepest

    def drafts(self, seqs: Sequence[SequenceState]) -> bool:
        """Whether chains for these requests can be drafted here."""
        return len(seqs) <= self._rows[-1] and DRAFT not in self.capture.refused

    def draft(self, seqs: Sequence[SequenceState], depths: Sequence[int]) -> tuple[list[Draft], DraftSeconds] | None:
        """Read what waits, all of it staged, and draft a chain for each request."""
        deepest = self._token_bucket(max(depths) + 1) - 1
        graph = self._drafting(DRAFT, seqs, depths, deepest)
        if graph is None:
            return None
        graph.inputs.send()
        both_2RK = graph.run().cpu()
        self._states.release(seqs)
        return _chains(both_2RK, depths), DraftSeconds(deepest, *graph.seconds())

    def launch_draft_and_verify(
        self, seqs: Sequence[SequenceState], depths: Sequence[int]
    ) -> Callable[[], tuple[list[Draft], DraftSeconds, TargetOutput]] | None:
        """Draft a chain for each request, perhaps an empty one, and verify it, without looking at it in between.

        Returns as soon as it is under way. What comes back waits for it: the drafts, what they took, and what the
        target says as from `launch_verify`, its tokens on the host already.
        """
        # What all ask for, or they would need other graphs towards their end.
        asked = [seq.request.speculation.depth for seq in seqs]
        deepest = max(depth or 0 for depth in asked) if all(asked) else self._token_bucket(max(depths) + 1) - 1
        count = 1 + deepest
        largest = self._row_bucket(seqs) * count
        if largest > self._most_tokens:
            return None
        graph = self._drafting(BOTH, seqs, depths, deepest)
        if graph is None:
            return None
        self._states.release(seqs)
        self._states.preserve()
        graph.inputs.write("newest", [seq.tokens[-1] for seq in seqs])
        graph.inputs.send()
        output = graph.run()

        def collect() -> tuple[list[Draft], DraftSeconds, TargetOutput]:
            flat = output.cpu()
            drafts = _chains(flat[:-largest].view(2, -1, deepest), depths)
            return drafts, DraftSeconds(deepest, *graph.seconds()), self._output(flat[-largest:].view(-1, count))

        return collect

    def _drafting(
        self, kind: str, seqs: Sequence[SequenceState], depths: Sequence[int], deepest: int
    ) -> CapturedGraph | None:
        """What drafts chains for these requests, and perhaps verifies them; its inputs are filled but for `newest`."""
        drafter = self._drafter
        assert drafter is not None
        samplings = [seq.request.sampling for seq in seqs]
        sampled = any(sampling.temperature for sampling in samplings)
        # A round of this depth adds no more than so many states; after a deeper one there is a larger bucket.
        waiting = max(seq.target_length - seq.drafter_length for seq in seqs)
        rows, count, blocks = self._bucket(seqs, deepest + 1 if waiting <= deepest + 1 else self._deepest)
        graph = self._captured_draft(kind, rows, count, blocks, deepest, sampled=sampled)
        if graph is None:
            return None
        inputs = graph.inputs
        places, ids = list[int](), list[int]()
        blank = [0] * count
        for seq in seqs:
            ((_, first, size),) = drafter.states.of(seq)
            places += [*range(first, first + size), *blank[size:]]
            ids += [*seq.tokens[seq.drafter_length + 1 : seq.target_length + 1], *blank[size:]]
        inputs.write("from", places)
        inputs.write("ids", ids)
        inputs.write("base", [seq.drafter_length for seq in seqs])
        inputs.write("live", [seq.target_length - seq.drafter_length for seq in seqs])
        inputs.write("limit", depths)
        if sampled:
            inputs.write("seed", [seq.request.seed for seq in seqs])
            for name in ("temperature", "top_k", "top_p", "min_p"):
                inputs.write_reals(name, [getattr(sampling, name) for sampling in samplings])
        inputs.write_blocks(seqs, drafter.cache.block_size)
        return graph

    def _captured_draft(
        self, kind: str, rows: int, count: int, blocks: int, deepest: int, *, sampled: bool
    ) -> CapturedGraph | None:
        """The graph of a bucket: up to `count` states of each row are read."""
        drafter, states_SX = self._drafter, self._states.pass_SX
        assert drafter is not None
        assert states_SX is not None

        def shapes() -> Mapping[str, tuple[int, ...]]:
            names = ("base", "live", "limit", "newest", "seed", "temperature", "top_k", "top_p", "min_p")
            per_row = dict.fromkeys(names if sampled else names[:4], (rows,))
            return {"from": (rows, count), "ids": (rows, count), "table": (rows, blocks), **per_row}

        function: Function = partial(
            passes.draft,
            drafter=drafter.model,
            attend=drafter.attention,
            cache=drafter.cache,
            token_W=drafter.token_W,
            states_SX=states_SX,
            depth=deepest,
            sampled=sampled,
        )
        if kind == BOTH:
            function = partial(
                passes.draft_and_verify,
                draft=function,
                run=self._run,
                cache=self._cache,
                logits_SV=self.logits_SV,
                states_SX=states_SX,
            )
        return self.capture.get(kind, (rows, count, blocks, deepest, sampled), shapes, function, states_SX)

    # --- read --------------------------------------------------------------------------------------------------

    def reads(self, row: ScheduledRow) -> bool:
        """Whether a row is a chunk of a prompt that can be read here."""
        return 1 < row.count <= self._chunks[-1] and READ not in self.capture.refused

    def read_together(self, rows: Sequence[ScheduledRow]) -> list[list[ScheduledRow]]:
        """Chunks that can be read here, in as few passes as their order allows."""
        together, tokens = list[list[ScheduledRow]](), 0
        for row in rows:
            tokens += row.count
            if not together or tokens > self._chunks[-1] or len(together[-1]) == self._chunk_rows[-1]:
                together.append([])
                tokens = row.count
            together[-1].append(row)
        return together

    def launch_read(self, rows: Sequence[ScheduledRow]) -> Callable[[], TargetOutput] | None:
        """Run the target over parts of prompts: what it says behind those that end, their tokens on the host.

        A drafter that remembers has keys and values of all tokens but the last of each row then.
        """
        seqs = [row.seq for row in rows]
        self._states.preserve(chunks_of=seqs)
        _, _, blocks = self._bucket(seqs, 1)
        chunk = self._chunks[bisect_left(self._chunks, sum(row.count for row in rows))]
        many = self._chunk_rows[bisect_left(self._chunk_rows, len(rows))]
        graph = self._reading(many, chunk, blocks)
        if graph is None:
            return None
        inputs = graph.inputs
        ids, behind, starts = list[int](), list[int](), [0] * (many + 1)
        for number, row in enumerate(rows):
            tokens = row.seq.tokens[row.start : row.start + row.count]
            ids += tokens
            behind += [*tokens[1:], -1]
            starts[number + 1 :] = [len(ids)] * (many - number)
        inputs.write("ids", ids)
        inputs.write("behind", behind)
        inputs.write("start", starts)
        inputs.write("base", [row.start for row in rows])
        inputs.write_blocks(seqs, self._cache.block_size)
        inputs.send()
        largest_R = graph.run()
        sampled = [number for number, row in enumerate(rows) if row.samples]

        def collect() -> TargetOutput:
            logits_MV, largest_M = self.logits_SV[: len(rows)], largest_R.cpu()[: len(rows)]
            if len(sampled) < len(rows):
                logits_MV, largest_M = logits_MV[sampled], largest_M[sampled]
            # Tokens come to the host also where nobody asks for them: the inputs may be written again.
            return TargetOutput(logits_MV=logits_MV, aux_NX=self._states.chunk_CX, largest_RQ=largest_M, of_chunks=True)

        return collect

    def _reading(self, rows: int, chunk: int, blocks: int) -> CapturedGraph | None:
        """The graph of a bucket."""

        def shapes() -> Mapping[str, tuple[int, ...]]:
            return {"ids": (chunk,), "behind": (chunk,), "start": (rows + 1,), "base": (rows,), "table": (rows, blocks)}

        function = partial(
            passes.read,
            run=self._run,
            cache=self._cache,
            logits_SV=self.logits_SV,
            states_CX=self._states.chunk_CX,
            drafter=self._drafter if self._drafter and self._drafter.remembers else None,
        )
        return self.capture.get(READ, (rows, chunk, blocks), shapes, function, self._states.chunk_CX)

    # --- verify ------------------------------------------------------------------------------------------------

    def launch_verify(self, rows: Sequence[ScheduledRow], drafts: Sequence[Draft]) -> Callable[[], TargetOutput] | None:
        """Run the target over one token of each row, the newest or one of a prompt, and the drafts behind it."""
        self._states.preserve()
        if any(row.count != 1 for row in rows) or not all(draft.is_chain for draft in drafts):
            return None
        seqs = [row.seq for row in rows]
        if len(seqs) > self._rows[-1]:
            return None
        longest = 1 + max(len(draft.tokens) for draft in drafts)
        many, count, blocks = self._bucket(seqs, self._token_bucket(longest))
        if many * count > self._most_tokens:
            count = longest
        if many * count > self._most_tokens:
            return None
        graph = self._verifying(many, count, blocks)
        if graph is None:
            return None
        inputs = graph.inputs
        ids, blank = list[int](), [0] * count
        for row, draft in zip(rows, drafts, strict=True):
            ids += [row.seq.tokens[row.start], *draft.tokens, *blank[1 + len(draft.tokens) :]]
        inputs.write("ids", ids)
        inputs.write("base", [row.start for row in rows])
        inputs.write("live", [1 + len(draft.tokens) for draft in drafts])
        inputs.write_blocks(seqs, self._cache.block_size)
        inputs.send()
        largest_RQ = graph.run()
        return lambda: self._output(largest_RQ)

    def _output(self, largest_RQ: Tensor) -> TargetOutput:
        """What a pass says of token q of row r lies at r * Q + q of logits and states."""
        return TargetOutput(
            logits_MV=self.logits_SV,
            aux_NX=self._states.pass_SX,
            largest_RQ=largest_RQ,
            stride=largest_RQ.shape[1],
        )

    def _verifying(self, rows: int, count: int, blocks: int) -> CapturedGraph | None:
        """The graph of a bucket."""

        def shapes() -> Mapping[str, tuple[int, ...]]:
            return {"ids": (rows, count), "base": (rows,), "live": (rows,), "table": (rows, blocks)}

        function = partial(
            passes.verify, run=self._run, cache=self._cache, logits_SV=self.logits_SV, states_SX=self._states.pass_SX
        )
        return self.capture.get(VERIFY, (rows, count, blocks), shapes, function)

    # --- buckets -----------------------------------------------------------------------------------------------

    def _bucket(self, seqs: Sequence[SequenceState], count: int) -> tuple[int, int, int]:
        blocks, needed = self._usual_blocks, max(len(seq.blocks) for seq in seqs)
        while blocks < needed:
            blocks *= 4
        return self._row_bucket(seqs), count, blocks

    def _token_bucket(self, count: int) -> int:
        """Tokens of a row that are captured together with so many."""
        return min(self._deepest, next((tokens for tokens in TOKENS if tokens >= count), count))

    def _row_bucket(self, seqs: Sequence[SequenceState]) -> int:
        rows: int = self._rows[bisect_left(self._rows, len(seqs))]
        return rows


def _chains(both_2RK: Tensor, depths: Sequence[int]) -> list[Draft]:
    """Drafts from tokens and the bits of confidences; rows behind those of `depths` are not real."""
    tokens: list[list[int]] = both_2RK[0].tolist()
    sure: list[list[float]] = both_2RK[1].view(torch.float64).tolist()
    return [
        Draft(tokens=tuple(a[:depth]), parents=tuple(range(-1, depth - 1)), confidences=tuple(b[:depth]))
        for a, b, depth in zip(tokens, sure, depths, strict=False)
    ]
