"""GGUF file to Hugging Face folder: dequantised once, then an ordinary target.

transformers can open a GGUF but keeps it packed and cannot save it; training, capture and vLLM want plain
weights. So the weights are dequantised into bfloat16, with configuration, tokenizer and chat template beside
them. `eyas.json` in the folder says what it was made from: a dequantised model is not the original one.
Invariant: refuse rather than ignore. Every key of the architecture and every tensor is either understood or
named in an error, and the result has exactly the tensors and shapes that transformers expects.
"""

import json
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PretrainedConfig

from eyas.checksum import sha256_of
from eyas.empty_model import matrices_without_memory
from eyas.errors import UserError
from eyas.target.gguf_experts import EXPERT_KEYS, EXPERT_TENSORS, expert_settings, published_shapes
from eyas.target.gguf_file import GgufFile
from eyas.target.gguf_gemma3 import GEMMA3_KEYS, gemma3_settings
from eyas.target.gguf_phi3 import PHI3_KEYS, PHI3_TENSORS, phi3_settings
from eyas.target.gguf_rope import ROPE_KEYS, ROPE_TENSORS, rope_parameters
from eyas.target.gguf_tokenizer import stop_token_ids, write_tokenizer
from eyas.target.shards import write_bfloat16
from eyas.target.store import build_once

