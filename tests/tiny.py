"""Small real models: a target that learnt a small language, and drafters that learnt that target.

Random weights would accept nothing and tell little: a wrong norm, a shifted position or a swapped layer goes unseen
where every draft is wrong anyway. These train in seconds on a CPU, once: see `trained_once`.
"""

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from eyas.drafter.config import DrafterConfig, LatentSizes
from eyas.drafter.eagle1_model import new_drafter
from eyas.drafter.model import Drafter
from eyas.target.capture import capture
from eyas.train.init import set_vocabulary
from trained_once import trained_once

VOCAB = 96
LAYERS = 4
HIDDEN = 64
AUX_IDS = (1, 2, 3)


class UnrollAttention:
    """Training-time test, dense: a query sees the depth-0 keys up to its slot and its own slot of later depths."""

    expands_latents = True

    def __init__(self) -> None:
        self._depths: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group = q.shape[-2] // k.shape[-2]
        k, v = (x.repeat_interleave(group, dim=-2) for x in (k, v))
        depths = self._depths.setdefault(layer, [])
        depths.append((k, v))
        first_k, first_v = depths[0]
        scale = q.shape[-1] ** -0.5
        slots = q.shape[1]
        causal = torch.ones(slots, slots, dtype=torch.bool).tril()
        scores = [torch.einsum("bthk,bshk->bhts", q, first_k).masked_fill(~causal, float("-inf")) * scale]
        scores += [torch.einsum("bthk,bthk->bht", q, later_k)[..., None] * scale for later_k, _ in depths[1:]]
        weights = torch.cat(scores, dim=-1).softmax(dim=-1)
        out = torch.einsum("bhts,bshk->bthk", weights[..., :slots], first_v)
        for i, (_, later_v) in enumerate(depths[1:]):
            out = out + weights[..., slots + i].transpose(1, 2)[..., None] * later_v
        return out


class Letters(PreTrainedTokenizerBase):
    """Writes one character for every token, and reads nothing."""

    def decode(self, ids: Sequence[int], **_: object) -> str:  # type: ignore[override]
        return "".join(chr(ord("0") + token) for token in ids)


def language(sequences: int, length: int, generator: torch.Generator) -> Tensor:
    """Text in which the classes of the last, the last but one and the last but three tokens mostly decide the next."""
    table = torch.randint(VOCAB, (6, 6, 6), generator=torch.Generator().manual_seed(7))
    ids = torch.randint(VOCAB, (sequences, length), generator=generator)
    chance = torch.rand(sequences, length, generator=generator)
    for t in range(4, length):
        likely = table[ids[:, t - 4] % 6, ids[:, t - 2] % 6, ids[:, t - 1] % 6]
        ids[:, t] = torch.where(
            chance[:, t] < 0.85, likely, torch.where(chance[:, t] < 0.97, (likely + 7) % VOCAB, ids[:, t])
        )
    return ids


def target_config(**changes: object) -> LlamaConfig:
    """A four-layer Llama."""
    values: dict[str, object] = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 128,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "rms_norm_eps": 1e-5,
    }
    return LlamaConfig(**{**values, **changes})


def latent_sizes(**changes: int | None) -> LatentSizes:
    """Latent attention for two heads. vLLM's kernel for CPUs knows latents of 512 and turned keys of 64 alone."""
    values = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 48, "q_lora_rank": 40}
    return LatentSizes(**{**values, **changes})  # type: ignore[arg-type]


def latent_target_config() -> DeepseekV3Config:
    """The same target with latent attention, and without experts."""
    plain, sizes = target_config(), latent_sizes()
    shared = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "max_position_embeddings")
    shared += ("num_attention_heads", "bos_token_id", "eos_token_id", "tie_word_embeddings")
    return DeepseekV3Config(
        **{key: getattr(plain, key) for key in shared},
        **asdict(sizes),
        num_key_value_heads=plain.num_attention_heads,
        rms_norm_eps=1e-6,  # what transformers has in the norms of latents whatever is said here, and vLLM has not
        first_k_dense_replace=LAYERS,
        initializer_range=0.08,  # so narrow, its two small steps to a query say nothing at first with less
    )


def trained_target(
    steps: int = 250, seed: int = 0, config: LlamaConfig | DeepseekV3Config | None = None
) -> PreTrainedModel:
    """A target that speaks the language."""
    torch.manual_seed(seed)
    model: Any = LlamaForCausalLM(target_config()) if config is None else AutoModelForCausalLM.from_config(config)

    def train() -> None:
        optimiser = torch.optim.AdamW(model.parameters(), lr=4e-3)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 4e-3, total_steps=steps)
        generator = torch.Generator().manual_seed(1)
        for _ in range(steps):
            ids = language(16, 32, generator)
            loss = model(input_ids=ids, labels=ids).loss
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()

    trained_once(list(model.parameters()), train, steps, model.config)
    return model.eval().requires_grad_(False)


