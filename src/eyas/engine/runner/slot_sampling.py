"""Tokens of many requests on the device, by options that lie in its buffers, by slot.

The token at a position is argmax p / E: p is the target's distribution with every option applied (`eyas/sampling.py`),
E the request's own noise for that position (`kernels/noise.py`). A greedy request takes the largest logit. Nothing here
reads a draft before the target's token is chosen, and a draft is accepted if it is that token.

Rows of all kinds go through the same operations with numbers of their own, and nothing looks at a number on the host,
so a step can be launched before the last one's tokens are known, and captured. What another row asks for is neutral to
a row, as x / 1 and x + 0 are: its token is the same in any company. Tests choose the same tokens request by request
(`tests/oracle/sampler.py`).

Shapes: R rows (requests), K drafts of each, Q = 1 + K tokens of each, N = R * Q, V vocabulary, W that of the draft.
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
"""Logits that are sampled from together, which bounds the memory that noise takes."""
FAINT = 1e-20
"""Weight of a token as a sibling that the cuts took out of q."""


class SlotSampling:
    """Chooses tokens for slots. One slot more than asked for is a dummy for padding rows: the last one."""

    def __init__(self, slots: int, vocab_size: int, device: torch.device) -> None:
        self._tables = SlotTables(slots, vocab_size, device)
        self._vocab_size = vocab_size
        self._index_V = torch.arange(vocab_size, device=device)
        self._needs: WeakKeyDictionary[SequenceState, Needs] = WeakKeyDictionary()
        """Of requests that have had a slot."""

    def admit(self, slots: Sequence[int], seqs: Sequence[SequenceState]) -> Send:
        """Give slots to requests. What the host knows is read now; the returned function copies it to the device.

        The tokens of a request at this time are those that penalties count; `note` adds the later ones.
        """
        for seq in seqs:
            self._needs[seq] = sampling_needs(seq, self._vocab_size)
        return self._tables.admit(slots, seqs)

    def needs(self, seqs: Sequence[SequenceState]) -> Needs:
        """What these requests, which have slots, need now. Tokens that the host has not seen yet do no harm."""
        # Equal needs are one object, and its name is cheaper to compare than all it says.
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
        """The target's own tokens [R, Q]: token q of a row, at its position + q, behind its drafts[:q].

        `needs` may be more than the rows have. The mask says which tokens may come; something must be left in each row.
        Where drafts are the kept nodes of trees, token q stands behind those on its way.
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
        """Where in the draft vocabulary the draft of each row stands [R]: argmax q / E.

        token_W are its target ids, which count the noise. Only temperature and cuts are heeded, as there.
        """
        if not needs.sampled:
            return q_logits_RW.argmax(dim=-1)
        numbers = self._tables.numbers(slot_R)
        return sample(q_logits_RW.float()[:, None], numbers, position_R[:, None], token_W, needs)[:, 0]

    def draw_many(
        self, q_logits_RW: Tensor, slot_R: Tensor, position_R: Tensor, token_W: Tensor, needs: Needs, width: int
    ) -> Tensor:
        """Siblings [R, width], the first by q / E, the most promising first."""
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
        """The first new_R tokens of each row are now part of its output."""
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
        """`sampling.shape_counted`, then stop tokens that come too early."""
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
        """How often each token is in the output with the drafts before it [R, Q, V]."""
        (rows, depth), width = drafts_RK.shape, 1 + drafts_RK.shape[1]
        counts_RQV = self._tables.rows("counts", slot_R)[:, None].repeat(1, width, 1)
        if not depth:
            return counts_RQV
        if sees_RQ is None:
            before_RQK = (self._index_V[:depth] < self._index_V[:width, None]).expand(rows, -1, -1)
        else:
            before_RQK = (sees_RQ[..., None] >> self._index_V[1:width]) & 1
        # Behind what is no draft nobody looks, but its place must exist.
        draft_RQK = drafts_RK.clamp(min=0)[:, None].expand_as(before_RQK)
        return counts_RQV.scatter_add_(-1, draft_RQK, before_RQK.to(counts_RQV.dtype))


def sample(logits_RQV: Tensor, numbers: SlotNumbers, position_RQ: Tensor, token_V: Tensor, needs: Needs) -> Tensor:
    """The winners [R, Q] of the races p / E with `sampling.probabilities` of each row; greedy rows' largest logits."""
    rows, width, size = logits_RQV.shape
    p_NV = probabilities_by_row(logits_RQV, numbers, needs).view(-1, size)
    greedy_N, seed_N = (numbers[name].expand(rows, width).reshape(-1) for name in ("greedy", "seed"))
    token_N = first(p_NV, logits_RQV.reshape(-1, size), greedy_N, seed_N, position_RQ.reshape(-1), token_V)
    return token_N.view(rows, width)


def probabilities_by_row(logits_RQV: Tensor, numbers: SlotNumbers, needs: Needs) -> Tensor:
    """`sampling.probabilities`, with the temperature and cuts of each row."""
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
        # At least as many as there are tokens cut nothing, as 0 does.
        kth_RQ1 = kth_RQ1.masked_fill((top_k_R11 == 0) | (top_k_R11 >= size), IMPOSSIBLE)
        logits_RQV = logits_RQV.masked_fill(logits_RQV < kth_RQ1, IMPOSSIBLE)
    p_RQV = logits_RQV.softmax(dim=-1)
    if not needs.top_p:
        return p_RQV
    top_p_N1 = numbers["top_p"].expand(rows, width).reshape(-1, 1)
    return nucleus(p_RQV.view(-1, size), top_p_N1).view(rows, width, size)
