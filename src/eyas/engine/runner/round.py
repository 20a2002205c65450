"""A round: rows that go through draft, verify and accept together, and their results.

Shapes: R rows, Q tokens of a row, K drafts, C logprob columns, V vocabulary.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eyas.engine.logprobs import TokenLogprobs, tell_logprobs
from eyas.engine.runner.device_queue import Mark
from eyas.engine.runner.round_passes import RoundLine
from eyas.engine.runner.sampling_needs import NO_LOGPROBS, Needs
from eyas.engine.scheduler import ScheduledRow
from eyas.engine.speculation.draft import Candidates
from eyas.engine.speculation.suffix_acceptance import RoundOffer
from eyas.kernels.tree_nodes import TreeNodes

Integers = NDArray[np.int64]


def no_time() -> float:
    """Seconds of a pass that did not run."""
    return 0.0


@dataclass(frozen=True, kw_only=True)
class TreeResults:
    """A row's draft tree, as the host sees it."""

    deepest: int
    """Depth of the deepest verified node."""
    candidates: list[Candidates]
    """Candidates behind the newest token and each accepted node, where they exist."""


@dataclass(kw_only=True, eq=False)
class RoundResults:
    """Results of a round, as columns over its rows."""

    tokens: list[list[int]]
    """New tokens: accepted drafts and one token of the target, cut at the request's limit."""
    accepted: list[int]
    """Accepted drafts, including those behind the limit."""
    confidences: list[list[float]]
    """The drafter's probability of each draft; values behind a row's own drafts are undefined."""
    verified: list[int] | None = None
    """Verified tree nodes of each row."""
    trees: list[TreeResults] | None = None
    """Trees of the rows, if drafts are trees; `confidences` is empty then."""


@dataclass(kw_only=True, eq=False)
class Round:
    """Rows that go through the same passes: decoding requests, or prompt chunks."""

    rows: Sequence[ScheduledRow]
    slot_R: Integers
    of_prompts: bool
    """Whether its rows are prompt chunks."""
    bucket: int
    """Rows of the pass, padding included."""
    blocks: int
    """Most blocks of a row in the pass."""
    needs: Needs
    drafts: Sequence[int] = ()
    """Most drafts of each decoding row."""
    depth: int = 0
    """Drafts per row in the pass."""
    drafter_depth: int = 0
    """Drafts made by the drafter; deeper ones are suffix drafts, and all if this is 0."""
    trees: TreeNodes | None = None
    """Node memory, if drafts are trees."""
    run_verify: Callable[[], object] = field(init=False)
    run_sample: Callable[[Tensor | None], Tensor] = field(init=False)
    """Its passes, looked up before the first one runs, because capturing runs a pass on blank rows."""
    sent: bool = False
    """Whether the device has these rows."""
    drafter_reads: bool = False
    """Whether the drafter reads tokens of the requests that it follows."""
    offers: Mapping[int, RoundOffer] = field(default_factory=dict)
    """Suffix drafts by request."""
    catch_up_seconds: Callable[[], float] = no_time
    """Seconds of the pass in which the drafter read waiting states, once the round has landed."""
    draft_seconds: Callable[[], float] = no_time
    drafted: Mark | None = None
    drafts_RK: Tensor | None = None
    """Drafts on their way to the host, valid after `drafted`, for rounds with masks."""
    landed: Mark | None = None
    output: Tensor | None = None
    prompt_output: Tensor | None = None
    """Logprobs of prompt tokens, if requested."""

    @property
    def masked(self) -> bool:
        """Whether the host must compute masks before sampling."""
        return self.needs.masked and any(row.samples for row in self.rows)

    @property
    def line(self) -> RoundLine:
        """Column layout of `output`."""
        candidates = 0 if self.trees is None else self.trees.width
        return RoundLine(depth=self.depth, alternatives=self.needs.logprobs, candidates=candidates)

    def collect(self) -> RoundResults:
        """Wait for the round and decode its output."""
        assert self.landed is not None, "the round was not accepted yet"
        self.landed.wait()
        assert self.output is not None
        at, trees = self.line, self.trees
        lines = self.output[:, : at.drafts if trees is None else at.sure].tolist()
        sure_RC = self.output[:, at.sure : at.logprobs].contiguous().view(torch.float64)
        results = RoundResults(
            tokens=[line[2 : 2 + line[0]] for line in lines],
            accepted=[line[1] for line in lines],
            confidences=sure_RC.tolist() if at.depth and trees is None else [],
        )
        if trees is not None:
            results.verified = [line[at.drafts] for line in lines]
            sure_RDW = sure_RC.view(-1, trees.depth, trees.width).tolist()
            results.trees = [_tree_of(line, sure, at) for line, sure in zip(lines, sure_RDW, strict=True)]
        return results

    def logprobs(self, number: int, count: int) -> tuple[TokenLogprobs, ...] | None:
        """Logprobs of the first `count` tokens of a row, if requested."""
        at, asked = self.line, self.rows[number].seq.request.logprobs
        if at.alternatives == NO_LOGPROBS or asked is None:
            return None
        assert self.output is not None
        line = self.output[number]
        told_QC = line[at.logprobs :].view(1 + at.depth, -1)
        return tuple(tell_logprobs(line[at.tokens : at.drafts][:count], told_QC[:count], asked))

    def prompt_logprobs(self) -> Mapping[int, Sequence[TokenLogprobs]]:
        """Logprobs of prompt tokens whose predecessors were read, by key of the requests that asked for them."""
        found: dict[int, Sequence[TokenLogprobs]] = {}
        if self.prompt_output is None:
            return found
        first = 0
        for row in self.rows:
            count, seq = row.prompt_logits, row.seq
            if count:
                told_MC = self.prompt_output[first : first + count]
                found[seq.key] = tell_logprobs(told_MC[:, 0], told_MC[:, 1:], seq.request.prompt_logprobs or 0)
                first += count
        return found

    def drafter_read(self, row: ScheduledRow, before: int) -> int:
        """How many tokens the drafter has read after this row; `before` is how many the target had read."""
        if self.of_prompts:
            return before + row.count - row.samples
        return before if self.drafter_depth else before - 1


def _tree_of(line: Sequence[int], sure_DW: Sequence[Sequence[float]], at: RoundLine) -> TreeResults:
    """Decode a row's tree."""
    candidates = list[Candidates]()
    for first, chances in zip(range(at.drafts + 2, at.sure, at.candidates), sure_DW, strict=True):
        if line[first] < 0:
            break
        candidates.append(Candidates(tuple(line[first : first + at.candidates]), tuple(chances)))
    return TreeResults(deepest=line[at.drafts + 1], candidates=candidates)