def with_loud_norm(model: Any) -> Any:
    """The same target, whose last norm scales and turns signs as it likes and whose head takes that back.

    A last norm near the identity would hide on which side of it a state was taken.
    """
    generator = torch.Generator().manual_seed(4)
    size = model.config.hidden_size
    scale_D = torch.randn(size, generator=generator).exp() * torch.randn(size, generator=generator).sign()
    model.model.norm.weight.mul_(scale_D)
    model.lm_head.weight.div_(scale_D)
    return model


def drafter_config(**changes: object) -> DrafterConfig:
    """A drafter for the target above."""
    base = DrafterConfig(
        vocab_size=VOCAB,
        draft_vocab_size=VOCAB,
        hidden_size=HIDDEN,
        target_hidden_size=HIDDEN,
        intermediate_size=128,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        aux_layer_ids=AUX_IDS,
        max_position_embeddings=512,
        dtype="float32",
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def latent_drafter_config(**changes: Any) -> DrafterConfig:
    """The same drafter with latent attention."""
    sizes = latent_sizes(**changes.pop("mla", {}))
    return drafter_config(mla=sizes, num_key_value_heads=2, head_dim=sizes.qk_head_dim, **changes)


def eagle1_config(**changes: Any) -> DrafterConfig:
    """An EAGLE-1 drafter for the same target."""
    return drafter_config(**{"eagle1": True, "num_aux_hidden_states": 1, "aux_layer_ids": None, **changes})


def random_drafter(
    config: DrafterConfig, *, seed: int = 0, own_embedding: bool = True, own_head: bool = True
) -> Drafter:
    """Random weights, norms included, so that no norm is the identity."""
    torch.manual_seed(seed)
    drafter = new_drafter(config, own_embedding=own_embedding, own_head=own_head and not config.eagle1)
    for name, parameter in drafter.named_parameters():
        if name.endswith("norm.weight") or "fc_norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    if config.pruned:
        kept = torch.randperm(config.vocab_size)[: config.draft_vocab_size].sort().values
        set_vocabulary(drafter, kept)
    return drafter.eval().requires_grad_(False)


def features(model: PreTrainedModel, ids: Tensor, layer_ids: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The target's logits and auxiliary states of a batch."""
    with torch.no_grad(), capture(model, layer_ids) as captured:
        logits = model(input_ids=ids, use_cache=False).logits
    return logits, captured.aux_hidden()


def unroll_loss(drafter: Drafter, ids: Tensor, logits: Tensor, aux: Tensor, depths: int) -> Tensor:
    """Soft cross-entropy of the training-time test over the draft vocabulary."""
    slots = ids.shape[1] - 1 - depths
    positions = torch.arange(slots).expand(ids.shape[0], -1)
    kept = drafter.vocab().target_ids_W
    attention = UnrollAttention()
    hidden = drafter.fuse(aux[:, :slots])
    total = torch.zeros(())
    for depth in range(depths):
        output = drafter.step(hidden, ids[:, 1 + depth : 1 + depth + slots], positions + depth, attention)
        teacher = logits[:, 1 + depth : 1 + depth + slots][..., kept].softmax(dim=-1)
        logp = functional.log_softmax(drafter.logits(output.normed), dim=-1)
        total = total - (teacher * logp).sum(dim=-1).mean()
        hidden = output.feedback
    return total / depths


def trained_drafter(
    model: Any, config: DrafterConfig, *, steps: int = 250, kept: Tensor | None = None, depths: int = 4
) -> Drafter:
    """A drafter that learnt the target; it shares the target's embeddings where the widths agree."""
    torch.manual_seed(2)
    same_width = config.hidden_size == config.target_hidden_size
    drafter = new_drafter(config, own_embedding=not same_width, own_head=not config.eagle1)
    for name, parameter in drafter.named_parameters():
        # Norms of the input start far from the identity, signs included, and training keeps them there: a norm that
        # is skipped or misplaced then shows, as it does in drafters of large targets.
        if (name.endswith("norm.weight") and name != "norm.weight") or name.startswith("fc_norm."):
            parameter.data.copy_(torch.randn_like(parameter).exp() * torch.randn_like(parameter).sign())
    if config.eagle1:
        drafter.fc.weight.data.mul_(3)  # so that a norm behind it would show, too
    if kept is not None:
        set_vocabulary(drafter, kept)
    if same_width and drafter.lm_head is not None:
        drafter.lm_head.weight.data.copy_(model.lm_head.weight[drafter.vocab().target_ids_W])
    drafter.share_target(model.get_input_embeddings().weight, model.lm_head.weight, model.model.norm)
    trainable = [p for p in drafter.parameters() if p.requires_grad]
    layer_ids = (LAYERS,) if config.eagle1 else config.aux_layer_ids
    assert layer_ids is not None

    def train() -> None:
        optimiser = torch.optim.AdamW(trainable, lr=4e-3)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 4e-3, total_steps=steps)
        generator = torch.Generator().manual_seed(3)
        for _ in range(steps):
            ids = language(16, 32, generator)
            logits, aux = features(model, ids, layer_ids)
            loss = unroll_loss(drafter, ids, logits, aux, depths)
            optimiser.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trainable, 1.0)
            optimiser.step()
            schedule.step()

    trained_once(trainable, train, steps, depths, config, model.config, *model.parameters())
    return drafter.eval().requires_grad_(False)
