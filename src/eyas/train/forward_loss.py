"""A drafter over one batch: unrolled, then scored against the target. Training and evaluation alike."""

from collections.abc import Sequence

from torch import Tensor

from eyas.drafter.model import Drafter
from eyas.train.attention import attention_for
from eyas.train.batch import TrainingBatch
from eyas.train.features import Features
from eyas.train.loss import RowLoss
from eyas.train.scoring import Compare, Scores, compare, score
from eyas.train.unroll import DrafterPasses, unroll


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
    """Run as many depths as there are weights and score them over the draft vocabulary `target_ids_W`."""
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
