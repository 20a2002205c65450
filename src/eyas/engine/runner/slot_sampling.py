"""Sampling for a batch of requests on the device, with options stored by slot.

The token at a position is argmax p / E: p is the target's distribution after all options (`eyas/sampling.py`), E is the
request's own exponential noise for that position (`kernels/noise.py`). A greedy request takes the largest logit. Drafts
are not used to choose the target's token; a draft is accepted if it equals that token.

All rows go through the same operations, each with its own numbers, and the host reads none of them. So sampling can be
launched before the previous step's tokens are known, and captured. Options of other rows are neutral to a row, as in
x / 1 or x + 0, so its token is the same in any batch. `tests/oracle/sampler.py` samples the same tokens, one request
after another.

Shapes: R rows (requests), K drafts of each, Q = 1 + K tokens of each, N = R * Q, V target and W draft vocabulary.
"""

from collections.abc import Sequence
from functools import reduce
from itertools import repeat
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from eyas.engine.request import SequenceState
from eyas.engine.runner.sampling_needs import NOTHING, Needs, sampling_needs
from eyas.engine.runner.slot_tables import IN_PROMPT, IS_STOP, Send, SlotNumbers, SlotTables
from eyas.kernels.noise import first, first_many
from eyas.kernels.nucleus import nucleus
from eyas.kernels.tree_nodes import TreeNodes
from eyas.sampling import IMPOSSIBLE

MOST_AT_ONCE = 2**25
"""Most logits sampled from together, to bound the memory for noise."""
FAINT = 1e-20
"""Weight of siblings that top-k, top-p or min-p removed from q."""


