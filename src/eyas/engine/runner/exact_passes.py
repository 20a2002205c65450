"""The passes of `round_passes.py` on a CPU, where a number costs nothing to read: live rows and tokens, nothing else.

They take what those take, so that `round_graphs.py` may choose; `reads` and `blocks`, which shapes are made of, are
not looked at. Logits are left packed, those of live tokens row behind row (`kernels/exact_rounds.py`).

Shapes: R rows, Q tokens of a row, K drafts, N tokens of a pass, M logits, D drafter hidden, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eyas.engine.runner.drafter import DrafterRunner
from eyas.engine.runner.drafts import remember_in, step_for
from eyas.engine.runner.graph_capture import Numbers
from eyas.engine.runner.round_passes import PromptTokens, RoundTarget, with_logprobs
from eyas.engine.runner.round_state import RoundState
from eyas.engine.runner.sampling_needs import NO_LOGPROBS, Needs
from eyas.engine.runner.slot_sampling import SlotSampling
from eyas.kernels.attention.metadata import AttentionMetadata, AttentionRow
from eyas.kernels.elementwise import elementwise_for
from eyas.kernels.exact_rounds import ExactLayout, Integers, spread
from eyas.kernels.round_outcome import settle

DraftMask = Callable[[int, Sequence[int]], Tensor | None]
"""Which tokens may follow a row of a round and its drafts so far [V]; None: any."""
HINDRANCE = 1e4
"""What a forbidden draft loses: it is chosen where all are forbidden, and refused like any other."""
MANY = 32
"""Tokens whose queries and outputs, which nobody needs, take longer than a pass of its own for the last one."""


def draft(
    _: Numbers,
    *,
    state: RoundState,
    drafter: DrafterRunner,
    sampling: SlotSampling,
    needs: Needs,
    rows: int,
    reads: int,
    depth: int,
    blocks: int,
    mask: DraftMask | None = None,
) -> Tensor:
    """Read the states that wait and draft up to `depth` tokens behind them."""
    arrays, size = state.arrays, drafter.cache.block_size
    layout = arrays.lay_out_draft(size, rows=rows, depth=depth)
    drafts_RK = state.drafts_RK[:rows, :depth]
    if not layout.row_R:
        return drafts_RK
    going = [place for place, row in enumerate(layout.row_R) if arrays.depth_R[row] > 0]
    row_R = [layout.row_R[place] for place in going]
    normed_RD, feedback_RD = _read(state, drafter, layout, going)
    made = 0
    while row_R:
        ends = min(arrays.depth_R[row_R].tolist())
        at_once = None
        if drafter.in_calls is not None and not needs.sampled and mask is None:
            attend = drafter.attend(arrays.next_tokens(size, row_R, 1 + made, ends - made - 1))
            at_once = drafter.in_calls.chains(normed_RD, feedback_RD, attend, ends - made)
        if at_once is not None:
            arrays.drafts_RK[row_R, made:ends] = at_once.token_KR.T
            arrays.sure_RK[row_R, made:ends] = at_once.chance_KR.T
            feedback_RD, made = at_once.feedback_RD, ends
        else:
            _choose(state, drafter, sampling, needs, normed_RD, row_R, made, mask)
            made += 1
        places = [place for place, row in enumerate(row_R) if arrays.depth_R[row] > made]
        if not places:
            break
        if len(places) < len(row_R):
            row_R, feedback_RD = [row_R[place] for place in places], feedback_RD[places]
        tokens = arrays.next_tokens(size, row_R, made, 0)
        token_R = torch.from_numpy(arrays.drafts_RK[row_R, made - 1])
        output = drafter.run.step(feedback_RD, token_R, tokens.position_N, drafter.attend(tokens))
        normed_RD, feedback_RD = output.normed, output.feedback
    return drafts_RK


def _read(
    state: RoundState, drafter: DrafterRunner, layout: ExactLayout, going: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Let the drafter read; what the first drafts of these rows come of."""
    run, tokens, place_N = drafter.run, layout.tokens, layout.place_N
    last = [start - 1 for start in tokens.starts[1:]]
    keep = [last[place] for place in going]
    if drafter.remembers and (not going or len(place_N) >= len(last) + MANY):
        hidden_ND = drafter.fuse(state, place_N)
        remember_in(drafter.cache, run, tokens, hidden_ND, layout.ids_N)
        if not going:
            return hidden_ND[:0], hidden_ND[:0]
        ends = [tokens.rows[place] for place in going]
        rows = [AttentionRow(blocks=row.blocks, base=row.end - 1, count=1) for row in ends]
        tokens = AttentionMetadata.of(rows, block_size=tokens.block_size, device=place_N.device)
        hidden_ND, ids_N, keep_M = hidden_ND[keep], layout.ids_N[keep], torch.arange(len(keep))
        output = step_for(run, hidden_ND, ids_N, tokens.position_N, drafter.attend(tokens), keep_M)
        return output.normed, output.feedback
    if drafter.in_calls is None:
        hidden_ND, keep_M = drafter.fuse(state, place_N), torch.tensor(keep, dtype=torch.int64)
        output = step_for(run, hidden_ND, layout.ids_N, tokens.position_N, drafter.attend(tokens), keep_M)
        return output.normed, output.feedback
    assert state.states_NX is not None
    aux_NX = state.states_NX.index_select(0, place_N).to(drafter.dtype)
    output = drafter.in_calls.read(aux_NX, layout.ids_N, tokens.position_N, drafter.attend(tokens))
    if len(keep) == len(place_N):
        return output.normed, output.feedback
    return output.normed[keep], output.feedback[keep]


