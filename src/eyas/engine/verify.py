"""What the target said in a pass, and what that means for drafts: which are accepted, which are rejected, what is new.

The token of every position is the target's own (`sampler.py`). A draft is accepted if it is that token and all drafts
before it were; everything behind the first that is not is rejected. Verification is comparison.

Shapes: N tokens of a pass, M logits asked for, V vocabulary, X concatenated auxiliary states, R rows, Q tokens of each.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from eyas.engine.request import SequenceState
from eyas.engine.runner.hidden_states import HiddenStates
from eyas.engine.sampler import SamplingMetadata, TokenLogprobs, choose
from eyas.engine.scheduler import ScheduledRow
from eyas.engine.speculation.draft import NO_DRAFT, Candidates, Draft
from eyas.engine.speculation.observations import RoundOutcome
from eyas.kernels.attention.metadata import AttentionRow


@dataclass(frozen=True, kw_only=True, eq=False)
class TargetOutput:
    """What came of the target's pass."""

    logits_MV: Tensor
    aux_NX: Tensor | None
    """States for the drafter."""
    hidden_NX: Tensor | None = None
    """States that the engine was told to keep."""
    prompt_logprobs: Mapping[int, Sequence[TokenLogprobs]] = field(default_factory=dict)
    """By the keys of requests that ask for them: of the prompt tokens behind those that the pass read."""


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
class _Ranking:
    """What a round tells of the drafter's candidates, for the accepted depths and the one after them."""

    ranks: list[int]
    """Which candidate was the target's token, 1 for the first, 0 for none of those looked at."""
    candidates: list[tuple[float, ...]]
    """How sure the drafter was of each."""

    @property
    def firsts(self) -> list[float]:
        """How sure it was of the first."""
        return [some[0] for some in self.candidates]


def _ranking(tokens: Sequence[int], candidates: Iterable[Candidates | None]) -> _Ranking:
    """Where the target's tokens stand among the candidates noted behind the tokens before them, as far as there are."""
    made = _Ranking(ranks=[], candidates=[])
    for token, seen in zip(tokens, candidates, strict=False):
        if seen is None:
            break
        made.ranks.append(seen.tokens.index(token) + 1 if token in seen.tokens else 0)
        made.candidates.append(seen.confidences)
    return made


def ranks_of(result: VerifyResult) -> tuple[int, ...]:
    """Which of the drafter's candidates the target's tokens were, as far as these were noted."""
    return tuple(_ranking_of(result).ranks)


def _ranking_of(result: VerifyResult) -> _Ranking:
    return _ranking(result.tokens, (result.draft.candidates.get(node) for node in (-1, *result.nodes)))


def outcome_of(key: int, result: VerifyResult) -> RoundOutcome:
    """A row's round as the controller learns of it."""
    draft, ranking = result.draft, _ranking_of(result)
    return RoundOutcome(
        key=key,
        drafted=draft.depth,
        accepted=len(result.nodes),
        confidences=ranking.firsts or (draft.confidences if draft.is_chain else ()),
        ranks=ranking.ranks,
        candidates=ranking.candidates,
    )


def outcome_of_tree(
    key: int, drafted: int, accepted: int, tokens: Sequence[int], candidates: Sequence[Candidates]
) -> RoundOutcome:
    """The same of a tree that was grown and verified on the device, so deep, with candidates behind the tokens."""
    ranking = _ranking(tokens, candidates)
    return RoundOutcome(
        key=key,
        drafted=drafted,
        accepted=accepted,
        confidences=ranking.firsts,
        ranks=ranking.ranks,
        candidates=ranking.candidates,
    )


