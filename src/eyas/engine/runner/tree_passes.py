"""Rounds of trees: the passes of `round_passes.py` where the drafter grows a tree for every row.

    draft_trees    the drafter reads the states that wait for it, then grows trees, depth by depth, and keeps the
                   likeliest nodes (`kernels/tree_draft.py`)
    verify_trees   the target over the newest token and the kept nodes, each of which sees the way to itself
    sample_trees   the target's own token behind each, the path along these, and what that makes of the request
                   (`kernels/tree_outcome.py`); keys, values and states of the path go to where a chain leaves them

Shapes: R rows, W candidates of a node, M = R or R * W nodes that have them, D depth, T = 1 + D tokens of a row that may
be new, Q places of a row, N = R * Q, V vocabulary.
"""

import torch
from torch import Tensor

from eyas.engine.runner.round_passes import RoundPasses, block_shape, with_logprobs
from eyas.engine.runner.sampling_needs import Needs
from eyas.kernels.round_layout import lay_out_draft
from eyas.kernels.tree_draft import choose_candidates, grow, keep, lay_out_trees
from eyas.kernels.tree_nodes import TreeNodes
from eyas.kernels.tree_outcome import settle_trees


class TreePasses(RoundPasses):
    """Passes of trees beside those of chains."""

    def draft_trees(self, *, trees: TreeNodes, reads: int, blocks: int, needs: Needs) -> Tensor:
        """Read up to `reads` states of each row and grow trees, within as many slots as rows may draft."""
        state, drafter, rows = self.state, self.own_drafter, len(trees.kept_count_R)
        shape = block_shape(drafter.cache, blocks)
        layout = lay_out_draft(state, shape, rows=rows, reads=reads, depth=1)
        output = drafter.step(drafter.fuse(state, layout.place_N), layout.ids_N, layout.tokens, layout.last_R)
        slot_M, grown = state.row_slot[:rows], None
        for at in range(1, trees.depth + 1):
            logits_MW = drafter.run.logits(output.normed)
            index_MW = None
            if needs.sampled:
                # The newest token stands at position length.
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
        """The target over the newest token and the kept nodes; logits and states are left place by place."""
        layout = lay_out_trees(self.state, trees, block_shape(self.model.cache, blocks))
        aux_NX = self.run_target(trees.kept_token_RQ.flatten(), layout)
        if trees.states_NX is not None and aux_NX is not None:
            trees.states_NX.copy_(aux_NX)
        return trees.kept_token_RQ

    def sample_trees(self, *, trees: TreeNodes, needs: Needs) -> Tensor:
        """What came of the round of each row, in one line of numbers (`RoundLine` says which)."""
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