class SlotSampling:
    """Chooses tokens for slots. One extra slot, the last, is a dummy for padding rows."""

    def __init__(self, slots: int, vocab_size: int, device: torch.device) -> None:
        self._tables = SlotTables(slots, vocab_size, device)
        self._vocab_size = vocab_size
        self._index_V = torch.arange(vocab_size, device=device)
        self._needs: WeakKeyDictionary[SequenceState, Needs] = WeakKeyDictionary()
        """Needs of requests that have had a slot."""

    def admit(self, slots: Sequence[int], seqs: Sequence[SequenceState]) -> Send:
        """Assign slots to requests. Host data is read now; the returned function copies it to the device.

        Penalties count the tokens that a request has now; `note` adds later ones.
        """
        for seq in seqs:
            self._needs[seq] = sampling_needs(seq, self._vocab_size)
        return self._tables.admit(slots, seqs)

    def needs(self, seqs: Sequence[SequenceState]) -> Needs:
        """Union of the needs of these requests, which have slots."""
        # Equal needs are one object, so comparing ids is enough.
        found = {id(needs): needs for needs in map(self._needs_of, seqs)}
        return reduce(Needs.__or__, found.values(), NOTHING)

    def _needs_of(self, seq: SequenceState) -> Needs:
        if self._needs[seq].early:
            self._needs[seq] = sampling_needs(seq, self._vocab_size)
        return self._needs[seq]

    def choose(
        self,
        logits_NV: Tensor,
        slot_R: Tensor,
        position_R: Tensor,
        drafts_RK: Tensor,
        needs: Needs,
        mask_NV: Tensor | None = None,
        *,
        trees: TreeNodes | None = None,
    ) -> Tensor:
        """Choose the target's tokens [R, Q]: token q of a row is at its position + q, behind its drafts[:q].

        `needs` may exceed what the rows use. The mask marks tokens that may come, at least one per row. With trees,
        drafts are the kept nodes, and token q follows those on its path.
        """
        rows, width = len(slot_R), 1 + drafts_RK.shape[1]
        if mask_NV is not None:
            logits_NV = logits_NV.masked_fill(~mask_NV, IMPOSSIBLE)
        if needs.greedy:
            return logits_NV.argmax(dim=-1).view(rows, width)
        logits_RQV = logits_NV.view(rows, width, -1)
        most = max(1, MOST_AT_ONCE // (width * self._vocab_size))
        position_RQ = position_R[:, None] + (self._index_V[:width] if trees is None else trees.kept_depth_RQ)
        seen = repeat(None) if trees is None else torch.split(trees.kept_sees_RQ, most)
        columns = (torch.split(x, most) for x in (logits_RQV, slot_R, position_RQ, drafts_RK))
        parts = [
            self._choose_part(logits, slots, positions, drafts, sees, needs)
            for logits, slots, positions, drafts, sees in zip(*columns, seen, strict=False)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _choose_part(
        self,
        logits_RQV: Tensor,
        slot_R: Tensor,
        position_RQ: Tensor,
        drafts_RK: Tensor,
        sees_RQ: Tensor | None,
        needs: Needs,
    ) -> Tensor:
        numbers = self._tables.numbers(slot_R)
        logits_RQV = logits_RQV.float()
        if needs.shaped:
            logits_RQV = self._shape(logits_RQV, slot_R, position_RQ, drafts_RK, sees_RQ, needs, numbers)
        if not needs.sampled:
            return logits_RQV.argmax(dim=-1)
        return sample(logits_RQV, numbers, position_RQ, self._index_V, needs)

    def draw(self, q_logits_RW: Tensor, slot_R: Tensor, position_R: Tensor, token_W: Tensor, needs: Needs) -> Tensor:
        """Draft a token per row: index in the draft vocabulary [R] of argmax q / E, with temperature and cuts applied.

        token_W are the target ids of the draft vocabulary, by which noise is indexed.
        """
        if not needs.sampled:
            return q_logits_RW.argmax(dim=-1)
        numbers = self._tables.numbers(slot_R)
        return sample(q_logits_RW.float()[:, None], numbers, position_R[:, None], token_W, needs)[:, 0]

    def draw_many(
        self, q_logits_RW: Tensor, slot_R: Tensor, position_R: Tensor, token_W: Tensor, needs: Needs, width: int
    ) -> Tensor:
        """Draft siblings [R, width]: the first by q / E, then in order of promise."""
        q_logits_RW = q_logits_RW.float()
        if not needs.sampled:
            return q_logits_RW.topk(width, dim=-1).indices
        numbers = self._tables.numbers(slot_R)
        q_RW = probabilities_by_row(q_logits_RW[:, None], numbers, needs)[:, 0]
        if width > 1:
            q_RW = q_RW + FAINT * q_logits_RW.softmax(dim=-1)
        greedy_R, seed_R = numbers["greedy"][:, 0], numbers["seed"][:, 0]
        return first_many(q_RW, q_logits_RW, greedy_R, seed_R, position_R, token_W, width)

    def note(self, slot_R: Tensor, token_RQ: Tensor, new_R: Tensor, needs: Needs) -> None:
        """Record that the first new_R tokens of each row were added to its output."""
        if needs.penalised:
            self._tables.count(slot_R, token_RQ, self._index_V[: token_RQ.shape[1]] < new_R[:, None])

    def _shape(
        self,
        logits_RQV: Tensor,
        slot_R: Tensor,
        position_RQ: Tensor,
        drafts_RK: Tensor,
        sees_RQ: Tensor | None,
        needs: Needs,
        numbers: SlotNumbers,
    ) -> Tensor:
        """Apply allowed tokens, bias and penalties, then forbid stop tokens that come too early."""
        if needs.biased:
            logits_RQV = logits_RQV + self._tables.rows("bias", slot_R)[:, None]
        marks_R1V = self._tables.rows("marks", slot_R)[:, None] if needs.penalised or needs.early else None
        if needs.penalised:
            assert marks_R1V is not None
            output_RQV = self._output_counts(slot_R, drafts_RK, sees_RQ)
            seen_RQV = (marks_R1V.bitwise_and(IN_PROMPT) > 0) | (output_RQV > 0)
            repetition_R11 = numbers["repetition"][..., None]
            penalised_RQV = torch.where(logits_RQV > 0, logits_RQV / repetition_R11, logits_RQV * repetition_R11)
            logits_RQV = torch.where(seen_RQV, penalised_RQV, logits_RQV)
            logits_RQV = logits_RQV - numbers["frequency"][..., None] * output_RQV
            logits_RQV = logits_RQV - numbers["presence"][..., None] * (output_RQV > 0)
        if needs.early:
            assert marks_R1V is not None
            early_RQ1 = (position_RQ < numbers["shortest"])[..., None]
            logits_RQV = logits_RQV.masked_fill(early_RQ1 & (marks_R1V.bitwise_and(IS_STOP) > 0), IMPOSSIBLE)
        return logits_RQV

    def _output_counts(self, slot_R: Tensor, drafts_RK: Tensor, sees_RQ: Tensor | None) -> Tensor:
        """Count each token in the output and in the drafts before each position [R, Q, V]."""
        (rows, depth), width = drafts_RK.shape, 1 + drafts_RK.shape[1]
        counts_RQV = self._tables.rows("counts", slot_R)[:, None].repeat(1, width, 1)
        if not depth:
            return counts_RQV
        if sees_RQ is None:
            before_RQK = (self._index_V[:depth] < self._index_V[:width, None]).expand(rows, -1, -1)
        else:
            before_RQK = (sees_RQ[..., None] >> self._index_V[1:width]) & 1
        # Padding drafts are never looked at, but must be valid indices.
        draft_RQK = drafts_RK.clamp(min=0)[:, None].expand_as(before_RQK)
        return counts_RQV.scatter_add_(-1, draft_RQK, before_RQK.to(counts_RQV.dtype))


def sample(logits_RQV: Tensor, numbers: SlotNumbers, position_RQ: Tensor, token_V: Tensor, needs: Needs) -> Tensor:
    """The winners [R, Q] of the races p / E with the probabilities of each row; greedy rows' largest logits."""
    rows, width, size = logits_RQV.shape
    p_NV = probabilities_by_row(logits_RQV, numbers, needs).view(-1, size)
    greedy_N, seed_N = (numbers[name].expand(rows, width).reshape(-1) for name in ("greedy", "seed"))
    token_N = first(p_NV, logits_RQV.reshape(-1, size), greedy_N, seed_N, position_RQ.reshape(-1), token_V)
    return token_N.view(rows, width)


def probabilities_by_row(logits_RQV: Tensor, numbers: SlotNumbers, needs: Needs) -> Tensor:
    """Probabilities with the temperature, min-p, top-k and top-p of each row."""
    rows, width, size = logits_RQV.shape
    logits_RQV = logits_RQV / numbers["temperature"][..., None]
    if needs.min_p:
        least_RQ1 = logits_RQV.amax(dim=-1, keepdim=True) + numbers["least"][..., None]
        logits_RQV = logits_RQV.masked_fill(logits_RQV < least_RQ1, IMPOSSIBLE)
    if needs.top_k:
        head = min(needs.top_k, size)
        top_k_R11 = numbers["top_k"][..., None]
        kth_R11 = top_k_R11.clamp(1, head) - 1
        top_RQK = logits_RQV.topk(head, dim=-1).values
        kth_RQ1 = top_RQK.gather(-1, kth_R11.expand(-1, width, -1))
        # A top_k of at least the vocabulary keeps all tokens, as 0 does.
        kth_RQ1 = kth_RQ1.masked_fill((top_k_R11 == 0) | (top_k_R11 >= size), IMPOSSIBLE)
        logits_RQV = logits_RQV.masked_fill(logits_RQV < kth_RQ1, IMPOSSIBLE)
    p_RQV = logits_RQV.softmax(dim=-1)
    if not needs.top_p:
        return p_RQV
    top_p_N1 = numbers["top_p"].expand(rows, width).reshape(-1, 1)
    return nucleus(p_RQV.view(-1, size), top_p_N1).view(rows, width, size)
