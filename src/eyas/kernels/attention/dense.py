"""Paged attention by torch operations: runs anywhere, and is the reference for the kernels.

A row is processed in pieces of some queries and the slots they see; slots that are adjacent in memory are read in
place, and whatever is the same for all layers (slices, masks) is computed in the first one.

Shapes: N tokens of a pass, Q queries of a piece, S slots that it reads, C slots of the cache, H query heads, G key
heads, F = H / G heads that share keys, K size of queries and keys, V of values.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from eyas.kernels.attention.backend import AttentionBackend
from eyas.kernels.attention.kv_dtype import bits
from eyas.kernels.attention.metadata import AttentionMetadata, AttentionRow

Run = tuple[int, int]
"""Slots that are adjacent in memory: the first one's place, and how many."""

LONGEST_PIECE = 64
"""Queries of a chain per piece: later ones see more slots, and earlier ones need not read those."""
MOST_RUNS = 16
"""Up to this many runs are copied one by one; a more scattered row is gathered slot by slot."""
FEW_QUERIES = 16
"""Up to this many queries, heads that share keys become queries of one head."""


@dataclass(frozen=True, kw_only=True)
class _Piece:
    """Some queries of a row and the slots that they read."""

    first: int
    count: int
    runs: Sequence[Run]
    """Where the slots are in memory, in order."""
    scattered: Tensor | None
    """The indices of the slots, if there are many runs."""
    mask: Tensor | None
    """A mask to add to the scores: [Q, S], or [F * Q, S] when folded."""
    folded: bool

    def read(self, x_1GCK: Tensor, dtype: torch.dtype) -> Tensor:
        """Read [1, G, S, K] in a dtype, in place if possible."""
        return self._gathered(bits(x_1GCK)).view(x_1GCK.dtype).to(dtype)

    def _gathered(self, x_1GCK: Tensor) -> Tensor:
        if len(self.runs) == 1:
            return x_1GCK.narrow(2, *self.runs[0])
        if self.scattered is not None:
            return x_1GCK.index_select(2, self.scattered)
        return torch.cat([x_1GCK.narrow(2, *run) for run in self.runs], dim=2)


class DenseBackend(AttentionBackend):
    """Attends piece by piece. Tokens outside all rows get zeros."""

    def __init__(self, metadata: AttentionMetadata, *, sinks: int = 0) -> None:
        super().__init__(metadata.on_host, sinks=sinks)
        self._plans: dict[tuple[int | None, int], list[_Piece]] = {}

    def attend(
        self,
        q_NHK: Tensor,
        keys_GCK: Tensor,
        values_GCV: Tensor,
        scale: float,
        softcap: float | None = None,
        window: int | None = None,
        sink_logit_H: Tensor | None = None,
    ) -> Tensor:
        shared = q_NHK.shape[1] // keys_GCK.shape[0]
        plan = self._plans.get((window, shared))
        if plan is None:
            plan = self._plans[window, shared] = self._pieces(window, shared, q_NHK)
        q, k, v, dtype = q_NHK.transpose(0, 1)[None], keys_GCK[None], values_GCV[None], q_NHK.dtype
        asked = scale, softcap, sink_logit_H
        outputs = [
            _attend(q.narrow(2, piece.first, piece.count), piece.read(k, dtype), piece.read(v, dtype), piece, *asked)
            for piece in plan
        ]
        if self.metadata.idle:
            output_1HNV = q.new_zeros(*q.shape[:3], values_GCV.shape[2])
            for piece, output in zip(plan, outputs, strict=True):
                output_1HNV[:, :, piece.first : piece.first + piece.count] = output
        else:
            output_1HNV = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)
        return output_1HNV[0].transpose(0, 1)

    def _pieces(self, window: int | None, shared: int, like: Tensor) -> list[_Piece]:
        """The pieces for all layers with this window and this many heads per key head."""
        metadata = self.metadata
        masks = _Masks(max((row.end for row in metadata.rows), default=0), window, self.sinks, like)
        plan: list[_Piece] = []
        for row, start in zip(metadata.rows, metadata.starts, strict=False):
            for part in _parts(row):
                folded = shared > 1 and 1 < part.count <= FEW_QUERIES
                slots = _slots_seen(part, window, self.sinks)
                runs = [run for some in slots for run in _runs(part.blocks, some, metadata.block_size)]
                plan.append(
                    _Piece(
                        first=start + part.base - row.base,
                        count=part.count,
                        runs=runs,
                        scattered=_indices(runs).to(like.device) if len(runs) > MOST_RUNS else None,
                        mask=masks.of(part, slots, shared if folded else 1),
                        folded=folded,
                    )
                )
        return plan


class _Masks:
    """Masks, made once for all layers and, if equal, for several rows."""

    def __init__(self, longest: int, window: int | None, sinks: int, like: Tensor) -> None:
        self._longest, self._window, self._sinks, self._like = longest, window, sinks, like
        self._chains: dict[int, Tensor] = {}

    def of(self, row: AttentionRow, slots: Sequence[range], fold: int) -> Tensor | None:
        """The mask [fold * Q, S] over the slots that a row reads; None if every query sees all of them."""
        if row.ancestors is not None or self._sinks:
            return self._made(row, slots, fold)
        if row.count == 1:
            return None
        # Chains of equal length see the same, but reach back differently far: one mask, cut on the left.
        if row.count not in self._chains:
            far = replace(row, base=self._longest - row.count)
            self._chains[row.count] = self._made(far, [range(self._longest)], fold)
        width = len(slots[0])
        mask = self._chains[row.count].narrow(1, self._longest - width, width)
        return mask.contiguous() if mask.is_cuda else mask  # CUDA's kernels need aligned rows

    def _made(self, row: AttentionRow, slots: Sequence[range], fold: int) -> Tensor:
        visible = visible_QS(row, slots, self._window, self._sinks)
        mask = torch.zeros(visible.shape, dtype=self._like.dtype).masked_fill_(~visible, float("-inf"))
        return mask.repeat(fold, 1).to(self._like.device)


