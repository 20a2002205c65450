"""The passes of `round_passes.py` on a CPU, where reading a number is free: only live rows and tokens are computed.

Signatures are those of `RoundPasses`, so that `round_graphs.py` can use either; `reads` and `blocks` are ignored.
Logits are packed: live tokens only, row after row (`kernels/exact_rounds.py`).

Shapes: R rows, Q tokens of a row, K drafts, N tokens of a pass, M logits, D drafter hidden, V vocabulary.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eyas.drafter.model import DepthOutput
from eyas.engine.kv_cache.cache import KVCache
from eyas.engine.runner.drafter import DrafterRunner
from eyas.engine.runner.graph_capture import Numbers
from eyas.engine.runner.round_passes import PromptTokens, RoundPasses, with_logprobs
from eyas.engine.runner.sampling_needs import NO_LOGPROBS, Needs
from eyas.kernels.attention.metadata import AttentionMetadata, AttentionRow
from eyas.kernels.elementwise import elementwise_for
from eyas.kernels.exact_rounds import ExactLayout, spread
from eyas.kernels.round_outcome import settle

DraftMask = Callable[[int, Sequence[int]], Tensor | None]
"""Returns the mask [V] of tokens that may follow a row's tokens and these drafts; None: any."""
FORBIDDEN_PENALTY = 1e4
"""Penalty on the logits of forbidden drafts. If all are forbidden, one is chosen, and rejected at verification."""
MANY = 32
"""Number of unneeded queries and outputs from which a separate pass for the last tokens is faster."""


