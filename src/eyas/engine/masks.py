"""Token masks that only the host can compute, for grammars and bad words.

A mask depends only on the tokens before its position, so drafts cannot change the result.

Shapes: R rows, Q tokens of a row, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from eyas.engine.request import SequenceState
from eyas.engine.runner.exact_passes import DraftMask
from eyas.engine.runner.round import Round
from eyas.engine.runner.sampling_needs import needs_mask


def mask_of(made: Round, vocab_size: int) -> Tensor:
    """Masks of allowed tokens at every position of a round [R * Q, V]; all tokens before must be committed."""
    drafts: Sequence[Sequence[int]] = [[] for _ in made.rows]
    if made.drafted is not None and made.drafts_RK is not None:
        made.drafted.wait()
        drafts = made.drafts_RK.tolist()
    width = 1 + made.depth
    mask_NV = torch.ones(made.bucket * width, vocab_size, dtype=torch.bool)
    for number, (row, drafted) in enumerate(zip(made.rows, drafts, strict=True)):
        seq = row.seq
        if row.samples and seq.finished is None and needs_mask(seq):
            for depth in range(1 + min(row.drafts, made.depth)):
                _forbid(mask_NV[number * width + depth], seq, drafted[:depth])
    return mask_NV


def draft_mask(made: Round, vocab_size: int) -> DraftMask:
    """Masks for choosing drafts, in a round with nothing in flight: forbidden drafts would never be accepted."""

    def mask(number: int, drafts: Sequence[int]) -> Tensor | None:
        seq = made.rows[number].seq
        if seq.finished is not None or not needs_mask(seq):
            return None
        mask_V = torch.ones(vocab_size, dtype=torch.bool)
        _forbid(mask_V, seq, drafts)
        return mask_V

    return mask


def _forbid(mask_V: Tensor, seq: SequenceState, drafts: Sequence[int]) -> None:
    """Remove tokens from a mask that may not follow a request's tokens and these drafts."""
    if seq.matcher is not None and (allowed_V := seq.matcher.mask(seq.tokens, drafts)) is not None:
        mask_V &= allowed_V
    mask_V[list(banned_tokens(seq, drafts))] = False


def banned_tokens(seq: SequenceState, drafts: Sequence[int]) -> frozenset[int]:
    """Tokens that may not come next: stop ids before the minimum length, and last tokens of bad words."""
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