CONVERTER_VERSION = 3
"""Part of every cached folder's name: raise it when the same GGUF would give another folder."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """How one GGUF architecture is called in transformers."""

    model_class: str
    layer_tensors: Mapping[str, str]
    permuted: frozenset[str] = frozenset()
    """Layer tensors whose rows GGUF keeps in interleaved rotary order, by their transformers name."""
    model_type: str | None = None
    """What transformers calls the configuration, if not by the same name."""
    norms_add_one: bool = False
    """Whether norms of transformers multiply by 1 + weight; GGUF stores the sum."""
    keys: frozenset[str] = frozenset()
    """Metadata that other architectures do not have."""
    has_experts: bool = False
    settings: Callable[[GgufFile, dict[str, object]], dict[str, object]] = lambda source, rope: {
        "rope_parameters": rope
    }
    """Settings beyond those that all architectures share, given the rotation that the file describes."""


_GLOBAL_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_TENSORS = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
_QKV_BIASES = {
    "attn_q.bias": "self_attn.q_proj.bias",
    "attn_k.bias": "self_attn.k_proj.bias",
    "attn_v.bias": "self_attn.v_proj.bias",
}
_QK_NORMS = {
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
}
_FOUR_NORMS = {
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "ffn_norm.weight": "pre_feedforward_layernorm.weight",
    "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
}
ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(
        model_class="LlamaForCausalLM",
        layer_tensors=_LAYER_TENSORS,
        permuted=frozenset({"self_attn.q_proj.weight", "self_attn.k_proj.weight"}),
    ),
    "qwen2": Architecture(model_class="Qwen2ForCausalLM", layer_tensors=_LAYER_TENSORS | _QKV_BIASES),
    "qwen3": Architecture(model_class="Qwen3ForCausalLM", layer_tensors=_LAYER_TENSORS | _QK_NORMS),
    "gemma3": Architecture(
        model_class="Gemma3ForCausalLM",
        layer_tensors=_LAYER_TENSORS | _QK_NORMS | _FOUR_NORMS,
        model_type="gemma3_text",
        norms_add_one=True,
        keys=GEMMA3_KEYS,
        settings=gemma3_settings,
    ),
    "phi3": Architecture(
        model_class="Phi3ForCausalLM", layer_tensors=PHI3_TENSORS, keys=PHI3_KEYS, settings=phi3_settings
    ),
    "qwen3moe": Architecture(
        model_class="Qwen3MoeForCausalLM",
        model_type="qwen3_moe",
        layer_tensors=_LAYER_TENSORS | _QK_NORMS | EXPERT_TENSORS,
        keys=EXPERT_KEYS,
        has_experts=True,
        settings=expert_settings,
    ),
}

_SIZES = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
_EPSILON = "attention.layer_norm_rms_epsilon"
_OTHER_KEYS = {
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "expert_count",
    "expert_used_count",
    "vocab_size",
    _EPSILON,
}
_LAYER = re.compile(r"blk\.(\d+)\.(.+)")


def converted_folder(path: Path, cache: Path) -> Path:
    """Return the folder made from `path`, converting once; the same bytes give the same folder."""
    digest = sha256_of(path)
    folder = cache / "targets" / f"gguf-{digest[:32]}-v{CONVERTER_VERSION}"
    return build_once(folder, lambda staging: convert(path, staging, sha256=digest))


def convert(path: Path, folder: Path, *, sha256: str) -> None:
    """Fill the empty `folder` with a Hugging Face model made from the GGUF file `path`."""
    source = GgufFile(path)
    architecture = architecture_of(source)
    config = _config(source, architecture)
    names = tensor_names(source, architecture, config)
    logger.info(f"dequantising {len(names)} tensors of {path.name} to bfloat16 (once)")
    write_tokenizer(source, folder, vocab_size=config.vocab_size, max_length=config.max_position_embeddings)
    config.save_pretrained(folder)
    generation = GenerationConfig(  # type: ignore[no-untyped-call]
        bos_token_id=source.optional("tokenizer.ggml.bos_token_id", int, None),
        eos_token_id=list(stop_token_ids(source)),
        pad_token_id=source.optional("tokenizer.ggml.padding_token_id", int, None),
    )
    generation.save_pretrained(folder)
    write_bfloat16(
        folder,
        {name: place.shape(source) for name, place in names.items()},
        lambda name: dense_weight(source, names[name], name, architecture, config),
    )
    provenance = {
        "converter_version": CONVERTER_VERSION,
        "dequantised_from": {
            "file": path.name,
            "name": source.optional("general.name", str, ""),
            "license": source.optional("general.license", str, ""),
            "sha256": sha256,
            "tensor_types": source.tensor_types,
        },
    }
    (folder / "eyas.json").write_text(json.dumps(provenance, indent=2) + "\n")


def architecture_of(source: GgufFile) -> str:
    """The name of a supported architecture, whose every key is understood."""
    name = source.required("general.architecture", str)
    kind = source.optional("general.type", str, "model")
    if name not in ARCHITECTURES or kind != "model":
        what = f"architecture {name!r}" if kind == "model" else f"a {kind}, not a model, of architecture {name!r}"
        raise UserError(
            f"{source.path} holds {what}; supported are models of {', '.join(ARCHITECTURES)}: "
            "use the model's safetensors folder instead"
        )
    understood = {f"{name}.{key}" for key in (*_SIZES, *ROPE_KEYS, *_OTHER_KEYS, *ARCHITECTURES[name].keys)}
    unknown = [key for key in source.keys if key.startswith(f"{name}.") and key not in understood]
    if unknown:
        raise UserError(
            f"{source.path} sets {', '.join(unknown)}, which eyas does not understand and will not ignore; "
            "use the model's safetensors folder instead"
        )
    experts = source.optional(f"{name}.expert_count", int, 0)
    if experts > 0 and not ARCHITECTURES[name].has_experts:
        mixtures = ", ".join(known for known, one in ARCHITECTURES.items() if one.has_experts)
        raise UserError(
            f"{source.path} is a mixture of {experts} experts of architecture {name!r}; mixtures are supported from "
            f"GGUF for {mixtures}, use the model's safetensors folder instead"
        )
    return name


def _config(source: GgufFile, architecture: str) -> PretrainedConfig:
    values: dict[str, object] = {name: source.required(f"{architecture}.{key}", int) for key, name in _SIZES.items()}
    heads = source.required(f"{architecture}.attention.head_count", int)
    hidden = source.required(f"{architecture}.embedding_length", int)
    head_dim = source.optional(f"{architecture}.attention.key_length", int, hidden // max(heads, 1))
    if source.optional(f"{architecture}.attention.value_length", int, head_dim) != head_dim:
        raise UserError(f"{source.path} has keys and values of different sizes; use its safetensors folder instead")
    shapes = source.shapes
    for stored in ("token_embd.weight", "output_norm.weight"):
        if stored not in shapes:
            raise UserError(f"{source.path} has no tensor {stored}; it is not a complete model")
    known = ARCHITECTURES[architecture]
    config = AutoConfig.for_model(
        known.model_type or architecture,
        **values,
        num_key_value_heads=source.optional(f"{architecture}.attention.head_count_kv", int, heads),
        head_dim=head_dim,
        vocab_size=shapes["token_embd.weight"][0],
        rms_norm_eps=source.required(f"{architecture}.{_EPSILON}", float),
        tie_word_embeddings="output.weight" not in shapes,
        eos_token_id=list(stop_token_ids(source)),
        dtype="bfloat16",
        **known.settings(source, rope_parameters(source, architecture, head_dim)),
    )
    config.architectures = [known.model_class]
    return config


class Place(NamedTuple):
    """Where the file has a weight: a tensor, or what is one expert's of it."""

    tensor: str
    expert: int | None = None

    def shape(self, source: GgufFile) -> tuple[int, ...]:
        """Of the weight."""
        return source.shapes[self.tensor][0 if self.expert is None else 1 :]


