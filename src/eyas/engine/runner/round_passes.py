"""The passes of a round, in fixed shapes that CUDA graphs can capture, over the requests of `RoundState`.

    draft      the drafter reads the states that wait for it, then drafts a chain
    place      suffix drafts replace the drafter's drafts or extend them
    verify     the target runs over the newest token and its drafts: logits, and states into the ring
    sample     choose the target's token at each position, accept equal drafts, update the requests
    read       the target, and the drafter with it, runs over prompt chunks; `sample` completes those that end
    catch_up   the drafter reads all waiting states but the last, in rounds without drafts

With draft trees:

    draft_trees    the drafter reads waiting states, grows a tree per row, depth by depth, and keeps the likeliest
                   nodes (`kernels/tree_draft.py`)
    verify_trees   the target runs over the newest token and the kept nodes; each node attends to its ancestors
    sample_trees   choose the target's tokens, follow the accepted path, update the requests
                   (`kernels/tree_outcome.py`); keys, values and states of the path move to where a chain leaves them

No pass reads a number on the host. At launch the host knows which slots take part and their most drafts; it may not
know their lengths yet, because the previous round is still running.

`kernels/round_layout.py` computes where tokens are read and written, `kernels/round_outcome.py` the results. Padding
rows, finished requests and tokens behind a row's live ones cost little, and their output is undefined.

Shapes: R rows, Q tokens of a row, K = Q - 1 drafts, N tokens of a pass, C states read of a row, P blocks of a row, V
vocabulary, W draft vocabulary, X concatenated auxiliary states, L the ring. Trees: W candidates of a node, M nodes with
candidates, T tokens of a row that may be new.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from eyas.engine.kv_cache.cache import KVCache
from eyas.engine.logprobs import logprob_columns
from eyas.engine.runner.drafter import DrafterRunner
from eyas.engine.runner.graph_capture import Numbers
from eyas.engine.runner.model_runner import ModelRunner
from eyas.engine.runner.round_state import RoundState
from eyas.engine.runner.sampling_needs import NO_LOGPROBS, Needs
from eyas.engine.runner.slot_sampling import SlotSampling
from eyas.kernels.attention.metadata import AttentionMetadata
from eyas.kernels.draft_choice import choose_drafts
from eyas.kernels.round_layout import Rows, lay_out_draft, lay_out_verify
from eyas.kernels.round_offers import place_offers
from eyas.kernels.round_outcome import settle
from eyas.kernels.round_tensors import BlockShape
from eyas.kernels.tree_draft import choose_candidates, grow, keep, lay_out_trees
from eyas.kernels.tree_nodes import TreeNodes
from eyas.kernels.tree_outcome import settle_trees

LOGITS_AT_ONCE = 64
"""Rows of prompt logits reduced together, to bound memory."""


@dataclass(kw_only=True, eq=False)
class PromptTokens:
    """Prompt tokens whose logprobs are requested, in a pass that reads the tokens before them."""

    place_M: Tensor
    """Positions of their predecessors in the pass."""
    token_M: Tensor
    alternatives: int
    told_MC: Tensor | None = None
    """Result of the pass: each token, then `logprob_columns`."""

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.token_M), 3 + 2 * self.alternatives

    def take(self) -> Tensor:
        """Return the result, after the pass."""
        assert self.told_MC is not None, "the pass must have run"
        return self.told_MC

    def tell(self, logits_MV: Tensor) -> None:
        """Compute the result from the logits of the predecessors."""
        told = list[Tensor]()
        for at in range(0, len(self.token_M), LOGITS_AT_ONCE):
            token_N = self.token_M[at : at + LOGITS_AT_ONCE]
            columns_NC = logprob_columns(logits_MV[at : at + LOGITS_AT_ONCE], token_N, self.alternatives)
            told.append(torch.cat([token_N[:, None], columns_NC], dim=1))
        self.told_MC = torch.cat(told)


@dataclass(kw_only=True, eq=False)
class RoundPasses:
    """Passes of fixed shapes for one target and drafter."""

    state: RoundState
    model: ModelRunner
    drafter: DrafterRunner | None
    sampling: SlotSampling
    logits_SV: Tensor
    """Logits of the target's pass, for `sample`."""
    chance: Tensor | None = None
    """Probability of accepting any draft, for measurements at a given acceptance; None: by equality."""

    def catch_up(self, *, rows: int, blocks: int) -> Tensor:
        """Let the drafter read all waiting states of the rows but the last."""
        state, drafter = self.state, self.own_drafter
        shape = block_shape(drafter.cache, blocks)
        layout = lay_out_draft(state, shape, rows=rows, reads=state.most_waiting, depth=0, kept=1)
        drafter.read(drafter.fuse(state, layout.place_N), layout.ids_N, layout.tokens)
        return layout.last_R

    def draft(self, *, rows: int, reads: int, depth: int, blocks: int, needs: Needs) -> Tensor:
        """Let the drafter read up to `reads` states per row, then draft up to `depth` tokens into the state [R, K]."""
        state, drafter = self.state, self.own_drafter
        layout = lay_out_draft(state, block_shape(drafter.cache, blocks), rows=rows, reads=reads, depth=depth)
        output = drafter.step(drafter.fuse(state, layout.place_N), layout.ids_N, layout.tokens, layout.last_R)
        for at in range(depth):
            logits_RW = drafter.run.logits(output.normed)
            index_R = None
            if needs.sampled:
                slot_R = state.row_slot[:rows]
                # Position `length` is the newest token's, which the target has not read yet.
                position_R = state.length_S[slot_R] + 1 + at
                index_R = self.sampling.draw(logits_RW, slot_R, position_R, drafter.token_W, needs)
            token_R = choose_drafts(logits_RW, drafter.token_W, state.drafts_RK, state.sure_RK, at, index_R)
            if at + 1 < depth:
                output = drafter.step(output.feedback, token_R, layout.deeper[at])
        return state.drafts_RK[:rows, :depth]

    def place(self, *, rows: int, depth: int, own_depth: int) -> Tensor:
        """Put suffix drafts in place; elsewhere the drafter's `own_depth` drafts stay."""
        return place_offers(self.state, rows=rows, depth=depth, own_depth=own_depth)

    def verify(self, *, rows: int, depth: int, blocks: int, followed: bool = True) -> Tensor:
        """Run the target over newest tokens and drafts; logits are stored by row, states in the ring if followed."""
        layout = lay_out_verify(self.state, block_shape(self.model.cache, blocks), rows=rows, depth=depth)
        self.keep_states(layout.place_N, self.run_target(layout.ids_N, layout.tokens, states=followed))
        return layout.ids_N

    def sample(self, *, rows: int, depth: int, needs: Needs, mask_NV: Tensor | None = None) -> Tensor:
        """Sample and accept; returns one line of numbers per row (`RoundLine`).

        An answer that reaches its limit gets fewer tokens than were accepted.
        """
        state, logits_NV, token_RQ = self.state, self.logits_SV[: rows * (1 + depth)], None
        slot_R = state.row_slot[:rows]
        if not needs.greedy or mask_NV is not None:
            position_R, drafts_RK = state.length_S[slot_R] + 1, state.drafts_RK[:rows, :depth]
            token_RQ = self.sampling.choose(logits_NV, slot_R, position_R, drafts_RK, needs, mask_NV)
        own_NV = logits_NV if token_RQ is None else None
        line_RC = settle(state, rows=rows, depth=depth, logits_NV=own_NV, token_RQ=token_RQ, chance=self.chance)
        token_RQ = line_RC[:, 2 : 3 + depth]
        self.sampling.note(slot_R, token_RQ, line_RC[:, 0], needs)
        return with_logprobs(line_RC, logits_NV, None, token_RQ, needs)

    def read(
        self, numbers: Numbers, *, rows: int, blocks: int, followed: bool, asked: PromptTokens | None = None
    ) -> Tensor:
        """Run the target over prompt chunks; logits of each row's last token are stored for `sample`.

        The drafter reads them too, if it follows any of the rows.

        Numbers: `ids` [N]; `behind` [N], the next tokens (0 at a prompt's end); `kept` [N], whether the target's KV
        cache has the token already, so that only the drafter needs the pass; `start` [R + 1], where rows begin; `base`
        [R], their first positions. A row that samples ends in the state of a decoding row with its newest token
        unread.
        """
        state, cache = self.state, self.model.cache
        who = Rows(state, rows, block_shape(cache, blocks))
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
        layout = lay_out(count_R, cache)
        aux_NX = self.read_prompts(numbers, layout, last_R, states=followed, asked=asked)
        # Padding rows write to the extra slot, whose numbers are never used.
        end_R = base_R + count_R
        follows_R = state.follows_S[who.slot_R]
        if followed and aux_NX is not None:
            drafter = self.own_drafter
            # A prompt's last token has no successor yet: its entry goes to its own slot and is written again later.
            # Entries of unfollowed rows are never read. Only attention would be affected by either.
            alike = drafter.remembers and block_shape(drafter.cache, blocks) == block_shape(cache, blocks)
            if not alike:
                layout = lay_out((count_R - samples_R).clamp(min=0) * follows_R, drafter.cache)
            drafter.read(drafter.run.fuse(aux_NX.to(drafter.dtype)), numbers["behind"], layout)
            place_R1 = who.in_ring((end_R - 1).clamp(min=0)[:, None])
            self.keep_states(place_R1[:, 0], aux_NX[last_R])
        state.length_S.index_copy_(0, who.slot_R, (end_R - samples_R).clamp(min=0))
        state.drafted_S.index_copy_(0, who.slot_R, (end_R - samples_R).clamp(min=0) * follows_R)
        return last_R

    # --- trees ---------------------------------------------------------------------------------------------------

    def draft_trees(self, *, trees: TreeNodes, reads: int, blocks: int, needs: Needs) -> Tensor:
        """Let the drafter read up to `reads` states per row, then grow trees within each row's draft slots."""
        state, drafter, rows = self.state, self.own_drafter, len(trees.kept_count_R)
        shape = block_shape(drafter.cache, blocks)
        layout = lay_out_draft(state, shape, rows=rows, reads=reads, depth=1)
        output = drafter.step(drafter.fuse(state, layout.place_N), layout.ids_N, layout.tokens, layout.last_R)
        slot_M, grown = state.row_slot[:rows], None
        for at in range(1, trees.depth + 1):
            logits_MW = drafter.run.logits(output.normed)
            index_MW = None
            if needs.sampled:
                # Position `length` is the newest token's.
                position_M = state.length_S[slot_M] + at
                index_MW = self.sampling.draw_many(logits_MW, slot_M, position_M, drafter.token_W, needs, trees.width)
            token_MW, sure_MW = choose_candidates(logits_MW, drafter.token_W, trees.width, index_MW)
            grown = grow(state, trees, shape, at=at, token_MW=token_MW, sure_MW=sure_MW, before=grown)
            if grown is not None:
                feedback_ND = output.feedback.index_select(0, grown.parent_N)
                output = drafter.step(feedback_ND, grown.ids_N, grown.tokens)
                slot_M = state.row_slot[:rows, None].expand(-1, trees.width).flatten()
        keep(state, trees)
        return trees.kept_token_RQ

    def verify_trees(self, *, trees: TreeNodes, blocks: int) -> Tensor:
        """Run the target over newest tokens and kept nodes; logits and states are stored node by node."""
        layout = lay_out_trees(self.state, trees, block_shape(self.model.cache, blocks))
        aux_NX = self.run_target(trees.kept_token_RQ.flatten(), layout)
        if trees.states_NX is not None and aux_NX is not None:
            trees.states_NX.copy_(aux_NX)
        return trees.kept_token_RQ

    def sample_trees(self, *, trees: TreeNodes, needs: Needs) -> Tensor:
        """Sample and accept paths of trees; returns one line of numbers per row (`RoundLine`)."""
        state, (rows, places), token_RQ = self.state, trees.kept_token_RQ.shape, None
        slot_R, shape = state.row_slot[:rows], block_shape(self.model.cache, state.blocks)
        logits_NV = self.logits_SV[: rows * places]
        if not needs.greedy:
            position_R, nodes_RB = state.length_S[slot_R] + 1, trees.kept_token_RQ[:, 1:]
            token_RQ = self.sampling.choose(logits_NV, slot_R, position_R, nodes_RB, needs, trees=trees)
        own_NV = logits_NV if token_RQ is None else None
        outcome = settle_trees(state, trees, shape, logits_NV=own_NV, token_RQ=token_RQ, chance=self.chance)
        line_RC, path_RT = outcome.line_RC, outcome.path_RT
        token_RT = line_RC[:, 2 : 3 + trees.depth]
        self.sampling.note(slot_R, token_RT, line_RC[:, 0], needs)
        self.model.move(outcome.from_M, outcome.to_M, rows)
        place_N = (torch.arange(rows, device=path_RT.device)[:, None] * places + path_RT).flatten()
        if trees.states_NX is not None:
            self.keep_states(outcome.ring_RT.flatten(), trees.states_NX[place_N])
        return with_logprobs(line_RC, logits_NV, place_N, token_RT, needs)

    # --- parts of passes -----------------------------------------------------------------------------------------

    @property
    def own_drafter(self) -> DrafterRunner:
        """The drafter; only for passes that need one."""
        assert self.drafter is not None
        return self.drafter

    def run_target(self, ids_N: Tensor, layout: AttentionMetadata, *, states: bool = True) -> Tensor | None:
        """Run the target over the tokens of a layout and store all logits; returns their states, if needed."""
        return self._run_target(ids_N, layout, None, len(ids_N), states=states)[1]

    def read_prompts(
        self, numbers: Numbers, layout: AttentionMetadata, last_R: Tensor, *, states: bool, asked: PromptTokens | None
    ) -> Tensor | None:
        """Run the target over prompt chunks, with logits of each row's last token and of requested predecessors."""
        # Entries that may be shared are not written again, so that they stay bitwise the same for others.
        written_N = layout.slot_mapping_N.masked_fill(numbers["kept"] > 0, self.model.cache.null_slot)
        keep_M = last_R if asked is None else torch.cat([last_R, asked.place_M])
        layout = replace(layout, slot_mapping_N=written_N)
        logits_MV, aux_NX = self._run_target(numbers["ids"], layout, keep_M, len(last_R), states=states)
        if asked is not None:
            asked.tell(logits_MV[len(last_R) :])
        return aux_NX

    def _run_target(
        self, ids_N: Tensor, layout: AttentionMetadata, keep_M: Tensor | None, left: int, *, states: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Compute logits of the tokens `keep_M`, or all, store the first `left` for `sample`; also returns states."""
        out_MV = self.logits_SV[:left]
        all_left = left == (len(ids_N) if keep_M is None else len(keep_M))
        logits_MV, aux_NX = self.model.run_pass(ids_N, layout, keep_M, out_MV if all_left else None, states=states)
        if logits_MV.data_ptr() != out_MV.data_ptr():
            out_MV.copy_(logits_MV[:left])
        return logits_MV, aux_NX

    def keep_states(self, place_N: Tensor, aux_NX: Tensor | None) -> None:
        """Store states in the ring, if there is a drafter."""
        ring_NX = self.state.states_NX
        if ring_NX is not None and aux_NX is not None:
            ring_NX.index_copy_(0, place_N, aux_NX.to(ring_NX.dtype))


def with_logprobs(line_RC: Tensor, logits_NV: Tensor, place_M: Tensor | None, token_RQ: Tensor, needs: Needs) -> Tensor:
    """Append logprob columns to the lines if requested; `place_M` selects rows of the logits."""
    if needs.logprobs == NO_LOGPROBS:
        return line_RC
    logits_MV = logits_NV if place_M is None else logits_NV[place_M]
    told_NC = logprob_columns(logits_MV, token_RQ.flatten(), needs.logprobs)
    return torch.cat([line_RC, told_NC.view(len(line_RC), -1)], dim=1)


@dataclass(frozen=True, kw_only=True)
class RoundLine:
    """Columns of a row in the output of `sample`: the counts of new tokens and accepted drafts, then the following.

    Floats are stored as float64 bits. With trees, `drafts` holds two counts and the candidates instead
    (`kernels/tree_outcome.py`).
    """

    depth: int
    alternatives: int
    """Alternatives per logprob; `NO_LOGPROBS` for none."""
    candidates: int = 0
    """Candidates per tree node; 0 for chains."""
    tokens = 2
    """Column of the first of Q tokens."""

    @property
    def drafts(self) -> int:
        """Column of the first of K drafts."""
        return 3 + self.depth

    @property
    def sure(self) -> int:
        """Column of the drafter's probabilities of drafts; with trees, of candidates."""
        return self.drafts + (2 + self.depth * self.candidates if self.candidates else self.depth)

    @property
    def logprobs(self) -> int:
        """Column of the logprobs: for each token its own, its rank, the most likely tokens and theirs."""
        return self.sure + self.depth * (self.candidates or 1)

    @property
    def width(self) -> int:
        told = 0 if self.alternatives == NO_LOGPROBS else 2 + 2 * self.alternatives
        return self.logprobs + (1 + self.depth) * told


def block_shape(cache: KVCache, blocks: int) -> BlockShape:
    """Block table shape for rows with at most so many blocks."""
    return BlockShape(blocks=blocks, block_size=cache.block_size, null_slot=cache.null_slot)
