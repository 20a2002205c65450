"""Tiny models with random weights, and the same models written as GGUF the way llama.cpp's converter does."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoConfig, AutoModelForCausalLM

BYTES = sorted(ByteLevel.alphabet())
TOKENS = ["<|end|>", "<|start|>", *BYTES, "th", "the", "Ġt", "ĠĠ", "<tool>", "[PAD0]"]
TYPES = [3, 3, *[1] * 256, 1, 1, 1, 1, 4, 5]
MERGES = ["t h", "th e", "Ġ t", "Ġ Ġ"]
PIECES = ["<unk>", "<s>", "</s>", *[f"<0x{k:02X}>" for k in range(256)], "th", "▁th", "▁", "t", "h"]
CHAT_TEMPLATE = "{% for m in messages %}<|start|>{{ m['content'] }}<|end|>{% endfor %}<|start|>"

_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def tiny_model(family: str = "llama", **changes: Any) -> Any:
    """A random model whose float32 weights are exact in bfloat16."""
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "vocab_size": len(TOKENS),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
    }
    if family == "gemma3_text":
        # Every layer but the third has a window, shorter than what the tests read.
        settings |= {
            "tie_word_embeddings": True,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "query_pre_attn_scalar": settings["head_dim"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 50000.0, "factor": 8.0},
            },
        }
    if family == "phi3":
        settings |= {"pad_token_id": None, "sliding_window": 24}
    if family == "qwen3_moe":
        settings |= {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
        }
    config = AutoConfig.for_model(family, **{**settings, **changes})
    model = AutoModelForCausalLM.from_config(config).eval()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for name, weight in model.named_parameters():
            spread = torch.randn_like(weight) * 0.2
            # Norms of Gemma multiply by 1 + weight.
            one = "norm" in name and family != "gemma3_text"
            weight.copy_((1 + spread if one else spread).bfloat16().float())
    return model


def write_gguf(
    model: Any,
    path: Path,
    *,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    kinds: Mapping[str, gguf.GGMLQuantizationType] | None = None,
    architecture: str | None = None,
    pre: str = "smollm",
    edit: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    drop: str = "",
    reorder: bool = True,
    sentencepiece: bool = False,
) -> Path:
    """Write `model` to `path`; matrices are stored as `kind`, or as `kinds` says of their GGUF names, and `edit`
    may add keys and tensors.

    `reorder` is llama.cpp's order of rotary rows; a llama file without it is a wrong file.
    """
    config = model.config
    gemma3 = config.model_type == "gemma3_text"
    names = {"gemma3_text": "gemma3", "qwen3_moe": "qwen3moe"}
    architecture = architecture or names.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if gemma3:
        _add_gemma3(writer, config)
    else:
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
        writer.add_rope_dimension_count(int(16 * config.rope_parameters.get("partial_rotary_factor", 1.0)))
    if config.model_type == "phi3":
        _add_phi3(writer, config)
    if config.model_type == "qwen3_moe":
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if sentencepiece:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(PIECES)
        writer.add_token_types([2, 3, 3, *[6] * 256, *[1] * 5])
        writer.add_token_scores([0.0] * 259 + [float(-k) for k in range(5)])
        writer.add_unk_token_id(0)
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(TOKENS)
        writer.add_token_types(TYPES)
        writer.add_token_merges(MERGES)
    writer.add_eos_token_id(2 if sentencepiece else 0)
    writer.add_bos_token_id(1)
    writer.add_chat_template(CHAT_TEMPLATE)
    for name, weight in _published(model.state_dict()):
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stored = _stored_name(name, gemma3)
        if stored == drop:
            continue
        values = weight.numpy() + 1 if gemma3 and "norm" in name else weight.numpy()
        if reorder and architecture == "llama" and re.search("[qk]_proj", name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            values = _permute(values, heads)
        own = (kinds or {}).get(stored, kind)
        router = "ffn_gate_inp" in stored  # never quantised
        if values.ndim > 1 and not router and own is not gguf.GGMLQuantizationType.F32:
            writer.add_tensor(stored, gguf.quantize(values, own), raw_dtype=own)
        else:
            writer.add_tensor(stored, np.ascontiguousarray(values))
    edit(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def as_stored(model: Any, kind: gguf.GGMLQuantizationType) -> Any:
    """Replace the matrices of `model` by their bfloat16 values after quantisation as `kind`."""
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                packed = gguf.quantize(weight.numpy(), kind)
                weight.copy_(torch.from_numpy(gguf.dequantize(packed, kind).copy()).bfloat16().float())
    return model


def _add_gemma3(writer: gguf.GGUFWriter, config: Any) -> None:
    """Metadata of llama.cpp's converter for Gemma 3; it omits the rotary parameters of windowed layers."""
    whole = config.rope_parameters["full_attention"]
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_freq_base(whole["rope_theta"])
    if whole["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(whole["factor"])
    writer.add_sliding_window(config.sliding_window)


def _add_phi3(writer: gguf.GGUFWriter, config: Any) -> None:
    """Metadata of llama.cpp's converter for Phi-3; it omits the kind of rope scaling, which the tensors tell."""
    rope = config.rope_parameters
    writer.add_rope_scaling_orig_ctx_len(rope.get("original_max_position_embeddings", config.max_position_embeddings))
    writer.add_sliding_window(config.sliding_window or 0)
    if rope["rope_type"] == "longrope":
        scale = config.max_position_embeddings / rope["original_max_position_embeddings"]
        writer.add_rope_scaling_attn_factors(
            math.sqrt(1 + math.log(scale) / math.log(rope["original_max_position_embeddings"]))
        )
        for length in ("long", "short"):
            writer.add_tensor(f"rope_factors_{length}.weight", np.array(rope[f"{length}_factor"], np.float32))


def _published(state: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Split experts' fused gate and up projections, as in GGUF files."""
    for name, weight in state.items():
        if name.endswith("experts.gate_up_proj"):
            for part, half in zip(("gate", "up"), weight.chunk(2, dim=1), strict=True):
                yield name.replace("gate_up", part) + ".weight", half.contiguous()
        else:
            yield name if name.endswith((".weight", ".bias")) else f"{name}.weight", weight


def _stored_name(name: str, gemma3: bool) -> str:
    stem, _, ending = name.rpartition(".")
    if gemma3 and stem.endswith("post_attention_layernorm"):
        return f"blk.{stem.split('.')[2]}.post_attention_norm.{ending}"
    layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", stem)
    return f"blk.{layer[1]}.{_NAMES[layer[2]]}.{ending}" if layer else f"{_NAMES[stem]}.{ending}"


def _permute(values: Any, heads: int) -> Any:
    """llama.cpp's reordering of rotary rows, as in its convert_hf_to_gguf.py."""
    return values.reshape(heads, 2, values.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(values.shape)
