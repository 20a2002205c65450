"""A pass of requests that is under way, and what came of it once it has landed.

Shapes: R rows, Q tokens of a row, K drafts, C numbers told of a token, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from eyas.engine.runner.device_queue import Mark
from eyas.engine.runner.round_passes import RoundLine
from eyas.engine.runner.sampling_needs import NO_LOGPROBS
from eyas.engine.sampler import LogprobsTensors, TokenLogprobs
from eyas.engine.scheduler import ScheduledRow
from eyas.engine.speculation.draft import Candidates, Tree


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
    """Drafts that were, if not all: the device has chosen."""
    trees: list[TreeResults] | None = None
    """Where trees were grown: of each; there are no confidences then."""


@dataclass(kw_only=True, eq=False)
class LaunchedRound:
    """A pass over some rows that is under way."""

    rows: Sequence[ScheduledRow]
    of_prompts: bool
    """Whether it reads chunks of prompts."""
    bucket: int
    """Rows of the pass, real or not."""
    line: RoundLine
    """What comes of it: the drafts of a row, real or not, among it."""
    reads: int
    """States of a row that the drafter reads before it drafts."""
    drafter_depth: int
    """How deep that has drafted; deeper ones are the host's, and all of them if this is 0."""
    caught_up: Mark | None
    """Where the drafter began to read what waited but for the last state, if it did so before all else."""
    began: Mark
    """Behind that."""
    drafted: Mark | None
    """Where drafting ends, if there is any."""
    flat_tokens: int | None
    """Of the target's pass, if it verifies a budget of drafts; otherwise rows are padded."""
    drafts_RK: Tensor | None
    """Drafts on their way to the host, there with that mark, where the host makes a mask of what may come."""
    sample: Callable[[Tensor | None], None] = field(init=False)
    """Then this is to be called, once, with the mask [R * Q, V]; it has been called otherwise."""
    output: Tensor | None = None
    landed: Mark | None = None

    def collect(self) -> RoundResults:
        """Wait for it."""
        assert self.output is not None, "to be sampled first"
        assert self.landed is not None
        self.landed.wait()
        at, output = self.line, self.output
        if at.tree is not None:
            return self._collect_trees(output, at.tree)
        lines = output[:, : at.drafts].tolist()
        sure_RK, verified = output[:, at.sure : at.logprobs].contiguous().view(torch.float64), None
        if self.flat_tokens is not None:
            verified = (sure_RK >= 0).sum(dim=1).tolist()
            sure_RK = torch.where(sure_RK >= 0, sure_RK, -1 - sure_RK)
        return RoundResults(
            tokens=[line[2 : 2 + line[0]] for line in lines],
            accepted=[line[1] for line in lines],
            confidences=sure_RK.tolist() if at.depth else [],
            verified=verified,
        )

    def _collect_trees(self, output: Tensor, tree: Tree) -> RoundResults:
        at = self.line
        lines = output[:, : at.sure].tolist()
        sure_RDW = output[:, at.sure : at.logprobs].contiguous().view(torch.float64).view(-1, tree.depth, tree.width)
        trees = []
        for line, sure in zip(lines, sure_RDW.tolist(), strict=True):
            candidates = list[Candidates]()
            for first, chances in zip(range(at.drafts + 2, at.sure, tree.width), sure, strict=True):
                if line[first] < 0:
                    break
                candidates.append(Candidates(tuple(line[first : first + tree.width]), tuple(chances)))
            trees.append(TreeResults(deepest=line[at.drafts + 1], candidates=candidates))
        return RoundResults(
            tokens=[line[2 : 2 + line[0]] for line in lines],
            accepted=[line[1] for line in lines],
            confidences=[],
            verified=[line[at.drafts] for line in lines],
            trees=trees,
        )

    def logprobs(self, number: int, count: int) -> tuple[TokenLogprobs, ...] | None:
        """Of the first tokens of a row, if its request asks for them."""
        at, asked = self.line, self.rows[number].seq.request.logprobs
        if at.alternatives == NO_LOGPROBS or asked is None:
            return None
        assert self.output is not None
        line = self.output[number]
        token_Q, told_QC = line[at.tokens : at.drafts], line[at.logprobs :].view(1 + at.depth, -1)
        split = 2 + at.alternatives
        logprob_Q, top_logprob_QK = (x.contiguous().view(torch.float64) for x in (told_QC[:, 0], told_QC[:, split:]))
        columns = token_Q, logprob_Q, told_QC[:, 1], told_QC[:, 2:split], top_logprob_QK
        return tuple(LogprobsTensors(*(column[:count] for column in columns)).tell([asked] * count))

    @property
    def by_drafter(self) -> bool:
        """Whether the drafter has drafted."""
        return self.drafter_depth > 0

    @property
    def drafter_reads(self) -> bool:
        """Whether the drafter reads, of requests that it follows."""
        return self.of_prompts or self.caught_up is not None or self.by_drafter

    def drafter_read(self, row: ScheduledRow, before: int) -> int:
        """How far it has read then with a row before which the target had read so much."""
        if self.of_prompts:
            return before + row.count - row.samples
        return before if self.by_drafter else before - 1

    @property
    def tokens(self) -> int:
        """Of the target's pass, real or not."""
        if self.line.tree is not None:
            return self.bucket * (1 + self.line.tree.budget)
        return self.bucket * (1 + self.line.depth) if self.flat_tokens is None else self.flat_tokens

    @property
    def draft_seconds(self) -> float:
        """Of the device, once collected."""
        return 0.0 if self.drafted is None else self.drafted.seconds_since(self.began)

    @property
    def catch_up_seconds(self) -> float:
        """The same for what was read before all else: no price of drafts, since it is read once after a long rest."""
        return 0.0 if self.caught_up is None else self.began.seconds_since(self.caught_up)

    @property
    def target_seconds(self) -> float:
        """The same for the target's pass and the sampler."""
        assert self.landed is not None
        return self.landed.seconds_since(self.drafted or self.began)
