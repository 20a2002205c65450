"""The tensors of a drafter, by name and shape: for the reader, the writer and the checker.

Names are canonical (`layers.0.`, no prefix); layouts.py has the names of each format.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from eyas.drafter.config import DrafterConfig

WEIGHT_DTYPES = frozenset({"F32", "BF16", "F16"})


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """Shape and dtypes of a tensor; dtypes are named as in the safetensors header."""

    shape: tuple[int, ...]
    dtypes: frozenset[str] = WEIGHT_DTYPES
    required: bool = True


# Size symbols: H drafter hidden, B = 2H embedding and state, T target hidden, F = A * T concatenated states, Q query
# width, G key width, K head dim, L query latent, R latent of keys and values, C latent and rotated key, E keys and
# values expanded from the latent, O values of all heads, M feed-forward width, V target vocabulary, W draft vocabulary,
# X attention input (2H in the first layer of EAGLE-3, else H).
_FIRST_LAYER_ONLY = {"hidden_norm.weight": "H"}
_ATTENTION = {
    "self_attn.q_proj.weight": "QX",
    "self_attn.k_proj.weight": "GX",
    "self_attn.v_proj.weight": "GX",
    "self_attn.o_proj.weight": "HQ",
}
_LATENT_ATTENTION = {
    "self_attn.kv_a_proj_with_mqa.weight": "CX",
    "self_attn.kv_a_layernorm.weight": "R",
    "self_attn.kv_b_proj.weight": "ER",
    "self_attn.o_proj.weight": "HO",
}
_PLAIN_QUERIES = {"self_attn.q_proj.weight": "QX"}
_LATENT_QUERIES = {
    "self_attn.q_a_proj.weight": "LX",
    "self_attn.q_a_layernorm.weight": "L",
    "self_attn.q_b_proj.weight": "QL",
}
_EVERY_LAYER = {
    "input_layernorm.weight": "H",
    "post_attention_layernorm.weight": "H",
    "mlp.gate_proj.weight": "MH",
    "mlp.up_proj.weight": "MH",
    "mlp.down_proj.weight": "HM",
}
_ATTENTION_BIAS = {
    "self_attn.q_proj.bias": "Q",
    "self_attn.k_proj.bias": "G",
    "self_attn.v_proj.bias": "G",
    "self_attn.o_proj.bias": "H",
}
_QK_NORM = {"self_attn.q_norm.weight": "K", "self_attn.k_norm.weight": "K"}
_MLP_BIAS = {"mlp.gate_proj.bias": "M", "mlp.up_proj.bias": "M", "mlp.down_proj.bias": "H"}


def expected_tensors(config: DrafterConfig) -> Mapping[str, TensorSpec]:
    """Return every tensor that a drafter of this config may have."""
    sizes = {
        "H": config.hidden_size,
        "B": 2 * config.hidden_size,
        "T": config.target_hidden_size,
        "F": config.num_aux_hidden_states * config.target_hidden_size,
        "Q": config.num_attention_heads * config.head_dim,
        "G": config.num_key_value_heads * config.head_dim,
        "K": config.head_dim,
        "M": config.intermediate_size,
        "V": config.vocab_size,
        "W": config.draft_vocab_size,
    }
    mla, attention = config.mla, _ATTENTION
    if mla is not None:
        sizes |= {
            "L": mla.q_lora_rank or 0,
            "R": mla.kv_lora_rank,
            "C": mla.kv_lora_rank + mla.qk_rope_head_dim,
            "E": config.num_attention_heads * (mla.qk_nope_head_dim + mla.v_head_dim),
            "O": config.num_attention_heads * mla.v_head_dim,
        }
        attention = _LATENT_ATTENTION | (_PLAIN_QUERIES if mla.q_lora_rank is None else _LATENT_QUERIES)

    def spec(symbols: str, *, attention_input: int = 0, required: bool = True) -> TensorSpec:
        known = {**sizes, "X": attention_input}
        return TensorSpec(shape=tuple(known[s] for s in symbols), required=required)

    if config.eagle1:
        table = {"fc.weight": spec("HB")} | ({"fc.bias": spec("H")} if config.fc_bias else {})
    else:
        table = {"fc.weight": spec("HF"), "norm.weight": spec("H")}
    if config.norm_before_fc:
        table["input_norm.weight"] = spec("F")
    if config.fc_norm:
        table |= {f"fc_norm.{i}.weight": spec("T") for i in range(config.num_aux_hidden_states)}
    for index in range(config.num_hidden_layers):
        rows = _EVERY_LAYER | attention
        if index == 0 and config.eagle1:
            del rows["input_layernorm.weight"]
        elif index == 0:
            rows |= _FIRST_LAYER_ONLY
        rows |= _ATTENTION_BIAS if config.attention_bias else {}
        rows |= _QK_NORM if config.qk_norm else {}
        rows |= _MLP_BIAS if config.mlp_bias else {}
        attention_input = config.hidden_size * (2 if index == 0 and not config.eagle1 else 1)
        table |= {
            f"layers.{index}.{name}": spec(symbols, attention_input=attention_input) for name, symbols in rows.items()
        }
    same_width = config.hidden_size == config.target_hidden_size
    # Without these two, the target's are used, if the shapes agree.
    table["embed_tokens.weight"] = spec("VH", required=not same_width)
    if not config.eagle1:
        table["lm_head.weight"] = spec("WH", required=config.pruned or not same_width)
    if config.pruned:
        table["d2t"] = TensorSpec(shape=(config.draft_vocab_size,), dtypes=frozenset({"I64"}))
        table["t2d"] = TensorSpec(shape=(config.vocab_size,), dtypes=frozenset({"BOOL"}), required=False)
    return MappingProxyType(table)