def _choose(
    state: RoundState,
    drafter: DrafterRunner,
    sampling: SlotSampling,
    needs: Needs,
    normed_RD: Tensor,
    row_R: Sequence[int],
    at: int,
    mask: DraftMask | None,
) -> None:
    """Choose draft number `at` of these rows."""
    logits_RW, arrays = drafter.run.logits(normed_RD), state.arrays
    for place, row in enumerate(row_R if mask is not None else ()):
        assert mask is not None
        allowed_V = mask(row, arrays.drafts_RK[row, :at].tolist())
        if allowed_V is not None:
            logits_RW[place] -= HINDRANCE * ~allowed_V[drafter.token_W]
    compiled = None if needs.sampled else elementwise_for(logits_RW)
    if compiled is not None:
        index_R, sure_R = compiled.most_likely_and_chance(logits_RW.contiguous())
    else:
        slot_R = state.row_slot[list(row_R)]
        # The newest token stands at position length: the target has not read it, so it has no slot yet.
        index_R = sampling.draw(logits_RW, slot_R, state.length_S[slot_R] + 1 + at, drafter.token_W, needs)
        logits_RW = logits_RW.float()
        sure_R = (logits_RW.gather(-1, index_R[:, None])[:, 0] - logits_RW.logsumexp(dim=-1)).exp()
    arrays.drafts_RK[row_R, at] = drafter.token_W[index_R].numpy()
    arrays.sure_RK[row_R, at] = sure_R.numpy()


def catch_up(_: Numbers, *, state: RoundState, drafter: DrafterRunner, rows: int, blocks: int) -> Tensor:
    """Let the drafter read all that waits for rows but the last state."""
    layout = state.arrays.lay_out_draft(drafter.cache.block_size, rows=rows, depth=0, kept=1)
    if layout.row_R:
        drafter.read(drafter.fuse(state, layout.place_N), layout.ids_N, layout.tokens)
    return layout.ids_N


def place(_: Numbers, *, state: RoundState, rows: int, depth: int, own_depth: int) -> Tensor:
    """Drafts of the host's offers where they stand; elsewhere the drafter's, which are so deep."""
    state.arrays.place_offers(rows=rows, depth=depth, own_depth=own_depth)
    return state.depth_R[:rows]


def verify(
    _: Numbers, *, state: RoundState, target: RoundTarget, rows: int, depth: int, blocks: int, followed: bool = True
) -> Tensor:
    """The target over the newest token and the drafts."""
    layout = state.arrays.lay_out_verify(target.cache.block_size, rows=rows, depth=depth)
    if layout.row_R:
        aux_NX = target.leave_logits(layout.ids_N, layout.tokens, None, states=followed)
        if state.states_NX is not None and aux_NX is not None:
            state.states_NX.index_copy_(0, layout.place_N, aux_NX.to(state.states_NX.dtype))
    return layout.ids_N