def tensor_names(source: GgufFile, architecture: str, config: PretrainedConfig) -> dict[str, Place]:
    """Where the file has what transformers' checkpoints call so, in file order, checked against the model's own list.

    Experts go by the names that checkpoints are published with, one by one.
    """
    table = ARCHITECTURES[architecture].layer_tensors
    names: dict[str, Place] = {}
    for stored, shape in source.shapes.items():
        if stored in ROPE_TENSORS:
            continue
        match = _LAYER.fullmatch(stored)
        if match is not None and match[2] in table:
            name = f"model.layers.{match[1]}.{table[match[2]]}"
            if match[2] in EXPERT_TENSORS and len(shape) == 3:
                names |= {name.format(expert=e): Place(stored, e) for e in range(shape[0])}
            else:
                names[name] = Place(stored)
        elif stored in _GLOBAL_TENSORS:
            names[_GLOBAL_TENSORS[stored]] = Place(stored)
        else:
            raise UserError(
                f"{source.path} has a tensor {stored} that a {architecture} model does not use; "
                "use the model's safetensors folder instead"
            )
    with matrices_without_memory():
        empty = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    expected = published_shapes(empty)
    if config.tie_word_embeddings:
        del expected["lm_head.weight"]
    for name in sorted(expected.keys() | names.keys()):
        found = names[name].shape(source) if name in names else None
        if found != expected.get(name):
            raise UserError(
                f"{source.path} is not a whole {architecture} model: {name} is {found or 'missing'}, "
                f"expected {expected.get(name) or 'none'}; download or convert it again"
            )
    return names


def dense_weight(
    source: GgufFile, place: Place, name: str, architecture: str, config: PretrainedConfig
) -> torch.Tensor:
    """A tensor as transformers has it, float32; `name` is what it is called there."""
    weight = torch.from_numpy(source.tensor(*place))
    if ARCHITECTURES[architecture].norms_add_one and name.endswith("norm.weight"):
        return weight - 1
    order = row_order(name, len(weight), architecture, config)
    return weight if order is None else weight[order]


def row_order(name: str, rows: int, architecture: str, config: PretrainedConfig) -> torch.Tensor | None:
    """Which row of the file is each of the tensor's that transformers calls `name`; None where all stay in place."""
    if name.partition("layers.")[2].partition(".")[2] not in ARCHITECTURES[architecture].permuted:
        return None
    # llama.cpp rotates neighbouring rows, transformers the two halves of a head: undo its reordering.
    pairs = torch.arange(rows).view(rows // config.head_dim, config.head_dim // 2, 2)
    return pairs.transpose(1, 2).flatten()
