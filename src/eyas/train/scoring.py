"""The drafter's head and the loss in one piece: scores of a chunk are made, compared, turned into gradients, forgotten.

Kept for the backward pass are gradients of the size of the states and of the head, never of tokens x vocabulary. All
depths go through a chunk of teacher rows together, because the teacher's side of it is then computed once.

Shapes: S depths, D drafter state, W draft vocabulary, M teacher rows (slots that teach: slots.py), C rows of a chunk.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eyas.train.batch import TrainingBatch
from eyas.train.features import TargetDistribution, Teacher
from eyas.train.loss import RowLoss

Compare = Callable[[Tensor, TargetDistribution, Tensor, Tensor, RowLoss], tuple[Tensor, Tensor, Tensor, Tensor]]


@dataclass(frozen=True, kw_only=True)
class Scores:
    """The loss to minimise, and what was found at every depth over the teacher rows that count."""

    loss: Tensor
    """Sum over depths of weight x summed row losses; the only one with a gradient."""
    loss_S: Tensor
    """Summed row losses."""
    overlap_S: Tensor
    """Summed probabilities that a drawn draft is accepted."""
    hit_SM: Tensor
    """Whether the drafter's most likely token is the target's; outside the draft vocabulary it never is."""


def compare(
    logits_CW: Tensor, distribution: TargetDistribution, weight_C: Tensor, target_ids_W: Tensor, row_loss: RowLoss
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Loss, overlap and hit of each row, and the gradient of the weighted loss by the scores."""
    log_q_CW = logits_CW.float().log_softmax(dim=-1)
    p_CW = distribution.probabilities(log_q_CW)
    loss_C, gradient_CW = row_loss(log_q_CW, p_CW)
    overlap_C = torch.minimum(p_CW, log_q_CW.exp()).sum(dim=-1)
    hit_C = target_ids_W[logits_CW.argmax(dim=-1)] == distribution.best_C
    return loss_C, overlap_C, hit_C, (gradient_CW * weight_C[:, None]).to(logits_CW.dtype)


class _ScoredHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        normed_SMD: Tensor,
        head_WD: Tensor,
        batch: TrainingBatch,
        teacher: Teacher,
        target_ids_W: Tensor,
        scale: float,
        weights: Sequence[float],
        row_loss: RowLoss,
        chunk: int,
        compare: Compare,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        depths = len(weights)
        wants_states, wants_head = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        d_normed_SMD = torch.zeros_like(normed_SMD) if wants_states else None
        d_head_WD = torch.zeros_like(head_WD, dtype=torch.float32) if wants_head else None
        loss_S = normed_SMD.new_zeros(depths, dtype=torch.float32)
        overlap_S = torch.zeros_like(loss_S)
        hits: list[list[Tensor]] = [[] for _ in range(depths)]
        rows = len(batch.row_M)
        number_M = torch.arange(rows, device=batch.row_M.device)
        size = -(-rows // max(1, -(-rows // chunk)))  # as many chunks as it takes, all of one length
        for start in range(0, rows, size or 1):
            chosen = slice(start, start + size)
            row_C, run_C, number_C = batch.row_M[chosen], batch.run_M[chosen], number_M[chosen]
            here = len(row_C)
            if here < size:
                # One shape for all: compiled code is made once. What is added counts at no depth.
                row_C, run_C, number_C = (torch.cat([x, x.new_zeros(size - here)]) for x in (row_C, run_C, number_C))
            distribution = teacher.distribution(row_C)
            for depth, weight in enumerate(weights):
                counts_C = run_C > depth
                slot_C = (number_C - depth).clamp(min=0)
                state_CD = normed_SMD[depth][slot_C]
                logits_CW = state_CD @ head_WD.T
                if scale != 1.0:
                    logits_CW = logits_CW * scale
                loss_C, overlap_C, hit_C, d_logits_CW = compare(
                    logits_CW, distribution, counts_C * (weight * scale), target_ids_W, row_loss
                )
                loss_S[depth] += torch.where(counts_C, loss_C, 0.0).sum()
                overlap_S[depth] += torch.where(counts_C, overlap_C, 0.0).sum()
                hits[depth].append((hit_C & counts_C)[:here])
                if d_normed_SMD is not None:
                    d_normed_SMD[depth].index_add_(0, slot_C, d_logits_CW @ head_WD)
                if d_head_WD is not None:
                    d_head_WD += d_logits_CW.T @ state_CD
        ctx.save_for_backward(d_normed_SMD, d_head_WD)
        ctx.head_dtype = head_WD.dtype
        hit_SM = torch.stack([torch.cat(h) if h else batch.row_M.new_zeros(0, dtype=torch.bool) for h in hits])
        ctx.mark_non_differentiable(loss_S, overlap_S, hit_SM)
        weight_S = torch.tensor(list(weights), dtype=torch.float32).to(loss_S.device, non_blocking=True)
        return (loss_S * weight_S).sum(), loss_S, overlap_S, hit_SM

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        d_normed_SMD, d_head_WD = ctx.saved_tensors
        return (
            None if d_normed_SMD is None else (d_normed_SMD * grad).to(d_normed_SMD.dtype),
            None if d_head_WD is None else (d_head_WD * grad).to(ctx.head_dtype),
            *[None] * 8,
        )


def score(
    normed_SMD: Tensor,
    head_WD: Tensor,
    batch: TrainingBatch,
    teacher: Teacher,
    *,
    target_ids_W: Tensor,
    weights: Sequence[float],
    row_loss: RowLoss,
    scale: float = 1.0,
    chunk: int = 4096,
    compare: Compare = compare,
) -> Scores:
    """Score the states of all depths; depth k of the loss is weighted by `weights[k]` per row."""
    loss, loss_S, overlap_S, hit_SM = _ScoredHead.apply(  # type: ignore[no-untyped-call]
        normed_SMD, head_WD, batch, teacher, target_ids_W, scale, weights, row_loss, chunk, compare
    )
    return Scores(loss=loss, loss_S=loss_S, overlap_S=overlap_S, hit_SM=hit_SM)