def visible_QS(row: AttentionRow, slots: Sequence[range], window: int | None, sinks: int) -> Tensor:
    """The visibility rule: which of `slots`, some of the prefix and all of the tail, each new token of a row sees."""
    tail_QT = row.ancestors
    if tail_QT is None:
        tail_QT = torch.ones(row.count, row.count, dtype=torch.bool).tril()
    slot_S = torch.cat([torch.arange(part.start, part.stop) for part in slots])
    prefix = len(slot_S) - tail_QT.shape[1]
    visible = torch.cat([torch.ones(row.count, prefix, dtype=torch.bool), tail_QT], dim=1)
    if window is None:
        return visible
    # The slots of a path are in order of depth: the distance of an ancestor is the number of ancestors after it.
    behind_QT = tail_QT.sum(dim=1, keepdim=True) - tail_QT.cumsum(dim=1)
    position_Q = torch.tensor(row.positions())
    distance = torch.cat([position_Q[:, None] - slot_S[:prefix], behind_QT], dim=1)
    return visible & ((distance < window) | (slot_S < sinks))


def _parts(row: AttentionRow) -> Iterator[AttentionRow]:
    """Split a long chain; each part is prefix to the next."""
    if row.ancestors is not None or row.count <= LONGEST_PIECE:
        yield row
        return
    for first in range(0, row.count, LONGEST_PIECE):
        yield replace(row, base=row.base + first, count=min(LONGEST_PIECE, row.count - first))


def _slots_seen(row: AttentionRow, window: int | None, sinks: int) -> list[range]:
    """The slots that any query of the row can see."""
    first = 0 if window is None else row.base + 1 - window
    if first <= sinks:
        return [range(row.end)]
    return [range(sinks), range(first, row.end)] if sinks else [range(first, row.end)]


def _runs(blocks: Sequence[int], slots: range, block_size: int) -> list[Run]:
    """Where slots are in memory, in as few runs as possible."""
    first, last = slots[0] // block_size, slots[-1] // block_size
    used = blocks[first : last + 1]
    breaks = [i for i in range(1, len(used)) if used[i] != used[i - 1] + 1]
    runs = []
    for begin, end in pairwise([0, *breaks, len(used)]):
        here = (first + begin) * block_size
        a, b = max(slots[0], here), min(slots[-1] + 1, (first + end) * block_size)
        runs.append((used[begin] * block_size + a - here, b - a))
    return runs


def _indices(runs: Sequence[Run]) -> Tensor:
    return torch.cat([torch.arange(place, place + length) for place, length in runs])


def _attend(
    q_1HQK: Tensor,
    k_1GSK: Tensor,
    v_1GSK: Tensor,
    piece: _Piece,
    scale: float,
    softcap: float | None,
    sink_logit_H: Tensor | None,
) -> Tensor:
    q, groups = q_1HQK, k_1GSK.shape[1]
    if piece.folded:
        # Heads that share keys become queries of one head: the keys are read once for all of them.
        q = q.reshape(1, groups, -1, q.shape[-1])
    if sink_logit_H is not None:
        sink_1HQ1 = sink_logit_H[None, :, None, None].expand(1, -1, piece.count, 1)
        output = _attend_by_hand(q, k_1GSK, v_1GSK, piece.mask, scale, softcap, sink_1HQ1.reshape(1, q.shape[1], -1, 1))
    elif softcap is None:
        output = functional.scaled_dot_product_attention(
            q, k_1GSK, v_1GSK, attn_mask=piece.mask, scale=scale, enable_gqa=q.shape[1] != groups
        )
    else:
        output = _attend_by_hand(q, k_1GSK, v_1GSK, piece.mask, scale, softcap)
    return output.reshape(1, -1, piece.count, output.shape[-1]) if piece.folded else output


def _attend_by_hand(
    q_1HQK: Tensor,
    k_1GSK: Tensor,
    v_1GSK: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
    sink_1HQ1: Tensor | None = None,
) -> Tensor:
    """Attention written out, since torch's own supports neither softcaps nor sinks."""
    k, v = (x.repeat_interleave(q_1HQK.shape[1] // x.shape[1], dim=1) for x in (k_1GSK, v_1GSK))
    scores = q_1HQK @ k.transpose(2, 3)
    scores = scores * scale if softcap is None else (scores * (scale / softcap)).tanh() * softcap
    if mask is not None:
        scores = scores + mask
    if sink_1HQ1 is not None:
        scores = torch.cat([scores, sink_1HQ1.to(scores.dtype)], dim=-1)
    weights = scores.float().softmax(dim=-1).to(v.dtype)
    return (weights if sink_1HQ1 is None else weights[..., :-1]) @ v
