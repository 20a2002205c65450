"""Verification on the host: which drafts equal the target's tokens."""

from collections.abc import Sequence

from eyas.engine.masks import banned_tokens
from eyas.engine.request import SequenceState
from oracle.draft import Draft
from oracle.sampler import SamplingMetadata


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


def sampling_metadata(seq: SequenceState, drafts: Sequence[int]) -> SamplingMetadata:
    """Metadata for sampling a request's token after its tokens and these drafts."""
    request = seq.request
    return SamplingMetadata(
        sampling=request.sampling,
        position=len(seq.tokens) + len(drafts),
        seed=request.seed,
        before=[*seq.tokens, *drafts] if request.sampling.penalises else (),
        prompt_length=seq.prompt_length,
        banned=banned_tokens(seq, drafts),
        mask_V=None if seq.matcher is None else seq.matcher.mask(seq.tokens, drafts),
    )
