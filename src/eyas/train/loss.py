"""Loss of a drafter over one batch: its states of all depths are scored against the target.

p is the target's distribution over the draft vocabulary, q the drafter's. p need not sum to one: the rest lies outside
the draft vocabulary.

Logits are computed for a chunk of rows, compared, turned into gradients and dropped. So every loss comes with its
gradient in closed form, and the backward pass keeps tensors of the size of the states and of the head, never of
tokens x vocabulary. All depths go through a chunk together, because the teacher's part is then computed once.

Shapes: S depths, D drafter state, W draft vocabulary, M teacher rows (= slots that teach: batch.py), C rows of a chunk.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eyas.drafter.model import Drafter
from eyas.train.attention import attention_for
from eyas.train.batch import TrainingBatch
from eyas.train.features import Features, TargetDistribution, Teacher
from eyas.train.recipe import LossName
from eyas.train.unroll import DrafterPasses, unroll

LK_DECAY = 3.0
"""Decay of the hybrid's weight from divergence to acceptance: the best that its authors tried."""

RowLoss = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Maps the drafter's log-probabilities and p to the loss of each row [C] and its gradient by the logits [C, W]."""


def cross_entropy(log_q_CW: Tensor, p_CW: Tensor) -> tuple[Tensor, Tensor]:
    """Soft cross-entropy against the target's distribution over the draft vocabulary."""
    p_CW = _normalised(p_CW)
    return -(p_CW * log_q_CW).sum(dim=-1), log_q_CW.exp() - p_CW


def kl_divergence(log_q_CW: Tensor, p_CW: Tensor) -> tuple[Tensor, Tensor]:
    """KL divergence: soft cross-entropy less the target's entropy, zero for a perfect drafter."""
    p_CW = _normalised(p_CW)
    return torch.special.xlogy(p_CW, p_CW).sum(dim=-1) - (p_CW * log_q_CW).sum(dim=-1), log_q_CW.exp() - p_CW


def total_variation(log_q_CW: Tensor, p_CW: Tensor) -> tuple[Tensor, Tensor]:
    """Probability that a token drawn from q is rejected."""
    accepted_C, gradient_CW = _acceptance(log_q_CW, p_CW)
    return 1 - accepted_C, -gradient_CW


def negative_log_acceptance(log_q_CW: Tensor, p_CW: Tensor) -> tuple[Tensor, Tensor]:
    """Negative log of the acceptance probability: total variation whose gradient does not vanish at low acceptance."""
    accepted_C, gradient_CW = _acceptance(log_q_CW, p_CW)
    accepted_C = accepted_C.clamp(min=1e-6)
    return -accepted_C.log(), -gradient_CW / accepted_C[:, None]


def lk_hybrid(log_q_CW: Tensor, p_CW: Tensor) -> tuple[Tensor, Tensor]:
    """Hybrid w KL + (1 - w) TV, with w = exp(-3 a) and a the acceptance of the row (LK loss, arXiv 2602.23881).

    The gradient of total variation vanishes where p and q hardly overlap; there the divergence dominates. The weight is
    treated as a constant.
    """
    (divergence_C, towards_CW), (distance_C, away_CW) = kl_divergence(log_q_CW, p_CW), total_variation(log_q_CW, p_CW)
    weight_C = torch.exp(-LK_DECAY * (1 - distance_C.detach()))
    gradient_CW = weight_C[:, None] * towards_CW + (1 - weight_C[:, None]) * away_CW
    return weight_C * divergence_C + (1 - weight_C) * distance_C, gradient_CW


LOSSES: Mapping[LossName, RowLoss] = {
    "cross_entropy": cross_entropy,
    "kl": kl_divergence,
    "total_variation": total_variation,
    "acceptance": negative_log_acceptance,
    "lk_hybrid": lk_hybrid,
}