class ExactPasses(RoundPasses):
    """Passes without padding."""

    def catch_up(self, *, rows: int, blocks: int) -> Tensor:
        drafter = self.own_drafter
        layout = self.state.arrays.lay_out_draft(drafter.cache.block_size, rows=rows, depth=0, kept=1)
        if layout.row_R:
            drafter.read(drafter.fuse(self.state, layout.place_N), layout.ids_N, layout.tokens)
        return layout.ids_N

    def draft(
        self, *, rows: int, reads: int, depth: int, blocks: int, needs: Needs, mask: DraftMask | None = None
    ) -> Tensor:
        """Let the drafter read waiting states, then draft up to `depth` tokens per row."""
        state, drafter, arrays = self.state, self.own_drafter, self.state.arrays
        size, drafts_RK = drafter.cache.block_size, state.drafts_RK[:rows, :depth]
        layout = arrays.lay_out_draft(size, rows=rows, depth=depth)
        if not layout.row_R:
            return drafts_RK
        going = [place for place, row in enumerate(layout.row_R) if arrays.depth_R[row] > 0]
        row_R = [layout.row_R[place] for place in going]
        output, made = self._read_waiting(drafter, layout, going), 0
        while row_R:
            ends = min(arrays.depth_R[row_R].tolist())
            at_once, feedback_RD = None, output.feedback
            if not needs.sampled and mask is None:
                attend = drafter.attend(arrays.next_tokens(size, row_R, 1 + made, ends - made - 1))
                at_once = drafter.run.chains(output.normed, feedback_RD, attend, ends - made)
            if at_once is not None:
                arrays.drafts_RK[row_R, made:ends] = at_once.token_KR.T
                arrays.sure_RK[row_R, made:ends] = at_once.chance_KR.T
                feedback_RD, made = at_once.feedback_RD, ends
            else:
                self._choose(drafter, needs, output.normed, row_R, made, mask)
                made += 1
            places = [place for place, row in enumerate(row_R) if arrays.depth_R[row] > made]
            if not places:
                break
            if len(places) < len(row_R):
                row_R, feedback_RD = [row_R[place] for place in places], feedback_RD[places]
            token_R = torch.from_numpy(arrays.drafts_RK[row_R, made - 1])
            output = drafter.step(feedback_RD, token_R, arrays.next_tokens(size, row_R, made, 0))
        return drafts_RK

    def _read_waiting(self, drafter: DrafterRunner, layout: ExactLayout, going: Sequence[int]) -> DepthOutput:
        """Let the drafter read waiting states; returns the outputs from which the rows in `going` draft."""
        tokens, place_N = layout.tokens, layout.place_N
        last = [start - 1 for start in tokens.starts[1:]]
        keep = [last[place] for place in going]
        if drafter.remembers and (not going or len(place_N) >= len(last) + MANY):
            hidden_ND = drafter.fuse(self.state, place_N)
            drafter.read(hidden_ND, layout.ids_N, tokens)
            if not going:
                return DepthOutput(normed=hidden_ND[:0], feedback=hidden_ND[:0])
            ends = [tokens.rows[place] for place in going]
            rows = [AttentionRow(blocks=row.blocks, base=row.end - 1, count=1) for row in ends]
            tokens = AttentionMetadata.of(rows, block_size=tokens.block_size, device=place_N.device)
            return drafter.step(hidden_ND[keep], layout.ids_N[keep], tokens)
        assert self.state.states_NX is not None
        aux_NX = self.state.states_NX.index_select(0, place_N).to(drafter.dtype)
        output = drafter.run.read(aux_NX, layout.ids_N, tokens.position_N, drafter.attend(tokens))
        if len(keep) == len(place_N):
            return output
        return DepthOutput(normed=output.normed[keep], feedback=output.feedback[keep])

    def _choose(
        self,
        drafter: DrafterRunner,
        needs: Needs,
        normed_RD: Tensor,
        row_R: Sequence[int],
        at: int,
        mask: DraftMask | None,
    ) -> None:
        """Choose the draft at index `at` of these rows."""
        state, logits_RW, arrays = self.state, drafter.run.logits(normed_RD), self.state.arrays
        for place, row in enumerate(row_R if mask is not None else ()):
            assert mask is not None
            allowed_V = mask(row, arrays.drafts_RK[row, :at].tolist())
            if allowed_V is not None:
                logits_RW[place] -= FORBIDDEN_PENALTY * ~allowed_V[drafter.token_W]
        compiled = None if needs.sampled else elementwise_for(logits_RW)
        if compiled is not None:
            index_R, sure_R = compiled.most_likely_and_chance(logits_RW.contiguous())
        else:
            slot_R = state.row_slot[list(row_R)]
            # Position `length` is the newest token's, which the target has not read yet.
            index_R = self.sampling.draw(logits_RW, slot_R, state.length_S[slot_R] + 1 + at, drafter.token_W, needs)
            logits_RW = logits_RW.float()
            sure_R = (logits_RW.gather(-1, index_R[:, None])[:, 0] - logits_RW.logsumexp(dim=-1)).exp()
        arrays.drafts_RK[row_R, at] = drafter.token_W[index_R].numpy()
        arrays.sure_RK[row_R, at] = sure_R.numpy()

    def place(self, *, rows: int, depth: int, own_depth: int) -> Tensor:
        self.state.arrays.place_offers(rows=rows, depth=depth, own_depth=own_depth)
        return self.state.depth_R[:rows]

    def verify(self, *, rows: int, depth: int, blocks: int, followed: bool = True) -> Tensor:
        layout = self.state.arrays.lay_out_verify(self.model.cache.block_size, rows=rows, depth=depth)
        if layout.row_R:
            self.keep_states(layout.place_N, self.run_target(layout.ids_N, layout.tokens, states=followed))
        return layout.ids_N

    def sample(self, *, rows: int, depth: int, needs: Needs, mask_NV: Tensor | None = None) -> Tensor:
        state, arrays, logits_NV, tokens = self.state, self.state.arrays, self.logits_SV, rows * (1 + depth)
        live = arrays.live_tokens(rows, depth)
        packed = live < tokens and needs.greedy and mask_NV is None and needs.logprobs == NO_LOGPROBS
        if packed or live == tokens:
            logits_NV = logits_NV[:live]
        else:  # unpack to [rows * (1 + depth)]; dead tokens get the first logits
            place_RQ = spread(np.arange(live), arrays.live(rows, depth), 1 + depth)
            logits_NV = logits_NV[torch.from_numpy(place_RQ.flatten())]
        slot_R = state.row_slot[:rows]
        if needs.greedy and mask_NV is None:
            compiled = elementwise_for(logits_NV)
            token_N = logits_NV.argmax(dim=-1) if compiled is None else compiled.most_likely(logits_NV)
        else:
            position_R, drafts_RK = state.length_S[slot_R] + 1, state.drafts_RK[:rows, :depth]
            token_N = self.sampling.choose(logits_NV, slot_R, position_R, drafts_RK, needs, mask_NV).flatten()
        if self.chance is None:
            line_RC = arrays.settle(rows=rows, depth=depth, token_N=token_N, packed=packed)
        else:
            token_RQ = torch.from_numpy(spread(token_N.numpy(), arrays.live(rows, depth), 1 + depth))
            line_RC = settle(state, rows=rows, depth=depth, token_RQ=token_RQ, chance=self.chance)
        token_RQ = line_RC[:, 2 : 3 + depth]
        self.sampling.note(slot_R, token_RQ, line_RC[:, 0], needs)
        return with_logprobs(line_RC, logits_NV, None, token_RQ, needs)

    def read(
        self, numbers: Numbers, *, rows: int, blocks: int, followed: bool, asked: PromptTokens | None = None
    ) -> Tensor:
        """Run the target over prompt chunks, and the drafter for rows that it follows."""
        state, arrays, cache = self.state, self.state.arrays, self.model.cache
        starts, bases = numbers["start"].tolist(), numbers["base"].tolist()
        slots, samples = arrays.row_slot[:rows].tolist(), arrays.row_samples[:rows].tolist()
        counts = [end - start for start, end in pairwise(starts)]
        ends = [base + count for base, count in zip(bases, counts, strict=True)]

        def lay_out(cache: KVCache, row_R: Sequence[int], count_R: Sequence[int]) -> AttentionMetadata:
            size = cache.block_size
            blocks = [arrays.blocks(slots[row], ends[row], size) for row in row_R]
            made = [
                AttentionRow(blocks=blocks_P, base=bases[row], count=count)
                for row, blocks_P, count in zip(row_R, blocks, count_R, strict=True)
            ]
            return AttentionMetadata.of(made, block_size=size, device=state.device)

        last_R = torch.tensor([start - 1 for start in starts[1:]])
        layout = lay_out(cache, range(rows), counts)
        aux_NX = self.read_prompts(numbers, layout, last_R, states=followed, asked=asked)
        if followed and aux_NX is not None:
            drafter = self.own_drafter
            # The drafter reads a prompt's last position later, when the next token is known.
            reads = [count - sampled for count, sampled in zip(counts, samples, strict=True)]
            row_R = [row for row, slot in enumerate(slots) if arrays.follows_S[slot] and reads[row] > 0]
            if row_R:
                place_N: Any = np.concatenate([np.arange(starts[row], starts[row] + reads[row]) for row in row_R])
                taken_N = torch.from_numpy(place_N)
                hidden_ND = drafter.run.fuse(aux_NX.index_select(0, taken_N).to(drafter.dtype))
                layout = lay_out(drafter.cache, row_R, [reads[row] for row in row_R])
                drafter.read(hidden_ND, numbers["behind"][taken_N], layout)
            ring = [slot * state.ring + (end - 1) % state.ring for slot, end in zip(slots, ends, strict=True)]
            self.keep_states(torch.tensor(ring), aux_NX[last_R])
        for slot, end, sampled in zip(slots, ends, samples, strict=True):
            arrays.length_S[slot] = end - sampled
            arrays.drafted_S[slot] = (end - sampled) * arrays.follows_S[slot]
        return last_R
