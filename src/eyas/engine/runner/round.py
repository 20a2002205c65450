"""One pass of requests through draft, verify and accept: what it is made of, and what came of it.

Shapes: R rows, Q tokens of a row, K drafts, C numbers told of a token, V vocabulary.
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
    """Of what did not run."""
    return 0.0


@dataclass(frozen=True, kw_only=True)
class TreeResults:
    """What the host learns of a row's tree."""

    deepest: int
    """Of the nodes that were verified."""
    candidates: list[Candidates]
    """Behind the newest token and each accepted node, as far as there were any."""


@dataclass(kw_only=True, eq=False)
class RoundResults:
    """What a round gave its requests, by columns: there may be hundreds of rows."""

    tokens: list[list[int]]
    """New ones: accepted drafts and one of the target's own, unless the answer came to its limit before."""
    accepted: list[int]
    """Drafts, also where the limit cut them off."""
    confidences: list[list[float]]
    """Of the drafter in each of as many drafts as the pass has for a row; those behind the row's own mean nothing."""
    verified: list[int] | None = None
    """Nodes of trees that were."""
    trees: list[TreeResults] | None = None
    """Where trees were grown: of each; there are no confidences then."""


@dataclass(kw_only=True, eq=False)
class Round:
    """Rows that go through the same passes: those that decode, or chunks of prompts."""

    rows: Sequence[ScheduledRow]
    slot_R: Integers
    of_prompts: bool
    """Whether it reads chunks of prompts."""
    bucket: int
    """Rows of the pass, real or not."""
    blocks: int
    """Of a row in the pass, at most."""
    needs: Needs
    drafts: Sequence[int] = ()
    """How many tokens may be drafted for each row that decodes."""
    depth: int = 0
    """Drafts of a row in the pass."""
    drafter_depth: int = 0
    """How deep the drafter drafts; deeper drafts are the host's, and all of them if this is 0."""
    trees: TreeNodes | None = None
    """Where the nodes of trees are kept, if trees grow."""
    run_verify: Callable[[], object] = field(init=False)
    run_sample: Callable[[Tensor | None], Tensor] = field(init=False)
    """Its passes, looked up before the first one runs: to capture a pass is to run it, for nobody."""
    sent: bool = False
    """Whether the device knows these rows."""
    drafter_reads: bool = False
    """Whether the drafter reads, of requests that it follows."""
    offers: Mapping[int, RoundOffer] = field(default_factory=dict)
    """Drafts that the host has looked up, by request."""
    catch_up_seconds: Callable[[], float] = no_time
    """Of the pass in which the drafter reads what has waited while nothing was drafted, once the round has landed."""
    draft_seconds: Callable[[], float] = no_time
    """Of its passes that draft."""
    drafted: Mark | None = None
    drafts_RK: Tensor | None = None
    """Drafts on their way to the host, there with that mark, where the host makes a mask."""
    landed: Mark | None = None
    output: Tensor | None = None
    prompt_output: Tensor | None = None
    """Log probabilities of prompt tokens, where some request asks for them."""

    @property
    def masked(self) -> bool:
        """Whether the host must say what may come before tokens are chosen."""
        return self.needs.masked and any(row.samples for row in self.rows)

    @property
    def line(self) -> RoundLine:
        """Where the numbers of a row stand in the output."""
        candidates = 0 if self.trees is None else self.trees.width
        return RoundLine(depth=self.depth, alternatives=self.needs.logprobs, candidates=candidates)

    def collect(self) -> RoundResults:
        """Wait for it."""
        assert self.landed is not None, "to be accepted first"
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
        """Of the first tokens of a row, if its request asks for them."""
        at, asked = self.line, self.rows[number].seq.request.logprobs
        if at.alternatives == NO_LOGPROBS or asked is None:
            return None
        assert self.output is not None
        line = self.output[number]
        told_QC = line[at.logprobs :].view(1 + at.depth, -1)
        return tuple(tell_logprobs(line[at.tokens : at.drafts][:count], told_QC[:count], asked))

    def prompt_logprobs(self) -> Mapping[int, Sequence[TokenLogprobs]]:
        """Of the prompt tokens behind those that were read, by the keys of the requests that ask for them."""
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
        """How far the drafter has read with a row before which the target had read so much."""
        if self.of_prompts:
            return before + row.count - row.samples
        return before if self.drafter_depth else before - 1


def _tree_of(line: Sequence[int], sure_DW: Sequence[Sequence[float]], at: RoundLine) -> TreeResults:
    """What the line of a row says of its tree."""
    candidates = list[Candidates]()
    for first, chances in zip(range(at.drafts + 2, at.sure, at.candidates), sure_DW, strict=True):
        if line[first] < 0:
            break
        candidates.append(Candidates(tuple(line[first : first + at.candidates]), tuple(chances)))
    return TreeResults(deepest=line[at.drafts + 1], candidates=candidates)
