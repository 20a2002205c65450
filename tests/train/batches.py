"""Small batches, features and drafters for the tests of training."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

import tiny
from eyas.drafter.model import Drafter
from eyas.train.batch import TrainingBatch
from eyas.train.features import ExactDistribution, Features

EAGLE_31 = {"fc_norm": True, "norm_output": True}


@dataclass(frozen=True)
class ScoreTeacher:
    """Teacher with fixed logits."""

    logits_TV: Tensor
    target_ids_W: Tensor

    def __call__(self, row_C: Tensor) -> ExactDistribution:
        logits_CV = self.logits_TV[row_C]
        return ExactDistribution(
            logits_CW=logits_CV[:, self.target_ids_W],
            normaliser_C=logits_CV.logsumexp(dim=-1),
            best_C=logits_CV.argmax(dim=-1),
        )


def batch_of(
    lengths: list[int],
    *,
    seed: int = 0,
    mask: list[int] | None = None,
    ids: Tensor | None = None,
    device: str = "cpu",
) -> TrainingBatch:
    """Batch of documents of these lengths; without a mask, every token but the first of each counts."""
    total = sum(lengths)
    generator = torch.Generator().manual_seed(seed)
    if ids is None:
        ids = torch.randint(tiny.VOCAB, (total,), generator=generator)
    return TrainingBatch.build(
        ids=ids.numpy(),
        mask=np.ones(total, dtype=bool) if mask is None else np.array(mask, dtype=bool),
        position=np.concatenate([np.arange(n) for n in lengths]),
        starts=np.cumsum([0, *lengths]),
        device=device,
    )


def features_of(batch: TrainingBatch, *, seed: int = 1) -> Features:
    """Random states and random scores."""
    generator = torch.Generator().manual_seed(seed)
    total = len(batch.ids_T)
    aux = torch.randn(total, 3 * tiny.HIDDEN, generator=generator)
    scores = torch.randn(total, tiny.VOCAB, generator=generator) * 3
    return Features(
        aux_TX=aux, aux_layer_ids=tiny.AUX_IDS, teachers=lambda target_ids_W: ScoreTeacher(scores, target_ids_W)
    )


def drafter_of(**flags: object) -> Drafter:
    latent = tiny.latent_drafter_config if "mla" in flags else tiny.drafter_config
    return tiny.random_drafter(latent(**flags)).requires_grad_(True)


def gradients(drafter: Drafter) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in drafter.named_parameters() if p.grad is not None}
