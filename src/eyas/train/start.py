"""How a drafter does before its first step, depth by depth, and how loud it may be for that.

A newborn drafter says little that is right, and to be sure of it is worse than to guess evenly: the first hundred steps
would go by with unlearning. So its scores are measured on one pack of real text and made quieter until no depth is
worse than guessing evenly, and no further: what is quieter than that learns slower. The last norm is what is scaled,
not the head: its few weights, with the full learning rate, are loud again soon.

Shapes: S depths, M teacher rows, D drafter state.
"""

import logging
import math
from dataclasses import dataclass, replace

import torch

from eyas.drafter.model import Drafter
from eyas.train.attention import attention_for
from eyas.train.batch import TrainingBatch
from eyas.train.features import Features
from eyas.train.loss import cross_entropy
from eyas.train.scoring import score
from eyas.train.unroll import unroll

logger = logging.getLogger(__name__)

MAX_ROWS = 1024
"""Teacher rows of the pack that are scored: enough for a mean, and few beside a step of training."""
SCALE_STEP = 0.5**0.5
MAX_SCALE_STEPS = 12
_TOLERANCE = 1.01


@dataclass(frozen=True, kw_only=True)
class Start:
    """How a drafter began."""

    loss: tuple[float, ...]
    """Cross-entropy by depth, in nats; a pack of short answers does not reach all depths."""
    uniform: float
    """The same for guessing evenly among the draft vocabulary."""

    @property
    def worse(self) -> tuple[int, ...]:
        """Depths that are worse than guessing evenly, from 1."""
        return tuple(depth for depth, loss in enumerate(self.loss, start=1) if not loss <= self.uniform * _TOLERANCE)

    def report(self, name: str) -> None:
        """Say how it begins, and warn where that is no good."""
        losses = ", ".join(f"{loss:.2f}" for loss in self.loss)
        logger.info(f"{name} starts at {losses} nats by depth; guessing evenly has {self.uniform:.2f}")
        if self.worse:
            logger.warning(
                f"{name} starts worse than guessing evenly at depth {', '.join(map(str, self.worse))}: its first steps "
                "go by with unlearning; check target.source and drafter.init_from, or raise train.warmup"
            )


class StartMeasure:
    """Scores a drafter on one pack, at any scale of its last norm."""

    def __init__(self, drafter: Drafter, batch: TrainingBatch, features: Features, *, depths: int) -> None:
        self._drafter, self._batch, self._features = drafter, batch, features
        self._target_ids_W = drafter.vocab().target_ids_W
        # The first ones: rows of a batch are numbered, and a slot is found by its row's number.
        some = slice(MAX_ROWS)
        self._scored = replace(
            batch, row_M=batch.row_M[some], run_M=batch.run_M[some], run_lengths=batch.run_lengths[some]
        )
        self._depths = sum(count > 0 for count in self._scored.counts(depths))

    @torch.no_grad()
    def at(self, steps: int) -> Start:
        """How it would do if it were so many steps quieter."""
        drafter, features = self._drafter, self._features
        assert drafter.lm_head is not None
        uniform = math.log(len(self._target_ids_W))
        if not self._depths:  # nothing in the pack teaches
            return Start(loss=(), uniform=uniform)
        own_D = drafter.norm.weight.clone()
        quieten(drafter, steps)
        normed_SMD = unroll(
            drafter,
            self._batch,
            features.aux_of(drafter.config.aux_layer_ids or features.aux_layer_ids),
            depths=self._depths,
            attend=attention_for(self._batch, drafter.fc.weight.dtype, compiled=False),
        )
        drafter.norm.weight.copy_(own_D)
        scores = score(
            normed_SMD,
            drafter.lm_head.weight,
            self._scored,
            features.teachers(self._target_ids_W),
            target_ids_W=self._target_ids_W,
            weights=[1.0] * self._depths,
            row_loss=cross_entropy,
            scale=drafter.config.logit_scale,
            chunk=MAX_ROWS,
        )
        counts = self._scored.counts(self._depths)
        losses = tuple(total / count for total, count in zip(scores.loss_S.tolist(), counts, strict=True))
        return Start(loss=losses, uniform=uniform)

    def steps_down(self) -> int:
        """How many steps to go down until no depth is worse than guessing evenly."""
        return next((steps for steps in range(MAX_SCALE_STEPS) if not self.at(steps).worse), MAX_SCALE_STEPS)


@torch.no_grad()
def quieten(drafter: Drafter, steps: int) -> None:
    """Make a drafter's scores quieter by so many steps of `SCALE_STEP`."""
    drafter.norm.weight.mul_(SCALE_STEP**steps)