def sample(
    _: Numbers,
    *,
    state: RoundState,
    target: RoundTarget,
    sampling: SlotSampling,
    chance: Tensor | None,
    needs: Needs,
    rows: int,
    depth: int,
    mask_NV: Tensor | None = None,
) -> Tensor:
    """What came of the round of each row, in one line of numbers (`RoundLine` says which)."""
    arrays, logits_NV, tokens = state.arrays, target.logits_SV, rows * (1 + depth)
    live = arrays.live_tokens(rows, depth)
    packed = live < tokens and needs.greedy and mask_NV is None and needs.logprobs == NO_LOGPROBS
    logits_NV = (
        logits_NV[:live] if packed or live == tokens else logits_NV[_places(arrays.live(rows, depth), 1 + depth)]
    )
    if needs.greedy and mask_NV is None:
        compiled = elementwise_for(logits_NV)
        token_N = logits_NV.argmax(dim=-1) if compiled is None else compiled.most_likely(logits_NV)
    else:
        slot_R, drafts_RK = state.row_slot[:rows], state.drafts_RK[:rows, :depth]
        token_N = sampling.choose(logits_NV, slot_R, state.length_S[slot_R] + 1, drafts_RK, needs, mask_NV).flatten()
    if chance is None:
        line_RC = arrays.settle(rows=rows, depth=depth, token_N=token_N, packed=packed)
    else:
        token_RQ = torch.from_numpy(spread(token_N.numpy(), arrays.live(rows, depth), 1 + depth))
        line_RC = settle(state, rows=rows, depth=depth, token_RQ=token_RQ, chance=chance)
    if needs.penalised:
        sampling.note(state.row_slot[:rows], line_RC[:, 2 : 3 + depth], line_RC[:, 0], needs)
    if needs.logprobs == NO_LOGPROBS:
        return line_RC
    return with_logprobs(line_RC, logits_NV, None, line_RC[:, 2 : 3 + depth], needs)


def _places(live_R: Integers, width: int) -> Tensor:
    """Where the logits of every token of every row lie among those packed; nobody's are the first."""
    return torch.from_numpy(spread(np.arange(int(live_R.sum())), live_R, width).flatten())


def read(
    numbers: Numbers,
    *,
    state: RoundState,
    target: RoundTarget,
    drafter: DrafterRunner | None,
    rows: int,
    blocks: int,
    asked: PromptTokens | None = None,
) -> Tensor:
    """The target over chunks of prompts, and the drafter with it where it follows a row."""
    arrays, size = state.arrays, target.cache.block_size
    starts, bases = numbers["start"].tolist(), numbers["base"].tolist()
    slots, samples = arrays.row_slot[:rows].tolist(), arrays.row_samples[:rows].tolist()
    counts = [end - start for start, end in pairwise(starts)]
    made = [
        AttentionRow(blocks=arrays.blocks(slot, base + count, size), base=base, count=count)
        for slot, base, count in zip(slots, bases, counts, strict=True)
    ]
    layout = AttentionMetadata.of(made, block_size=size, device=state.device)
    last_R = torch.tensor([start - 1 for start in starts[1:]])
    leave_logits = target.leave_logits if asked is None else partial(asked.leave_logits, target)
    # What others may share is not written twice: they find it as it was, to the last bit.
    written_N = layout.slot_mapping_N.masked_fill(numbers["kept"] > 0, target.cache.null_slot)
    layout = replace(layout, slot_mapping_N=written_N)
    aux_NX = leave_logits(numbers["ids"], layout, last_R, states=drafter is not None)
    ends = [row.end for row in made]
    if drafter is not None and state.states_NX is not None and aux_NX is not None:
        # What comes of a prompt's last token is read when its next token is known.
        followed = [row for row, slot in enumerate(slots) if arrays.follows_S[slot]]
        read_R = [(row, counts[row] - samples[row]) for row in followed if counts[row] > samples[row]]
        if read_R:
            of_drafter = [
                AttentionRow(
                    blocks=arrays.blocks(slots[row], ends[row], drafter.cache.block_size), base=bases[row], count=count
                )
                for row, count in read_R
            ]
            tokens = AttentionMetadata.of(of_drafter, block_size=drafter.cache.block_size, device=state.device)
            place_N: Any = np.concatenate([np.arange(starts[row], starts[row] + count) for row, count in read_R])
            taken_N = torch.from_numpy(place_N)
            hidden_ND = drafter.run.fuse(aux_NX.index_select(0, taken_N).to(drafter.dtype))
            drafter.read(hidden_ND, numbers["behind"][taken_N], tokens)
        place_R = torch.tensor(
            [slot * state.ring + (end - 1) % state.ring for slot, end in zip(slots, ends, strict=True)]
        )
        state.states_NX.index_copy_(0, place_R, aux_NX[last_R].to(state.states_NX.dtype))
    for slot, end, sampled in zip(slots, ends, samples, strict=True):
        arrays.length_S[slot] = end - sampled
        arrays.drafted_S[slot] = (end - sampled) * arrays.follows_S[slot]
    return last_R
