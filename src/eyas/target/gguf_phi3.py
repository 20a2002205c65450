"""What Phi-3 and Phi-4 files have of their own, in transformers' words: joined projections, and a window.

Queries, keys and values are one matrix, and so are gates and what they gate, in the order that transformers has them.
"""

from eyas.target.gguf_file import GgufFile

_WINDOW = "attention.sliding_window"
PHI3_KEYS = frozenset({_WINDOW})
PHI3_TENSORS = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_qkv.weight": "self_attn.qkv_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_up.weight": "mlp.gate_up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}


def phi3_settings(source: GgufFile, rope: dict[str, object]) -> dict[str, object]:
    """Return the part of `Phi3Config` that no other architecture has; a window of 0 is none."""
    settings: dict[str, object] = {
        "rope_parameters": rope,
        "sliding_window": source.optional(f"phi3.{_WINDOW}", int, 0) or None,
        # By default it is a token that smaller vocabularies do not have.
        "pad_token_id": source.optional("tokenizer.ggml.padding_token_id", int, None),
    }
    if "original_max_position_embeddings" in rope:
        settings["original_max_position_embeddings"] = rope["original_max_position_embeddings"]
    return settings
