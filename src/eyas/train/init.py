"""A drafter before its first step: shaped after its target, initialised from the target's weights, and measured.

The head begins as the target's rows for the draft vocabulary, the last norm as the target's last norm, and the last
captured state passes straight through. So the drafter's states live in the target's space from the start, and the layer
in between, random at first, learns the difference.

If the normed state is fed back (`norm_output`), the weights u of the last norm move into the head, and ones remain:

    head' = head * u,  u' = 1       same scores, and the next depth receives a normed state

A state fed back with these weights would be multiplied by them again at every depth. In some targets they differ a
hundredfold between channels, and after two depths only the largest channels would remain.

An untrained drafter should not be confident: where it is worse than a uniform guess, the first hundred steps would only
unlearn that. So its scores are measured on one pack of real text and scaled down until no depth is worse than uniform,
and no further, since smaller scores learn more slowly. The last norm is scaled rather than the head, because its few
weights, at the full learning rate, grow back soon.

Shapes: S depths, M teacher rows, D drafter state, V and W target and draft vocabulary.
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from eyas.drafter.config import (
    LATENT_ROPES,
    NOT_LATENT,
    ROPE_KEYS,
    ROPE_OPTIONAL_KEYS,
    DrafterConfig,
    LatentSizes,
)
from eyas.drafter.model import Drafter
from eyas.drafter.vocab import membership_from_target_ids, offsets_from_target_ids
from eyas.target.capture import check_aux_layer_ids
from eyas.target.parts import TargetParts
from eyas.train.batch import TrainingBatch
from eyas.train.features import Features
from eyas.train.loss import cross_entropy, forward_loss
from eyas.train.recipe import DrafterSettings

logger = logging.getLogger(__name__)

MAX_INITIAL_LOGIT_STD = 2.5
"""Maximum standard deviation of an untrained drafter's scores."""
MAX_ROWS = 1024
"""Teacher rows of the pack that are scored: enough for a mean, and little work beside a step of training."""
SCALE_STEP = 0.5**0.5
MAX_SCALE_STEPS = 12
_TOLERANCE = 1.01


def config_for(target: TargetParts, settings: DrafterSettings, *, dtype: str) -> DrafterConfig:
    """Config of a drafter with the target's width, heads, rope and context; its vocabulary size is already chosen."""
    facts, size = target.facts, settings.draft_vocab_size
    assert not isinstance(size, str)
    theirs: Any = target.config
    heads = theirs.num_attention_heads
    ids = check_aux_layer_ids(
        facts.default_aux_layer_ids() if settings.aux_layer_ids is None else settings.aux_layer_ids,
        facts.num_hidden_layers,
    )
    mla = _latent_sizes(theirs, facts.hidden_size) if settings.model_type == "deepseek_v2" else None
    head_dim = getattr(theirs, "head_dim", None) or facts.hidden_size // heads
    key_heads = getattr(theirs, "num_key_value_heads", None) or heads
    return DrafterConfig(
        vocab_size=facts.vocab_size,
        draft_vocab_size=size or facts.vocab_size,
        hidden_size=facts.hidden_size,
        target_hidden_size=facts.hidden_size,
        intermediate_size=settings.intermediate_size
        or getattr(theirs, "intermediate_size", None)
        or 4 * facts.hidden_size,
        num_attention_heads=heads,
        num_key_value_heads=key_heads if mla is None else heads,
        head_dim=head_dim if mla is None else mla.qk_head_dim,
        num_hidden_layers=settings.layers,
        num_aux_hidden_states=len(ids),
        aux_layer_ids=ids,
        rms_norm_eps=getattr(theirs, "rms_norm_eps", None) or 1e-5,
        rope_parameters=_rope(getattr(theirs, "rope_parameters", None) or {}, latent=mla is not None),
        max_position_embeddings=facts.max_position_embeddings or 2048,
        dtype=dtype,
        fc_norm=settings.fc_norm,
        norm_output=settings.norm_output,
        norm_before_residual=settings.norm_before_residual,
        norm_before_fc=settings.norm_before_fc,
        qk_norm=settings.model_type == "qwen3",
        mla=mla,
    )


def _latent_sizes(theirs: Any, hidden_size: int) -> LatentSizes:
    """Sizes of the target's latent attention, else DeepSeek V3's with queries no wider than the target."""
    if getattr(theirs, "kv_lora_rank", None) is not None:
        return LatentSizes(**{item.name: getattr(theirs, item.name) for item in fields(LatentSizes)})
    return LatentSizes(
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        q_lora_rank=min(1536, hidden_size),
    )