def verify(rows: Sequence[ScheduledRow], drafts: Mapping[int, Draft], output: TargetOutput) -> list[VerifyResult]:
    """The target's own token behind every position, along the drafts as far as they equal it."""
    offered = [(row, drafts.get(row.seq.key, NO_DRAFT)) for row in rows]
    own_M = _own_tokens(offered, output)
    results, first_n, first_m = [], 0, 0
    for row, draft in offered:
        own = own_M[first_m : first_m + 1 + len(draft.tokens)] if row.samples else []
        nodes = accepted_nodes(draft, own) if row.samples else []
        results.append(
            VerifyResult(
                row=row,
                draft=draft,
                nodes=nodes,
                tokens=[own[1 + node] for node in (-1, *nodes)] if row.samples else [],
                token_at=first_n,
                logits_at=first_m,
            )
        )
        first_n += row.count + len(draft.tokens)
        first_m += len(own)
    return results


def _own_tokens(offered: Sequence[tuple[ScheduledRow, Draft]], output: TargetOutput) -> list[int]:
    """The target's own tokens, each at the place of its logits."""
    metadata = list[SamplingMetadata]()
    for row, draft in offered:
        if row.samples:
            metadata += [sampling_metadata(row.seq, draft.tokens_to(node)) for node in range(-1, len(draft.tokens))]
    chosen: list[int] = choose(output.logits_MV, metadata).tolist() if metadata else []
    return chosen


def accepted_nodes(draft: Draft, own: Sequence[int]) -> list[int]:
    """Drafts that are the target's own tokens, from the first depth down."""
    if not draft.is_chain:
        return accept_tree(draft.parents, draft.tokens, own)
    same = 0
    while same < len(draft.tokens) and draft.tokens[same] == own[same]:
        same += 1
    return list(range(same))


def accept_tree(parents: Sequence[int], drafts: Sequence[int], own: Sequence[int]) -> list[int]:
    """The accepted drafts of one request's tree, as indices, from the first depth down.

    A draft's parent is an earlier one, or -1: the newest token, the root. `own` are the target's tokens behind the
    root and behind each draft, so own[1 + i] follows draft i. Beside the accepted drafts, the one that follows the
    last of them is new.
    """
    assert len(own) == 1 + len(drafts), "one token behind the root and one behind each draft"
    assert all(-1 <= parent < index for index, parent in enumerate(parents)), "a parent precedes its children"
    child: dict[tuple[int, int], int] = {}
    for index, place in enumerate(zip(parents, drafts, strict=True)):
        child.setdefault(place, index)
    path, node = list[int](), -1
    while (following := child.get((node, own[1 + node]))) is not None:
        path.append(following)
        node = following
    return path


def states_of(result: VerifyResult, nodes: Sequence[int], states_NX: Tensor) -> HiddenStates:
    """Of the states of a pass, those of what a row has read: its tokens, and the accepted drafts `nodes`."""
    first, count = result.token_at, result.row.count
    if result.draft.is_chain:
        return HiddenStates(states_NX, first, count + len(nodes))
    places = [*range(first, first + count), *(first + count + node for node in nodes)]
    return HiddenStates(states_NX[places], 0, len(places))


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
    return SamplingMetadata(
        sampling=request.sampling,
        position=len(seq.tokens) + len(drafts),
        seed=request.seed,
        before=[*seq.tokens, *drafts] if request.sampling.penalises else (),
        prompt_length=seq.prompt_length,
        banned=_banned(seq, drafts),
        mask_V=None if seq.matcher is None else seq.matcher.mask(seq.tokens, drafts),
    )


def _banned(seq: SequenceState, drafts: Sequence[int]) -> frozenset[int]:
    """Tokens that may not come behind a request's tokens and these drafts: early ends, and the ends of bad words.

    It is a function of the tokens before alone, so what is banned is banned with and without drafts.
    """
    request = seq.request
    made = seq.new_tokens + len(drafts)
    banned = request.stop_ids if made < request.min_new_tokens else frozenset()
    if not request.bad_words:
        return banned
    longest = min(made, max(len(word) for word in request.bad_words) - 1)
    before = [*seq.tokens[max(seq.prompt_length, len(seq.tokens) - longest) :], *drafts]
    return banned | {word[-1] for word in request.bad_words if _ends_with(before, word[:-1])}


def _ends_with(tokens: Sequence[int], end: tuple[int, ...]) -> bool:
    return not end or tuple(tokens[-len(end) :]) == end
