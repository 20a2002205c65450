"""Runs a target over KV cache blocks, through transformers' attention interface (`target/attention.py`).

The metadata of a pass defines causal attention. Softcaps and most windows come with each layer's call; other windows
are read from the configuration. Targets whose attention cannot be reproduced are refused.

Every target is first run on one token, with a cache of one block. So refusals come before memory is allocated, and the
size of a block is known.

Shapes: N tokens of a pass, M requested logits, V vocabulary, H query heads, G key heads, K head dim.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from eyas.engine.kv_cache.cache import KVCache, PagedAttention
from eyas.errors import UserError
from eyas.kernels.attention.backend import AttentionCall
from eyas.kernels.attention.metadata import AttentionMetadata, AttentionRow
from eyas.target.attention import AttendFor, attending_through
from eyas.target.model import Target


class TargetRunner:
    """A target over a KV cache, which is allocated here."""

    def __init__(self, target: Target, cache: KVCache) -> None:
        self.cache = cache
        self._target = target
        self._windows: dict[int, int] = {}
        _refuse_other_layers(target)
        one_block = KVCache(blocks=1, block_size=cache.block_size, dtype=cache.dtype)
        calls = self._try(one_block)
        self._windows = _configured_windows(target, {call.layer: call.window for call in calls})
        cache.reserve(one_block)
        self.calls = [replace(call, window=self._windows.get(call.layer, call.window)) for call in calls]
        """Attention parameters of every layer, in order."""

    def forward(self, ids_N: Tensor, metadata: AttentionMetadata, keep_M: Tensor | None = None) -> Tensor:
        """Run a pass; returns logits [M, V] of the tokens `keep_M`, or of all."""
        return self._run(ids_N, metadata, keep_M, self.attend(metadata))

    def attend(self, metadata: AttentionMetadata, cache: KVCache | None = None) -> AttendFor:
        """Make the attention function of a pass, over this cache or another."""
        return partial(self._attend, PagedAttention(cache or self.cache, metadata), None)

    @torch.inference_mode()
    def _try(self, cache: KVCache) -> list[AttentionCall]:
        """Run one token and collect the attention parameters of every layer."""
        facts, device = self._target.facts, self._target.device
        metadata = AttentionMetadata.of(
            [AttentionRow(blocks=(0,), base=0, count=1)], block_size=cache.block_size, device=device
        )
        calls = list[AttentionCall]()
        attend = partial(self._attend, PagedAttention(cache, metadata), calls)
        self._run(torch.zeros(1, dtype=torch.int64, device=device), metadata, None, attend)
        layers = [call.layer for call in calls]
        if sorted(layers) != list(range(facts.num_hidden_layers)):
            raise UserError(
                f"{facts.source} asked for attention in layers {layers} of {facts.num_hidden_layers}; "
                "paged attention needs a target whose every layer attends once"
            )
        return sorted(calls, key=lambda call: call.layer)

    def _run(self, ids_N: Tensor, metadata: AttentionMetadata, keep_M: Tensor | None, attend: AttendFor) -> Tensor:
        model = self._target.model
        with attending_through(model, attend):
            logits_BMV: Tensor = model(
                input_ids=ids_N[None],
                position_ids=metadata.position_N[None],
                use_cache=False,
                logits_to_keep=0 if keep_M is None else keep_M,
                eyas_attend=attend,
            ).logits
        if keep_M is not None and logits_BMV.shape[1] != len(keep_M):  # a model without logits_to_keep
            logits_BMV = logits_BMV[:, keep_M]
        return logits_BMV[0]

    def _attend(
        self,
        attention: PagedAttention,
        calls: list[AttentionCall] | None,
        module: nn.Module,
        q_NHK: Tensor,
        k_NGK: Tensor,
        v_NGK: Tensor,
        scale: float | None,
        softcap: float | None,
        window: int | None,
        sink_logit_H: Tensor | None,
    ) -> Tensor:
        """Run the attention of one layer; its parameters are added to `calls`, if given."""
        layer: Any = module.layer_idx
        if calls is not None:
            (_, heads, head_dim), (_, key_heads, value_dim) = q_NHK.shape, v_NGK.shape
            calls.append(
                AttentionCall(
                    layer=layer,
                    heads=heads,
                    key_heads=key_heads,
                    head_dim=head_dim,
                    value_dim=value_dim,
                    scale=head_dim**-0.5 if scale is None else scale,
                    softcap=softcap,
                    window=window,
                    sink_logit_H=sink_logit_H,
                )
            )
        window = self._windows.get(layer) if window is None else window
        return attention(layer, q_NHK, k_NGK, v_NGK, scale, softcap, window, sink_logit_H)


def _refuse_other_layers(target: Target) -> None:
    """Refuse targets that are known not to work without running them."""
    config, source = target.model.config.get_text_config(), target.facts.source
    if len({parameter.device for parameter in target.model.parameters()}) > 1:
        raise UserError(f"{source} lies on several devices; paged attention needs it on one")
    if "position_ids" not in signature(target.model.forward).parameters:
        raise UserError(
            f"{source} ({target.facts.model_type}) takes no position_ids, which paged attention needs; choose another "
            "target"
        )
    kinds = getattr(config, "layer_types", None)
    if kinds is None and getattr(config, "attention_chunk_size", None) is not None:
        kinds = ["chunked_attention"]
    others = sorted(set(kinds or ()) - {"full_attention", "sliding_attention"})
    if others:
        raise UserError(
            f"{source} has layers of type {', '.join(others)}; only full and sliding attention are supported"
        )
    if getattr(config, "attn_temperature_tuning", False) and 0 in (getattr(config, "no_rope_layers", None) or ()):
        raise UserError(
            f"{source} scales attention by its own count of positions (attn_temperature_tuning), which paged attention "
            "cannot provide; choose another target"
        )


def _configured_windows(target: Target, said: Mapping[int, int | None]) -> dict[int, int]:
    """Windows that the configuration gives to layers which do not pass one; `said` is what they passed."""
    config = target.model.config.get_text_config()
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    silent = [layer for layer, passed in said.items() if passed is None]
    if window is None or not silent:
        return {}
    if kinds is not None:
        return {layer: window for layer in silent if kinds[layer] == "sliding_attention"}
    if window < getattr(config, "max_position_embeddings", math.inf):
        raise UserError(
            f"the configuration of {target.facts.source} has a sliding_window of {window} tokens, but its layers do "
            "not say whether they keep to it; remove it from config.json if they do not"
        )
    return {}