def init_drafter(target: TargetParts, config: DrafterConfig, target_ids_W: Tensor, *, seed: int) -> Drafter:
    """Untrained drafter that proposes the target ids `target_ids_W`, on the target's device."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        drafter = Drafter(config)
    _start_from_target(drafter, target, target_ids_W)
    set_vocabulary(drafter, target_ids_W)
    drafter.to(device=target.device, dtype=getattr(torch, config.dtype))
    return drafter.share_target(target.embedding_VD.to(getattr(torch, config.dtype)), target.head.weight_VD)


@torch.no_grad()
def _start_from_target(drafter: Drafter, target: TargetParts, target_ids_W: Tensor) -> None:
    assert drafter.lm_head is not None
    drafter.lm_head.weight.copy_(target.head.weight_VD.cpu()[target_ids_W.cpu()] * target.head.scale)
    if (norm_D := _last_norm(target)) is not None:
        drafter.norm.weight.copy_(norm_D)
    # Standard deviation of the scores of a random normed state; too large a one is reduced by a smaller norm.
    spread = float((drafter.lm_head.weight * drafter.norm.weight).square().sum(dim=1).mean().sqrt())
    drafter.norm.weight.mul_(min(1.0, MAX_INITIAL_LOGIT_STD / max(spread, 1e-9)))
    if drafter.config.norm_output:
        drafter.lm_head.weight.mul_(drafter.norm.weight)
        drafter.norm.weight.fill_(1.0)
    # The last captured state passes through, so that the residual starts in the space that the head reads.
    last = drafter.fc.weight[:, -target.facts.hidden_size :]
    last.add_(torch.eye(*last.shape))


def set_vocabulary(drafter: Drafter, target_ids_W: Tensor) -> None:
    """Set the target ids that the drafter proposes, ascending."""
    if drafter.d2t is not None and drafter.t2d is not None:
        drafter.d2t.copy_(offsets_from_target_ids(target_ids_W))
        drafter.t2d.copy_(membership_from_target_ids(target_ids_W, drafter.config.vocab_size))


def _last_norm(target: TargetParts) -> Tensor | None:
    """Scale of the target's last norm, found by running it, since architectures store it in different ways."""
    norm = target.norm
    if norm is None or isinstance(norm, nn.LayerNorm):
        return None
    with torch.no_grad():
        # Ones of both signs have mean zero, so norms that subtract the mean (Cohere) act like others.
        signs_D = torch.ones(target.facts.hidden_size, device=target.device, dtype=target.dtype)
        signs_D[1::2] = -1
        scale_D: Tensor = (norm(signs_D[None])[0] * signs_D).float()
    return scale_D


def _rope(theirs: Mapping[str, Any], *, latent: bool) -> dict[str, Any]:
    """The target's rope, or only its base if servers disagree on how drafters run that kind."""
    # Some targets have one rope per kind of layer; a drafter's layer has full attention.
    theirs = next((theirs[k] for k in ("full_attention", *theirs) if isinstance(theirs.get(k), Mapping)), theirs)
    kind = str(theirs.get("rope_type", "default"))
    theta = float(theirs.get("rope_theta") or 10000.0)
    if kind not in (LATENT_ROPES if latent else ROPE_KEYS):
        return {"rope_type": "default", "rope_theta": theta}
    known = ROPE_KEYS[kind] | ROPE_OPTIONAL_KEYS.get(kind, frozenset()) - (NOT_LATENT if latent else frozenset())
    return {"rope_type": kind, "rope_theta": theta} | {k: v for k, v in theirs.items() if k in known and v is not None}


@dataclass(frozen=True, kw_only=True)
class Start:
    """Losses of a drafter before its first step."""

    loss: tuple[float, ...]
    """Cross-entropy by depth, in nats; short answers do not reach all depths."""
    uniform: float
    """Cross-entropy of a uniform guess over the draft vocabulary."""

    @property
    def worse(self) -> tuple[int, ...]:
        """Depths, from 1, at which the drafter is worse than a uniform guess."""
        return tuple(depth for depth, loss in enumerate(self.loss, start=1) if not loss <= self.uniform * _TOLERANCE)

    def report(self, name: str) -> None:
        losses = ", ".join(f"{loss:.2f}" for loss in self.loss)
        logger.info(f"{name} starts at {losses} nats by depth; a uniform guess has {self.uniform:.2f}")
        if self.worse:
            logger.warning(
                f"{name} starts worse than a uniform guess at depth {', '.join(map(str, self.worse))}: its first steps "
                "only unlearn that; check target.source and drafter.init_from, or raise train.warmup"
            )


class StartMeasure:
    """Scores a drafter on one pack, at any scale of its last norm."""

    def __init__(self, drafter: Drafter, batch: TrainingBatch, features: Features, *, depths: int) -> None:
        self._drafter, self._features = drafter, features
        self._target_ids_W = drafter.vocab().target_ids_W
        # The first rows, because a slot is found by the number of its row.
        some = slice(MAX_ROWS)
        self._scored = replace(
            batch, row_M=batch.row_M[some], run_M=batch.run_M[some], run_lengths=batch.run_lengths[some]
        )
        self._depths = sum(count > 0 for count in self._scored.counts(depths))

    @torch.no_grad()
    def at(self, steps: int) -> Start:
        """Losses with the scores scaled down by `steps`."""
        drafter, features = self._drafter, self._features
        uniform = math.log(len(self._target_ids_W))
        if not self._depths:  # nothing in the pack teaches
            return Start(loss=(), uniform=uniform)
        own_D = drafter.norm.weight.clone()
        scale_down(drafter, steps)
        scores = forward_loss(
            drafter,
            self._scored,
            features,
            target_ids_W=self._target_ids_W,
            layer_ids=drafter.config.aux_layer_ids or features.aux_layer_ids,
            weights=[1.0] * self._depths,
            row_loss=cross_entropy,
            chunk=MAX_ROWS,
        )
        drafter.norm.weight.copy_(own_D)
        counts = self._scored.counts(self._depths)
        losses = tuple(total / count for total, count in zip(scores.loss_S.tolist(), counts, strict=True))
        return Start(loss=losses, uniform=uniform)

    def steps_down(self) -> int:
        """Number of steps to scale down until no depth is worse than a uniform guess."""
        return next((steps for steps in range(MAX_SCALE_STEPS) if not self.at(steps).worse), MAX_SCALE_STEPS)


@torch.no_grad()
def scale_down(drafter: Drafter, steps: int) -> None:
    """Scale a drafter's scores down by `SCALE_STEP`, `steps` times."""
    drafter.norm.weight.mul_(SCALE_STEP**steps)
