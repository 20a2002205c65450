"""Training-time test: the drafter run over whole sequences, depth after depth, exactly as decoding runs it.

Slot t at depth k holds what decoding would hold k tokens behind a verified position t: the target's state at t at
depth 0 and the drafter's own feedback after it, beside the true token t + 1 + k, at position t + k. It predicts the
target's distribution for token t + 2 + k. A query sees the depth-0 keys of its document up to its own slot and, of each
later depth, its own slot only: in decoding those are the drafts of this round.

A slot counts at depth k if all it reads of the answer and what it predicts lie in one assistant turn: tokens t + 1 to
t + 2 + k are all masked.

Shapes: B sequences, T slots, X concatenated auxiliary states, D drafter state, E teacher state, H heads, K head dim.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from eyas.drafter.attention import Attend
from eyas.drafter.model import Drafter
from eyas.train.loss import Head, score_rows


@dataclass(frozen=True, kw_only=True)
class TrainingBatch:
    """Sequences and what the target made of them. Several documents may share a sequence."""

    ids_BT: Tensor
    mask_BT: Tensor
    """What the target would have generated (data.py)."""
    document_BT: Tensor
    """Which document a token belongs to; documents are contiguous."""
    position_BT: Tensor
    """Position within its document."""
    aux_BTX: Tensor
    teacher_BTE: Tensor
    """What the teacher's head turns into the distribution of the next token."""


@dataclass(frozen=True, kw_only=True)
class DepthScore:
    """How one depth did over the slots that count."""

    slots: int
    loss: float
    accuracy: float
    overlap: float
    """Mean probability that a drawn draft is accepted."""
    hit_BT: Tensor
    valid_BT: Tensor


@dataclass(frozen=True, kw_only=True)
class UnrollScore:
    """The loss to minimise and what each depth contributed."""

    loss: Tensor
    depths: tuple[DepthScore, ...]


class DenseUnrollAttention:
    """The mask of the training-time test, written out: every score is computed, none is clever."""

    def __init__(self, document_BT: Tensor) -> None:
        slots = document_BT.shape[1]
        causal_TT = torch.ones(slots, slots, dtype=torch.bool, device=document_BT.device).tril()
        self._visible_BHTT = (causal_TT & (document_BT[:, :, None] == document_BT[:, None, :]))[:, None]
        self._depths: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend from all slots [B, T, H, K] of the next depth."""
        group = q.shape[-2] // k.shape[-2]
        k, v = k.repeat_interleave(group, dim=-2), v.repeat_interleave(group, dim=-2)
        depths = self._depths.setdefault(layer, [])
        depths.append((k, v))
        (first_k, first_v), later = depths[0], depths[1:]
        scale, slots = q.shape[-1] ** -0.5, q.shape[1]
        first = torch.einsum("bthk,bshk->bhts", q, first_k) * scale
        scores = [first.masked_fill(~self._visible_BHTT, float("-inf"))]
        scores += [torch.einsum("bthk,bthk->bht", q, later_k)[..., None] * scale for later_k, _ in later]
        weights = torch.cat(scores, dim=-1).float().softmax(dim=-1).to(v.dtype)
        out = torch.einsum("bhts,bshk->bthk", weights[..., :slots], first_v)
        for i, (_, later_v) in enumerate(later):
            out = out + weights[..., slots + i].transpose(1, 2)[..., None] * later_v
        return out


def shifted(x_BT: Tensor, by: int) -> Tensor:
    """Slot t gets what stands `by` further on; beyond the end stands zero (or False)."""
    out = torch.zeros_like(x_BT)
    out[:, : x_BT.shape[1] - by] = x_BT[:, by:]
    return out


def valid_slots(mask_BT: Tensor, document_BT: Tensor, depth: int) -> Tensor:
    """Slots that count at this depth."""
    valid_BT = torch.ones_like(mask_BT)
    for ahead in range(1, depth + 3):
        valid_BT = valid_BT & shifted(mask_BT, ahead)
    # Numbered from 1, so that what lies beyond the end is no document.
    numbered_BT = document_BT + 1
    return valid_BT & (numbered_BT == shifted(numbered_BT, depth + 2))


def depth_weights(depths: int, gamma: float) -> list[float]:
    """gamma ** depth, normalised to sum to one so that the loss does not grow with the number of depths."""
    raw = [gamma**depth for depth in range(depths)]
    return [weight / sum(raw) for weight in raw]


def unroll(
    drafter: Drafter,
    batch: TrainingBatch,
    *,
    depths: int,
    teacher_head: Head,
    loss: str = "cross_entropy",
    gamma: float = 0.8,
    attend: Attend | None = None,
    chunk: int = 2048,
) -> UnrollScore:
    """Run all depths and score them."""
    attend = attend or DenseUnrollAttention(batch.document_BT)
    kept_W = drafter.vocab().target_ids_W
    hidden_BTD = drafter.fuse(batch.aux_BTX)
    total = hidden_BTD.new_zeros((), dtype=torch.float32)
    scores: list[DepthScore] = []
    for depth, weight in enumerate(depth_weights(depths, gamma)):
        output = drafter.step(hidden_BTD, shifted(batch.ids_BT, 1 + depth), batch.position_BT + depth, attend)
        valid_BT = valid_slots(batch.mask_BT, batch.document_BT, depth)
        hit_BT = torch.zeros_like(valid_BT)
        slots = int(valid_BT.sum())
        mean_loss = mean_overlap = accuracy = 0.0
        if slots:
            rows = score_rows(
                output.normed[valid_BT],
                shifted(batch.teacher_BTE, 1 + depth)[valid_BT],
                student_head=drafter.logits,
                teacher_head=teacher_head,
                kept_W=kept_W,
                loss=loss,
                chunk=chunk,
            )
            total = total + weight * rows.loss_sum / slots
            hit_BT[valid_BT] = rows.hit_M
            mean_loss = float(rows.loss_sum.detach()) / slots
            accuracy, mean_overlap = float(rows.hit_M.float().mean()), float(rows.overlap_M.mean())
        scores.append(
            DepthScore(
                slots=slots,
                loss=mean_loss,
                accuracy=accuracy,
                overlap=mean_overlap,
                hit_BT=hit_BT,
                valid_BT=valid_BT,
            )
        )
        hidden_BTD = output.feedback
    return UnrollScore(loss=total, depths=tuple(scores))
