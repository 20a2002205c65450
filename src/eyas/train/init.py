"""A drafter before its first step: shaped after its target, started from what the target already knows.

The head begins as the target's rows for the draft vocabulary, the last norm as the target's last norm, and the last of
the captured states goes straight through: the drafter speaks the target's language of states from the start, and the
layer in between, random at first, learns the difference.

Where the normed state is fed back (`norm_output`), the weights of the last norm move into the head and leave ones:

    head' = head * u,  u' = 1       same scores, and the next depth receives what this one had, at length one

Fed back with its weights, a state would be multiplied by them once more at every depth. They differ a hundredfold from
channel to channel in some targets, and after two depths the state would be its loudest channels and nothing else.
"""

from collections.abc import Mapping
from dataclasses import fields
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
from eyas.train.recipe import DrafterSettings

MAX_INITIAL_LOGIT_STD = 2.5
"""Standard deviation that a drafter's scores have at most before it has learnt anything."""


def config_for(target: TargetParts, settings: DrafterSettings, *, dtype: str) -> DrafterConfig:
    """A drafter as wide as its target, with heads, rope and context of its own kind; its vocabulary has been chosen."""
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
    """The target's own where its attention is latent, else DeepSeek V3's, with queries of no more than its width."""
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
    """A drafter for the target that proposes the target ids `target_ids_W`, on the target's device."""
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
    # A normed state that says nothing yet gives scores of this spread. Certain of noise, a drafter would first have to
    # unlearn that: it starts modest, with the target's norm made smaller.
    spread = float((drafter.lm_head.weight * drafter.norm.weight).square().sum(dim=1).mean().sqrt())
    drafter.norm.weight.mul_(min(1.0, MAX_INITIAL_LOGIT_STD / max(spread, 1e-9)))
    if drafter.config.norm_output:
        drafter.lm_head.weight.mul_(drafter.norm.weight)
        drafter.norm.weight.fill_(1.0)
    # The last state passes through, so that the residual starts in the space that the head reads.
    last = drafter.fc.weight[:, -target.facts.hidden_size :]
    last.add_(torch.eye(*last.shape))


def set_vocabulary(drafter: Drafter, target_ids_W: Tensor) -> None:
    """Let the drafter propose these target ids, ascending."""
    if drafter.d2t is not None and drafter.t2d is not None:
        drafter.d2t.copy_(offsets_from_target_ids(target_ids_W))
        drafter.t2d.copy_(membership_from_target_ids(target_ids_W, drafter.config.vocab_size))


def _last_norm(target: TargetParts) -> Tensor | None:
    """The scale of the target's last norm; architectures disagree on how they store it, not on what it does."""
    norm = target.norm
    if norm is None or isinstance(norm, nn.LayerNorm):
        return None
    with torch.no_grad():
        # Ones of both signs: their mean is zero, so norms that take it off (Cohere) do to them what others do.
        signs_D = torch.ones(target.facts.hidden_size, device=target.device, dtype=target.dtype)
        signs_D[1::2] = -1
        scale_D: Tensor = (norm(signs_D[None])[0] * signs_D).float()
    return scale_D


def _rope(theirs: Mapping[str, Any], *, latent: bool) -> dict[str, Any]:
    """The target's rope where a drafter can have it; its base alone where the kind is one that servers disagree on."""
    # Some targets have a rope for every kind of layer; a drafter's layer attends to everything.
    theirs = next((theirs[k] for k in ("full_attention", *theirs) if isinstance(theirs.get(k), Mapping)), theirs)
    kind = str(theirs.get("rope_type", "default"))
    theta = float(theirs.get("rope_theta") or 10000.0)
    if kind not in (LATENT_ROPES if latent else ROPE_KEYS):
        return {"rope_type": "default", "rope_theta": theta}
    known = ROPE_KEYS[kind] | ROPE_OPTIONAL_KEYS.get(kind, frozenset()) - (NOT_LATENT if latent else frozenset())
    return {"rope_type": kind, "rope_theta": theta} | {k: v for k, v in theirs.items() if k in known and v is not None}
