"""A round on the device: passes over the requests of `RoundState`, in fixed shapes, for a CUDA graph to record.

    draft      the drafter reads the states that wait for it, then drafts a chain behind them, all depths at once
    place      drafts that the host has looked up, instead of the drafter's, behind them or without one
    verify     the target over the newest token and its drafts: logits, and states into the ring
    sample     the target's own token behind each, drafts that equal it, and what that makes of the request
    read       the target over chunks of prompts, flat, and the drafter with it; `sample` ends those that are complete
    catch_up   the drafter reads what waits but for the last state, while nothing is drafted

Nothing here looks at a number on the host. What the host knows when it launches a pass is which slots take part and how
deep each may be drafted for at most; where they stand it may not know yet, since the round before is still running.

Where tokens come from and go to is for `kernels/round_layout.py` to say, what a round gives for
`kernels/round_outcome.py`. Rows of nobody's slot, requests that have come to their limit, and tokens behind a row's
live ones cost little; what comes out at their places means nothing.

Shapes: R rows, Q tokens of a row, K = Q - 1 drafts, N tokens of a pass, C states of a row that are read, P blocks of a
row, V vocabulary, W draft vocabulary, X concatenated auxiliary states, L the ring.
"""

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from eyas.engine.kv_cache.cache import KVCache
from eyas.engine.logprobs import compute_logprobs
from eyas.engine.runner.drafter import DrafterRunner
from eyas.engine.runner.drafts import step_for
from eyas.engine.runner.graph_capture import Numbers
from eyas.engine.runner.model_runner import ModelRunner
from eyas.engine.runner.round_state import RoundState
from eyas.engine.runner.sampling_needs import NO_LOGPROBS, Needs
from eyas.engine.runner.slot_sampling import SlotSampling
from eyas.engine.speculation.draft import Tree
from eyas.kernels.attention.metadata import AttentionMetadata
from eyas.kernels.draft_choice import choose_drafts
from eyas.kernels.round_layout import BlockShape, Rows, lay_out_draft, lay_out_verify
from eyas.kernels.round_offers import place_offers
from eyas.kernels.round_outcome import settle

