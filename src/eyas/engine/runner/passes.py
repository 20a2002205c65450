"""Passes in fixed shapes: nothing here looks at a number on the host, so a CUDA graph can record it.

    read     the target over chunks of many prompts, one behind the other: its logits behind each chunk, and the states
             of all. Where a drafter reads along, it reads each token whose successor is known
    verify   the target over padded rows: its logits, its most likely token everywhere, and the states of all tokens
    draft    the drafter reads the states of a row's new tokens, then drafts a chain behind them, all depths at once
    both     one after the other, where the drafts are verified come what may

Rows that are not real, and tokens behind a row's live ones, are written to the null block and cost little. What comes
out at their places means nothing.

Drafts for requests that sample are raced, like the target's tokens, against the request's own noise (`noise.py`), but
among the most likely tokens alone: `verify.draw` races the whole vocabulary. A draft is only a guess, so this can cost
acceptance where a distribution is flat, and never shows in a token.

Shapes: R rows, Q tokens of a row, N = R * Q, P blocks of a row, V vocabulary, W draft vocabulary, X concatenated
auxiliary states, D drafter hidden, L a short list, S rows of the shared memory for states and logits.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from eyas.drafter.model import Drafter
from eyas.engine.kv_cache.cache import KVCache
from eyas.engine.runner.attention import PagedAttention
from eyas.engine.runner.drafter import DrafterRunner
from eyas.kernels.attention.metadata import AttentionMetadata
from eyas.kernels.noise import exponential

Numbers = Mapping[str, Tensor]
"""The tables of a `InputBuffers` on the device."""

Mark = Callable[[], None]
"""To be called where a part ends: its time is taken there, on the device."""

RunTarget = Callable[[Tensor, AttentionMetadata, Tensor | None], tuple[Tensor, Tensor | None]]
"""Tokens [N] of a layout, and those of them [M] behind which logits are asked for, or None for all, to logits [M, V]
and auxiliary states [N, X]."""

SHORT_LIST = 64


def read(
    numbers: Numbers,
    _: Mark,
    run: RunTarget,
    cache: KVCache,
    logits_SV: Tensor,
    states_CX: Tensor | None,
    drafter: DrafterRunner | None,
) -> Tensor:
    """The most likely token [R] behind each chunk; logits and the states of all tokens are left where they are told.

    Numbers: those of `read_ragged`.
    """
    chunks = read_ragged(numbers, run, cache, drafter)
    logits_SV[: len(chunks.logits_RV)].copy_(chunks.logits_RV)
    if states_CX is not None and chunks.states_NX is not None:
        states_CX[: len(chunks.states_NX)].copy_(chunks.states_NX)
    return chunks.logits_RV.argmax(dim=-1)


class ChunksRead(NamedTuple):
    """What a pass over chunks of prompts gives. At rows of no tokens it means nothing."""

    logits_RV: Tensor
    """Behind the last token of every row."""
    last_RX: Tensor | None
    """The states of these tokens."""
    states_NX: Tensor | None
    """The states of all tokens."""


def read_ragged(numbers: Numbers, run: RunTarget, cache: KVCache, drafter: DrafterRunner | None) -> ChunksRead:
    """Chunks of many prompts in one pass; the drafter, if any, reads along as far as the tokens behind are known.

    Numbers: `ids` [N], `behind` [N] the tokens behind each, -1 where not known (only the last of a row can be so),
    `start` [R + 1] where rows begin and the last ends, `base` [R] slots read before, by target and drafter alike,
    `table` [R, P]. Tokens behind the last row are padding.
    """
    ids_N, start = numbers["ids"], numbers["start"].int()
    table_RP, base_R = numbers["table"].int(), numbers["base"].int()
    last_R = (start[1:].long() - 1).clamp(min=0)
    lay_out = partial(AttentionMetadata.ragged, table_RP, base_R, start, count=len(ids_N))
    layout = lay_out(block_size=cache.block_size, null_slot=cache.null_slot)
    logits_RV, aux_NX = run(ids_N, layout, last_R)
    if aux_NX is None:
        return ChunksRead(logits_RV, None, None)
    if drafter is not None:
        model, its_cache, behind_N = drafter.model, drafter.cache, numbers["behind"]
        live_R = (start.diff() - (behind_N[last_R] < 0).int()).clamp(min=0)
        layout = lay_out(block_size=its_cache.block_size, null_slot=its_cache.null_slot, live_R=live_R)
        hidden_ND = model.fuse(aux_NX.to(model.fc.weight.dtype))
        token_N = behind_N.clamp(min=0)
        if drafter.remembers:
            its_cache.write(0, layout.slot_mapping_N, *model.remember(hidden_ND, token_N, layout.position_N))
        else:
            model.step(hidden_ND, token_N, layout.position_N, drafter.attention(layout))
    return ChunksRead(logits_RV, aux_NX[last_R], aux_NX)


def verify(
    numbers: Numbers, _: Mark, run: RunTarget, cache: KVCache, logits_SV: Tensor, states_SX: Tensor | None
) -> Tensor:
    """The most likely token [R, Q] behind each; logits and states are left in the shared memory, row by row.

    Numbers: `ids` [R, Q], `base` and `live` [R], `table` [R, P].
    """
    table, base, count = (numbers[name].int() for name in ("table", "base", "live"))
    return _verify(numbers["ids"], table, base, count, run, cache, logits_SV, states_SX)


def _verify(
    ids_RQ: Tensor,
    table_RP: Tensor,
    base_R: Tensor,
    live_R: Tensor,
    run: RunTarget,
    cache: KVCache,
    logits_SV: Tensor,
    states_SX: Tensor | None,
) -> Tensor:
    layout = _lay_out(table_RP, base_R, live_R, ids_RQ.shape[1], cache)
    logits_NV, aux_NX = run(ids_RQ.flatten(), layout, None)
    logits_SV[: len(logits_NV)].copy_(logits_NV)
    if states_SX is not None and aux_NX is not None:
        states_SX[: len(aux_NX)].copy_(aux_NX)
    return logits_NV.argmax(dim=-1).view(ids_RQ.shape)


def draft_and_verify(
    numbers: Numbers,
    mark: Mark,
    draft: Callable[[Numbers, Mark], Tensor],
    run: RunTarget,
    cache: KVCache,
    logits_SV: Tensor,
    states_SX: Tensor,
) -> Tensor:
    """Both, with nobody in between: what `draft` gives, and behind it the most likely tokens, all in one line.

    Numbers: those of `draft`, and `newest` [R], the token that the target has not read.
    """
    drafted_2RK = draft(numbers, mark)
    ids_RQ = torch.cat([numbers["newest"][:, None], drafted_2RK[0]], dim=1)
    table, read, count, limit = (numbers[name].int() for name in ("table", "base", "live", "limit"))
    # A row has something to read, or it is not real.
    verified_R = torch.where(count > 0, 1 + limit, 0)
    largest_RQ = _verify(ids_RQ, table, read + count, verified_R, run, cache, logits_SV, states_SX)
    return torch.cat([drafted_2RK.flatten(), largest_RQ.flatten()])


def draft(
    numbers: Numbers,
    mark: Mark,
    drafter: Drafter,
    attend: Callable[[AttentionMetadata], PagedAttention],
    cache: KVCache,
    token_W: Tensor,
    states_SX: Tensor,
    *,
    depth: int,
    sampled: bool,
) -> Tensor:
    """Drafts of every depth and how sure the drafter was: [2, R, depth], the latter as the bits of float64.

    Numbers: `from` [R, Q] where the states of the new tokens lie, `ids` [R, Q] the tokens behind them, `base` [R] slots
    read before, `live` [R] new ones, `limit` [R] the depth of each row, `table` [R, P]; to sample, also `seed` and the
    real `temperature`, `top_k`, `top_p`, `min_p` [R]. Marked are the beginning, the end of the first pass and that of
    the last.
    """
    mark()
    from_RQ = numbers["from"]
    table, base_R, live_R = (numbers[name].int() for name in ("table", "base", "live"))
    rows, count = from_RQ.shape
    layout = _lay_out(table, base_R, live_R, count, cache)
    hidden_ND = drafter.fuse(states_SX.index_select(0, from_RQ.flatten()).to(drafter.fc.weight.dtype))
    output = drafter.step(hidden_ND, numbers["ids"].flatten(), layout.position_N, attend(layout))
    last_R = torch.arange(rows, device=from_RQ.device) * count + (live_R - 1).clamp(min=0)
    normed_RD, feedback_RD = output.normed[last_R], output.feedback[last_R]
    end_R = base_R + live_R
    tokens, sure = list[Tensor](), list[Tensor]()
    for at in range(depth):
        if at > 0:
            goes_R = (numbers["limit"] > at).int()
            layout = _lay_out(table, (end_R + at - 1) * goes_R, goes_R, 1, cache)
            output = drafter.step(feedback_RD, tokens[-1], layout.position_N, attend(layout))
            normed_RD, feedback_RD = output.normed, output.feedback
        logits_RW = drafter.logits(normed_RD)
        q_RW = logits_RW.softmax(dim=-1, dtype=torch.float32)
        if sampled:
            # The newest token stands at position end_R: the target has not read it, so it has no slot yet.
            index_R = _race(logits_RW.float(), token_W, numbers, end_R + 1 + at)
            sure_R = q_RW.gather(-1, index_R[:, None])[:, 0]
        else:
            sure_R, index_R = q_RW.max(dim=-1)
        tokens.append(token_W[index_R])
        sure.append(sure_R)
        if at == 0:
            mark()
    mark()
    return torch.stack([torch.stack(tokens, dim=1), torch.stack(sure, dim=1).double().view(torch.int64)])


def _lay_out(table_RP: Tensor, base_R: Tensor, live_R: Tensor, count: int, cache: KVCache) -> AttentionMetadata:
    """Rows of `count` tokens over the blocks of a cache, the first live_R of which are real."""
    size, null_slot = cache.block_size, cache.null_slot
    return AttentionMetadata.padded(table_RP, base_R, live_R, count=count, block_size=size, null_slot=null_slot)


def _race(logits_RW: Tensor, token_W: Tensor, numbers: Numbers, position_R: Tensor) -> Tensor:
    """Where in W the winner of each row stands [R]; the most likely token for rows of temperature 0."""
    temperature_R1, top_k_R1, top_p_R1, min_p_R1 = (
        numbers[name].view(torch.float64).float()[:, None] for name in ("temperature", "top_k", "top_p", "min_p")
    )
    top = logits_RW.topk(min(SHORT_LIST, logits_RW.shape[-1]), dim=-1)
    greedy_R1 = temperature_R1 == 0
    score_RL = top.values / torch.where(greedy_R1, 1.0, temperature_R1)
    rank_L = torch.arange(score_RL.shape[-1], device=score_RL.device)
    kept_RL = (score_RL >= score_RL[:, :1] + min_p_R1.log()) & ((rank_L < top_k_R1) | (top_k_R1 == 0))
    p_RL = score_RL.masked_fill(~kept_RL, float("-inf")).softmax(dim=-1)
    p_RL = p_RL * (p_RL.cumsum(dim=-1) - p_RL < top_p_R1)
    noise_RL = exponential(numbers["seed"], position_R.long(), token_W[top.indices])
    place_R1 = torch.where(greedy_R1, 0, (p_RL / noise_RL).argmax(dim=-1, keepdim=True))
    return top.indices.gather(-1, place_R1)[:, 0]