def row_loss_of(loss: LossName | Mapping[LossName, float]) -> RowLoss:
    """Loss of that name, or a weighted sum of several."""
    if isinstance(loss, str):
        return LOSSES[loss]
    parts = [(LOSSES[name], weight) for name, weight in loss.items()]

    def mixture(log_q_CW: Tensor, p_CW: Tensor) -> tuple[Tensor, Tensor]:
        loss_C, gradient_CW = log_q_CW.new_zeros(len(log_q_CW)), torch.zeros_like(log_q_CW)
        for row_loss, weight in parts:
            own_C, own_CW = row_loss(log_q_CW, p_CW)
            loss_C, gradient_CW = loss_C + weight * own_C, gradient_CW + weight * own_CW
        return loss_C, gradient_CW

    return mixture


def _acceptance(log_q_CW: Tensor, p_CW: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of min(p, q), which is the probability that a token drawn from q is accepted, and its gradient."""
    q_CW = log_q_CW.exp()
    # Where p is smaller than q, moving q changes nothing.
    rising_CW = torch.where(q_CW < p_CW, q_CW, 0.0)
    return torch.minimum(p_CW, q_CW).sum(dim=-1), rising_CW - q_CW * rising_CW.sum(dim=-1, keepdim=True)


def _normalised(p_CW: Tensor) -> Tensor:
    return p_CW / p_CW.sum(dim=-1, keepdim=True).clamp(min=1e-20)


Compare = Callable[[Tensor, TargetDistribution, Tensor, Tensor, RowLoss], tuple[Tensor, Tensor, Tensor, Tensor]]


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Loss to minimise, and metrics of every depth over the teacher rows that count."""

    loss: Tensor
    """Sum over depths of weight x summed row losses; the only member with a gradient."""
    loss_S: Tensor
    """Summed row losses."""
    overlap_S: Tensor
    """Summed probabilities that a token drawn from the drafter is accepted."""
    hit_SM: Tensor
    """Whether the drafter's most likely token is the target's; never for a token outside the draft vocabulary."""


def compare(
    logits_CW: Tensor, distribution: TargetDistribution, weight_C: Tensor, target_ids_W: Tensor, row_loss: RowLoss
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Loss, overlap and hit of each row, and the gradient of the weighted loss by the logits."""
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
        size = -(-rows // max(1, -(-rows // chunk)))  # chunks of one length
        for start in range(0, rows, size or 1):
            chosen = slice(start, start + size)
            row_C, run_C, number_C = batch.row_M[chosen], batch.run_M[chosen], number_M[chosen]
            here = len(row_C)
            if here < size:
                # One shape for all chunks, so code is compiled once. Added rows count at no depth.
                row_C, run_C, number_C = (torch.cat([x, x.new_zeros(size - here)]) for x in (row_C, run_C, number_C))
            distribution = teacher(row_C)
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


def forward_loss(
    drafter: Drafter,
    batch: TrainingBatch,
    features: Features,
    *,
    target_ids_W: Tensor,
    layer_ids: Sequence[int],
    weights: Sequence[float],
    row_loss: RowLoss,
    chunk: int,
    activation_checkpointing: bool = False,
    compiled: bool = False,
    passes: DrafterPasses | None = None,
    compare: Compare = compare,
) -> Scores:
    """Unroll a drafter over a batch to as many depths as there are weights, and score it."""
    assert drafter.lm_head is not None
    normed_SMD = unroll(
        drafter,
        batch,
        features.aux_of(layer_ids),
        depths=len(weights),
        attend=attention_for(batch, drafter.fc.weight.dtype, compiled=compiled),
        activation_checkpointing=activation_checkpointing,
        passes=passes,
    )
    return score(
        normed_SMD,
        drafter.lm_head.weight,
        batch,
        features.teachers(target_ids_W),
        target_ids_W=target_ids_W,
        weights=weights,
        row_loss=row_loss,
        scale=drafter.config.logit_scale,
        chunk=chunk,
        compare=compare,
    )
