"""How far a draft distribution is from the target's, row by row, without ever holding all rows' scores at once.

p is the target's distribution, q the drafter's. Vocabularies are large and sequences long, so scores are made for a
chunk of rows, reduced, and made again in the backward pass: memory is chunk x vocabulary, not tokens x vocabulary.

Shapes: M rows, D drafter state, E teacher state, V target vocabulary, W draft vocabulary.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import log_softmax
from torch.utils.checkpoint import checkpoint

from eyas.errors import UserError

RowLoss = Callable[[Tensor, Tensor, Tensor], Tensor]
Head = Callable[[Tensor], Tensor]


def cross_entropy(student_MW: Tensor, teacher_MV: Tensor, kept_W: Tensor) -> Tensor:
    """Soft cross-entropy against the target's distribution over the draft vocabulary."""
    p_MW = teacher_MV[:, kept_W].softmax(dim=-1)
    return -(p_MW * log_softmax(student_MW, dim=-1)).sum(dim=-1)


def kl_divergence(student_MW: Tensor, teacher_MV: Tensor, kept_W: Tensor) -> Tensor:
    """The same less the target's own entropy: zero where the drafter is perfect."""
    log_p_MW = log_softmax(teacher_MV[:, kept_W], dim=-1)
    return (log_p_MW.exp() * (log_p_MW - log_softmax(student_MW, dim=-1))).sum(dim=-1)


def overlap(student_MW: Tensor, teacher_MV: Tensor, kept_W: Tensor) -> Tensor:
    """Sum of min(p, q): the probability that a token drawn from q is accepted; tokens outside W count as missed."""
    p_MW = teacher_MV.softmax(dim=-1)[:, kept_W]
    return torch.minimum(p_MW, student_MW.softmax(dim=-1)).sum(dim=-1)


def total_variation(student_MW: Tensor, teacher_MV: Tensor, kept_W: Tensor) -> Tensor:
    """Probability that a drawn draft is turned down."""
    return 1 - overlap(student_MW, teacher_MV, kept_W)


def negative_log_acceptance(student_MW: Tensor, teacher_MV: Tensor, kept_W: Tensor) -> Tensor:
    """Surprise at acceptance: like total variation, with gradients that do not fade where little is accepted."""
    return -overlap(student_MW, teacher_MV, kept_W).clamp(min=1e-9).log()


LOSSES: Mapping[str, RowLoss] = {
    "cross_entropy": cross_entropy,
    "kl": kl_divergence,
    "total_variation": total_variation,
    "acceptance": negative_log_acceptance,
}


@dataclass(frozen=True, kw_only=True)
class RowScores:
    """What was found over some rows."""

    loss_sum: Tensor
    """The only one with a gradient."""
    hit_M: Tensor
    """Whether the drafter's most likely token is the target's; outside the draft vocabulary it never is."""
    overlap_M: Tensor


def score_rows(
    normed_MD: Tensor,
    teacher_ME: Tensor,
    *,
    student_head: Head,
    teacher_head: Head,
    kept_W: Tensor,
    loss: str = "cross_entropy",
    chunk: int = 2048,
) -> RowScores:
    """Compare the drafter's head on its normed states with the target's head on the target's, row by row."""
    if loss not in LOSSES:
        raise UserError(f"loss {loss!r} is not one of {', '.join(LOSSES)}; choose one of them")

    def score(normed: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        student_MW = student_head(normed).float()
        with torch.no_grad():
            teacher_MV = teacher_head(teacher).float()
        total = LOSSES[loss](student_MW, teacher_MV, kept_W).sum()
        with torch.no_grad():
            hits = kept_W[student_MW.argmax(dim=-1)] == teacher_MV.argmax(dim=-1)
            accepted = overlap(student_MW, teacher_MV, kept_W)
        return total, hits, accepted

    pieces = [
        checkpoint(score, normed, teacher, use_reentrant=False)
        for normed, teacher in zip(torch.split(normed_MD, chunk), torch.split(teacher_ME, chunk), strict=True)
    ]
    sums, hits, overlaps = zip(*pieces, strict=True)
    return RowScores(loss_sum=torch.stack(sums).sum(), hit_M=torch.cat(hits), overlap_M=torch.cat(overlaps))
