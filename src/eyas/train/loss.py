"""How far a draft distribution is from the target's, and which way it should move.

p is the target's distribution over the draft vocabulary, q the drafter's. p need not sum to one: what is missing lies
outside the draft vocabulary. Every loss comes with its gradient in closed form, because scores are made for a few
thousand rows at a time and forgotten (head.py): nothing of vocabulary size waits for a backward pass.

Shapes: C rows of a chunk, W draft vocabulary.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from eyas.train.recipe import LossName

LK_DECAY = 3.0
"""How fast the hybrid goes over from divergence to acceptance: the best of those that its authors tried."""

RowLoss = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""From the drafter's log-probabilities and p to the loss of each row [C] and its gradient by the scores [C, W]."""


def cross_entropy(log_q_CW: Tensor, p_CW: Tensor) -> tuple[Tensor, Tensor]:
    """Soft cross-entropy against the target's distribution over the draft vocabulary."""
    p_CW = _normalised(p_CW)
    return -(p_CW * log_q_CW).sum(dim=-1), log_q_CW.exp() - p_CW


def kl_divergence(log_q_CW: Tensor, p_CW: Tensor) -> tuple[Tensor, Tensor]:
    """The same less the target's own entropy: zero where the drafter is perfect."""
    p_CW = _normalised(p_CW)
    return torch.special.xlogy(p_CW, p_CW).sum(dim=-1) - (p_CW * log_q_CW).sum(dim=-1), log_q_CW.exp() - p_CW


def total_variation(log_q_CW: Tensor, p_CW: Tensor) -> tuple[Tensor, Tensor]:
    """Probability that a draft drawn from q is turned down."""
    accepted_C, gradient_CW = _acceptance(log_q_CW, p_CW)
    return 1 - accepted_C, -gradient_CW


def negative_log_acceptance(log_q_CW: Tensor, p_CW: Tensor) -> tuple[Tensor, Tensor]:
    """Surprise at acceptance: like total variation, with gradients that do not fade where little is accepted."""
    accepted_C, gradient_CW = _acceptance(log_q_CW, p_CW)
    accepted_C = accepted_C.clamp(min=1e-6)
    return -accepted_C.log(), -gradient_CW / accepted_C[:, None]


def lk_hybrid(log_q_CW: Tensor, p_CW: Tensor) -> tuple[Tensor, Tensor]:
    """w KL + (1 - w) TV, with w = exp(-3 a) and a the acceptance of the row (LK loss, arXiv 2602.23881).

    Total variation is what counts, but its gradient fades where p and q hardly meet: there the divergence leads. The
    weight is a number, nothing is learnt through it.
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
    """The loss of that name, or a sum of several by their weights."""
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
    """Sum of min(p, q), the probability that a token drawn from q is accepted, and its gradient."""
    q_CW = log_q_CW.exp()
    # Where p is the smaller one, moving q changes nothing.
    rising_CW = torch.where(q_CW < p_CW, q_CW, 0.0)
    return torch.minimum(p_CW, q_CW).sum(dim=-1), rising_CW - q_CW * rising_CW.sum(dim=-1, keepdim=True)


def _normalised(p_CW: Tensor) -> Tensor:
    return p_CW / p_CW.sum(dim=-1, keepdim=True).clamp(min=1e-20)