LOGITS_AT_ONCE = 64
"""Rows of prompt logits that are reduced together, which bounds the memory of the reduction."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RoundTarget:
    """A target over its blocks."""

    model: ModelRunner
    logits_SV: Tensor
    """Where its passes leave logits, for `sample`."""

    @property
    def cache(self) -> KVCache:
        """Its keys and values."""
        return self.model.cache

    def leave_logits(
        self, ids_N: Tensor, layout: AttentionMetadata, keep_M: Tensor | None, *, states: bool = True
    ) -> Tensor | None:
        """Run the tokens of a layout; gives their states, if somebody reads them."""
        out_MV = self.logits_SV[: (ids_N if keep_M is None else keep_M).shape[0]]
        logits_MV, aux_NX = self.model.run_pass(ids_N, layout, keep_M, out_MV, states=states)
        if logits_MV.data_ptr() != out_MV.data_ptr():
            out_MV.copy_(logits_MV)
        return aux_NX

    def move(self, from_M: Tensor, to_M: Tensor, rows: int) -> None:
        """Put the accepted path of each tree side by side, as if it had been a chain."""
        self.cache.move_by_row(from_M, to_M, rows)
        if self.model.kept_states is not None:
            self.model.kept_states.move(from_M, to_M)


@dataclass(kw_only=True, eq=False)
class PromptTokens:
    """Tokens of prompts whose log probabilities are asked for, in a pass that reads the tokens before them."""

    place_M: Tensor
    """Where the tokens before them stand in the pass."""
    token_M: Tensor
    alternatives: int
    told_MC: Tensor | None = None
    """What the pass says: each token, and the columns of `logprob_columns`."""

    @property
    def shape(self) -> tuple[int, int]:
        """Of what the pass says."""
        return len(self.token_M), 3 + 2 * self.alternatives

    def take(self) -> Tensor:
        """What the pass says, once it has run."""
        assert self.told_MC is not None, "the pass has run"
        return self.told_MC

    def leave_logits(
        self, target: RoundTarget, ids_N: Tensor, layout: AttentionMetadata, last_R: Tensor, *, states: bool
    ) -> Tensor | None:
        """As `RoundTarget.leave_logits` behind the last tokens of rows, and behind these."""
        rows, keep_M = len(last_R), torch.cat([last_R, self.place_M])
        logits_MV, aux_NX = target.model.run_pass(ids_N, layout, keep_M, None, states=states)
        target.logits_SV[:rows].copy_(logits_MV[:rows])
        told, of_prompts_MV = list[Tensor](), logits_MV[rows:]
        for at in range(0, len(self.token_M), LOGITS_AT_ONCE):
            token_N = self.token_M[at : at + LOGITS_AT_ONCE]
            columns_NC = logprob_columns(of_prompts_MV[at : at + LOGITS_AT_ONCE], token_N, self.alternatives)
            told.append(torch.cat([token_N[:, None], columns_NC], dim=1))
        self.told_MC = torch.cat(told)
        return aux_NX


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
) -> Tensor:
    """Read up to `reads` states of each row and draft up to `depth` tokens, which are left in `state`: [R, K]."""
    run, shape = drafter.run, block_shape(drafter.cache, blocks)
    layout = lay_out_draft(state, shape, rows=rows, reads=reads, depth=depth)
    hidden_ND = drafter.fuse(state, layout.place_N)
    tokens = layout.tokens
    output = step_for(run, hidden_ND, layout.ids_N, tokens.position_N, drafter.attend(tokens), layout.last_R)
    normed_RD, feedback_RD = output.normed, output.feedback
    for at in range(depth):
        logits_RW = run.logits(normed_RD)
        index_R = None
        if needs.sampled:
            slot_R = state.row_slot[:rows]
            # The newest token stands at position length: the target has not read it, so it has no slot yet.
            index_R = sampling.draw(logits_RW, slot_R, state.length_S[slot_R] + 1 + at, drafter.token_W, needs)
        token_R = choose_drafts(logits_RW, drafter.token_W, state.drafts_RK, state.sure_RK, at, index_R)
        if at + 1 < depth:
            tokens = layout.deeper[at]
            output = run.step(feedback_RD, token_R, tokens.position_N, drafter.attend(tokens))
            normed_RD, feedback_RD = output.normed, output.feedback
    return state.drafts_RK[:rows, :depth]


def place(_: Numbers, *, state: RoundState, rows: int, depth: int, own_depth: int) -> Tensor:
    """Drafts of the host's offers where they stand, left in `state`; elsewhere the drafter's, which are so deep."""
    return place_offers(state, rows=rows, depth=depth, own_depth=own_depth)


def verify(
    _: Numbers, *, state: RoundState, target: RoundTarget, rows: int, depth: int, blocks: int, followed: bool = True
) -> Tensor:
    """The target over the newest token and the drafts; logits are left row by row, states in the ring.

    Where no row is followed, there are no states to leave.
    """
    layout = lay_out_verify(state, block_shape(target.cache, blocks), rows=rows, depth=depth)
    aux_NX = target.leave_logits(layout.ids_N, layout.tokens, None, states=followed)
    if state.states_SLX is not None and aux_NX is not None:
        state.states_SLX.flatten(0, 1).index_copy_(0, layout.place_N, aux_NX.to(state.states_SLX.dtype))
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
    """What came of the round of each row, in one line of numbers (`RoundLine` says which).

    An answer that comes to its limit gets fewer tokens than were accepted. With a chance, drafts are accepted by a
    coin: to measure at an acceptance of one's choice.
    """
    slot_R, drafts_RK = state.row_slot[:rows], state.drafts_RK[:rows, :depth]
    logits_NV = target.logits_SV[: rows * (1 + depth)]
    if needs.greedy and mask_NV is None:
        line_RC = settle(state, rows=rows, depth=depth, logits_NV=logits_NV, chance=chance)
    else:
        token_RQ = sampling.choose(logits_NV, slot_R, state.length_S[slot_R] + 1, drafts_RK, needs, mask_NV)
        line_RC = settle(state, rows=rows, depth=depth, token_RQ=token_RQ, chance=chance)
    token_RQ = line_RC[:, 2 : 3 + depth]
    sampling.note(slot_R, token_RQ, line_RC[:, 0], needs)
    return with_logprobs(line_RC, logits_NV, None, token_RQ, needs)


def with_logprobs(line_RC: Tensor, logits_NV: Tensor, place_M: Tensor | None, token_RQ: Tensor, needs: Needs) -> Tensor:
    """Lines with the logprobs of tokens behind them, if anybody asks; logits are theirs, or those at some places."""
    if needs.logprobs == NO_LOGPROBS:
        return line_RC
    logits_MV = logits_NV if place_M is None else logits_NV[place_M]
    told_NC = logprob_columns(logits_MV, token_RQ.flatten(), needs.logprobs)
    return torch.cat([line_RC, told_NC.view(len(line_RC), -1)], dim=1)


def logprob_columns(logits_NV: Tensor, token_N: Tensor, alternatives: int) -> Tensor:
    """Of each token its log probability, its rank, the most likely tokens and theirs; real numbers as their bits."""
    told = compute_logprobs(logits_NV, token_N, alternatives)
    columns = (_bits(told.logprob_N)[:, None], told.rank_N[:, None], told.top_token_NK, _bits(told.top_logprob_NK))
    return torch.cat(columns, dim=1)


def _bits(reals: Tensor) -> Tensor:
    return reals.double().view(torch.int64)


@dataclass(frozen=True, kw_only=True)
class RoundLine:
    """Where the numbers of a row stand in what `sample` gives: counts of new tokens and of accepted drafts, then these.

    Real numbers are the bits of float64. Of trees there are two counts instead of drafts, and candidates
    (`kernels/tree_outcome.py`).
    """

    depth: int
    alternatives: int
    """Of logprobs; `NO_LOGPROBS` without."""
    tree: Tree | None = None

    @property
    def tokens(self) -> int:
        """Q of them."""
        return 2

    @property
    def drafts(self) -> int:
        """K of them."""
        return 3 + self.depth

    @property
    def sure(self) -> int:
        """How sure the drafter was of each; of trees, of each candidate."""
        return self.drafts + (self.depth if self.tree is None else 2 + self.depth * self.tree.width)

    @property
    def logprobs(self) -> int:
        """For each token its logprob, its rank, the most likely tokens and theirs."""
        return self.sure + self.depth * (1 if self.tree is None else self.tree.width)

    @property
    def width(self) -> int:
        """Numbers in all."""
        told = 0 if self.alternatives == NO_LOGPROBS else 2 + 2 * self.alternatives
        return self.logprobs + (1 + self.depth) * told


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
    """The target over chunks of prompts; logits behind the last token of each row are left for `sample`.

    The drafter reads along, if there is one that follows any of the rows.

    Numbers: `ids` [N] and `behind` [N], the tokens and those behind them (0 behind a prompt's last), `kept` [N], which
    of them the target has written before and are read for the drafter alone, `start` [R + 1], where rows begin,
    `base` [R], their first positions. A row that samples is left where a decoding one stands before its newest token is
    read.
    """
    who = Rows(state, rows, block_shape(target.cache, blocks))
    ids_N, start_R, base_R = numbers["ids"], numbers["start"].int(), numbers["base"]
    samples_R, count_R = state.row_samples[:rows], start_R.diff().long()

    def lay_out(live_R: Tensor, cache: KVCache) -> AttentionMetadata:
        size, null_slot = cache.block_size, cache.null_slot
        return AttentionMetadata.ragged(
            who.table_RP,
            base_R.int(),
            start_R,
            count=len(ids_N),
            block_size=size,
            null_slot=null_slot,
            live_R=live_R.int(),
        )

    last_R = (start_R[1:].long() - 1).clamp(min=0)
    layout = lay_out(count_R, target.cache)
    leave_logits = target.leave_logits if asked is None else partial(asked.leave_logits, target)
    # What others may share is not written twice: they find it as it was, to the last bit.
    place_N = layout.slot_mapping_N.masked_fill(numbers["kept"] > 0, target.cache.null_slot)
    aux_NX = leave_logits(ids_N, replace(layout, slot_mapping_N=place_N), last_R, states=drafter is not None)
    # Nobody's slot takes what rows of none say; its numbers mean nothing.
    end_R = base_R + count_R
    follows_R = state.follows_S[who.slot_R]
    if drafter is not None and state.states_SLX is not None and aux_NX is not None:
        # What comes of a prompt's last token, whose next is not known yet, lies in the row's own slot until that is
        # read again; so does what comes of rows that nobody drafts for. Only attention would be misled by it.
        alike = drafter.remembers and block_shape(drafter.cache, blocks) == block_shape(target.cache, blocks)
        if not alike:
            layout = lay_out((count_R - samples_R).clamp(min=0) * follows_R, drafter.cache)
        drafter.read(drafter.run.fuse(aux_NX.to(drafter.dtype)), numbers["behind"], layout)
        place_R1 = who.in_ring((end_R - 1).clamp(min=0)[:, None])
        state.states_SLX.flatten(0, 1).index_copy_(0, place_R1[:, 0], aux_NX[last_R].to(state.states_SLX.dtype))
    state.length_S.index_copy_(0, who.slot_R, (end_R - samples_R).clamp(min=0))
    state.drafted_S.index_copy_(0, who.slot_R, (end_R - samples_R).clamp(min=0) * follows_R)
    return last_R


def catch_up(_: Numbers, *, state: RoundState, drafter: DrafterRunner, rows: int, blocks: int) -> Tensor:
    """Let the drafter read all that waits for rows but the last state."""
    layout = lay_out_draft(
        state, block_shape(drafter.cache, blocks), rows=rows, reads=state.most_waiting, depth=0, kept=1
    )
    drafter.read(drafter.fuse(state, layout.place_N), layout.ids_N, layout.tokens)
    return layout.last_R


def block_shape(cache: KVCache, blocks: int) -> BlockShape:
    """Of rows with at most so many blocks."""
    return BlockShape(blocks=blocks, block_size=cache.block_size, null_slot=cache.null_slot)
