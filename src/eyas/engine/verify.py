"""What the target said in a pass, and what that means for each row: which drafts are accepted, which tokens are new.

Shapes: N tokens of a pass, M logits asked for, V vocabulary, X concatenated auxiliary states, R rows, Q tokens of each.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eyas.engine.request import SequenceState
from eyas.engine.runner.drafter import Draft
from eyas.engine.sampler import SamplingMetadata, accept_tree
from eyas.engine.scheduler import ScheduledRow
from eyas.kernels.attention.metadata import AttentionRow


@dataclass(frozen=True, kw_only=True, eq=False)
class TargetOutput:
    """What came of the target's pass."""

    logits_MV: Tensor
    aux_NX: Tensor | None
    largest_RQ: Tensor | None = None
    """The most likely tokens, if the pass was recorded."""
    stride: int = 0
    """Then rows begin so far apart, among logits and states alike; else they follow one another."""
    of_chunk: bool = False
    """Whether that was a recorded chunk of a prompt."""


@dataclass(kw_only=True, slots=True)
class VerifyResult:
    """What the target said about one row."""

    row: ScheduledRow
    draft: Draft
    nodes: list[int]
    """Accepted drafts."""
    tokens: list[int]
    """New tokens: the accepted drafts and one of the target's own; none for a chunk in the middle of a prompt."""
    token_at: int
    """Where the row begins among the tokens of the pass."""
    logits_at: int
    """Where its logits begin among those asked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranking:
    """What a round tells of the drafter's candidates, for the accepted depths and the one after them."""

    ranks: list[int]
    """Which candidate was the target's token, 1 for the first, 0 for none of those looked at."""
    candidates: list[tuple[float, ...]]
    """How sure the drafter was of each."""

    @property
    def firsts(self) -> list[float]:
        """How sure it was of the first."""
        return [some[0] for some in self.candidates]


def ranking(verdict: VerifyResult) -> Ranking:
    """Where the target's tokens stand among the candidates, as far as these were noted."""
    made = Ranking(ranks=[], candidates=[])
    for node, token in zip((-1, *verdict.nodes), verdict.tokens, strict=True):
        seen = verdict.draft.candidates.get(node)
        if seen is None:
            break
        made.ranks.append(seen.tokens.index(token) + 1 if token in seen.tokens else 0)
        made.candidates.append(seen.confidences)
    return made


def accepted_nodes(draft: Draft, own: Sequence[int]) -> list[int]:
    """Drafts that are the target's own tokens, from the first depth down."""
    if not draft.is_chain:
        return accept_tree(draft.parents, draft.tokens, own)
    same = 0
    while same < len(draft.tokens) and draft.tokens[same] == own[same]:
        same += 1
    return list(range(same))


def is_plainly_greedy(seq: SequenceState) -> bool:
    """Whether the largest logit is the answer, here and behind drafts."""
    sampling = seq.request.sampling
    shaped = sampling.shapes_logits or seq.walk is not None
    return not (sampling.temperature or shaped or seq.new_tokens < seq.request.min_new_tokens)


def lay_out(row: ScheduledRow, draft: Draft) -> AttentionRow:
    """A row in the target's pass: its tokens, then its drafts, each seeing the way to itself."""
    count = row.count + len(draft.tokens)
    if draft.is_chain:
        return AttentionRow(blocks=row.seq.blocks, base=row.start, count=count)
    assert row.count == 1, "only decoding rows carry drafts"
    paths = [set(draft.path(node)) for node in range(len(draft.tokens))]
    ancestors = torch.zeros(count, count, dtype=torch.bool)
    ancestors[:, 0] = True
    for node, path in enumerate(paths):
        ancestors[1 + node, [1 + other for other in path]] = True
    return AttentionRow(blocks=row.seq.blocks, base=row.start, count=count, ancestors=ancestors)


def sampling_metadata(seq: SequenceState, drafts: Sequence[int]) -> SamplingMetadata:
    """How a request's token behind its tokens and these drafts is chosen."""
    request = seq.request
    made = seq.new_tokens + len(drafts)
    return SamplingMetadata(
        sampling=request.sampling,
        position=len(seq.tokens) + len(drafts),
        seed=request.seed,
        before=[*seq.tokens, *drafts] if request.sampling.penalises else (),
        prompt_length=seq.prompt_length,
        banned=request.stop_ids if made < request.min_new_tokens else frozenset(),
        mask_V=None if seq.walk is None else seq.walk.mask(seq.tokens, drafts),
    )
