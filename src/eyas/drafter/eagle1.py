"""EAGLE-1 and EAGLE-2 drafters on disk. They are one drafter: EAGLE-2 differs by trees in serving. No torch.

The authors publish them as `LlamaForCausalLM` with one layer, in a pytorch_model.bin; vLLM calls them
`EagleLlamaForCausalLM` and SGLang `LlamaForCausalLMEagle`. The layers are Llama's. `eagle1_model.py` has the model.

The key `bias` means a bias of `fc`; without the key, the tensors decide. vLLM and SGLang would give the layers biases
for it, so it is never written as true. vLLM's `fc` has no bias and drops the tensor silently; SGLang's always has one.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from eyas.drafter.config import DrafterConfig
from eyas.drafter.layer_json import (
    CONSUMED,
    IDS_KEY,
    LAYER_KINDS,
    QUANTIZATION_KEY,
    Json,
    build_config,
    known_keys,
    layer_json,
    refuse_unknown,
)
from eyas.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

BIAS_KEY = "bias"
PUBLISHED, VLLM, SGLANG = "LlamaForCausalLM", "EagleLlamaForCausalLM", "LlamaForCausalLMEagle"

_UNREAD: Mapping[str, str] = {
    "Qwen2ForCausalLM": "layers of Qwen2, whose queries, keys and values have biases",
    "Qwen3ForCausalLM": "layers of Qwen3, whose queries and keys are normed",
    "MixtralForCausalLM": "a mixture of experts",
    "Qwen3MoeForCausalLM": "a mixture of experts",
    "Llama4ForCausalLM": "layers of Llama 4",
    "MistralForCausalLM": "layers of Mistral",
    "MistralLarge3ForCausalLM": "layers of Mistral Large 3",
    "CohereForCausalLM": "layers of Cohere",
    "MiniCPMForCausalLM": "layers of MiniCPM",
    "DeepSeekMTPModel": "layers of DeepSeek",
}
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_OWN_KEYS = frozenset({BIAS_KEY, "qkv_bias", "max_sequence_length"})


def is_eagle1(raw: Json) -> bool:
    """Whether config.json describes an EAGLE-1 drafter; refuses one whose layers are not supported."""
    named = [name for name in _architectures(raw) if isinstance(name, str)]
    if raw.get("model_type") == "eagle":
        raise UserError(
            "model_type is 'eagle', vLLM's old wrapping of an EAGLE-1 drafter; write the content of 'model' at the "
            f"top of config.json, with architectures [{VLLM!r}]"
        )
    if VLLM in named or SGLANG in named:
        return True
    one_layer = raw.get("num_hidden_layers") == 1
    for name in named:
        of_eagle = name.startswith("Eagle") and not name.startswith("Eagle3")
        what = _UNREAD.get(name.removeprefix("Eagle"))
        if of_eagle or (one_layer and what is not None):
            raise UserError(
                f"architectures is {named}: an EAGLE-1 drafter with {what or 'layers of another model'}; eyas runs "
                "EAGLE-1 drafters with layers of Llama: use such a one, or an EAGLE-3 drafter"
            )
    return one_layer and PUBLISHED in named


def is_sglangs(raw: Json) -> bool:
    """Whether config.json describes an EAGLE-1 drafter with SGLang's name."""
    return SGLANG in _architectures(raw)


def _architectures(raw: Json) -> list[object]:
    named = raw.get("architectures")
    return named if isinstance(named, list) else []


def read_eagle1(raw: Json) -> tuple[DrafterConfig, Json]:
    """Read the config of an EAGLE-1 drafter, and the keys that change nothing."""
    kind = LAYER_KINDS["llama"]
    # The authors' drafter for Mixtral has Llama's layers and its target's model_type.
    if raw.get("model_type", "llama") not in ("llama", "mixtral"):
        raise UserError(
            f"config.json says model_type {raw['model_type']!r}; eyas runs EAGLE-1 drafters with layers of Llama: use "
            "such a one, or an EAGLE-3 drafter"
        )
    if raw.get("qkv_bias"):
        raise UserError(
            "qkv_bias is true: queries, keys and values have biases, as Qwen2's have; eyas and vLLM run EAGLE-1 "
            "drafters with layers of Llama: use such a one, or an EAGLE-3 drafter"
        )
    if experts := [key for key in _EXPERTS if raw.get(key)]:
        raise UserError(
            f"{experts[0]} is {raw[experts[0]]!r}: an EAGLE-1 drafter with a mixture of experts; eyas runs those with "
            "layers of Llama: use such a one, or an EAGLE-3 drafter"
        )
    if raw.get(QUANTIZATION_KEY):
        raise UserError(
            f"{QUANTIZATION_KEY} is in config.json: eyas reads EAGLE-1 drafters that are not quantised, as their "
            "authors publish them: use such a one"
        )
    if strange := [key for key in (IDS_KEY, "eagle_config") if raw.get(key)]:
        raise UserError(
            f"{strange[0]} is {raw[strange[0]]!r}, and an EAGLE-1 drafter reads the target's last state alone; is it "
            f"an EAGLE-3 drafter? Then architectures says {LAYER_KINDS['llama'].architectures[0]}"
        )
    refuse_unknown(raw, known_keys(raw, kind) | _OWN_KEYS, "config.json")
    bias = raw.get(BIAS_KEY)
    if not (bias is None or isinstance(bias, bool)):
        raise UserError(f"{BIAS_KEY} is {bias!r}; it must be true or false, or absent: it says whether fc has one")
    left_out = CONSUMED | {BIAS_KEY, "qkv_bias", QUANTIZATION_KEY}
    config = build_config(raw, kind, raw, eagle1=True, fc_bias=bool(bias))
    return config, {key: value for key, value in raw.items() if key not in left_out}


def write_eagle1(config: DrafterConfig, extras: Json, *, sglang: bool) -> Json:
    """Return config.json for vLLM or SGLang; refuses what vLLM would not load."""
    if config.fc_bias and not sglang:
        raise UserError(
            "fc of this EAGLE-1 drafter has a bias, and vLLM's has none: it would leave it out without a word and "
            "draft garbage; serve it with eyas, or use --to sglang"
        )
    layer = {key: value for key, value in layer_json(config).items() if key != "num_aux_hidden_states"}
    written = {
        **extras,
        "architectures": [SGLANG if sglang else VLLM],
        "model_type": "llama",
        **layer,
        "tie_word_embeddings": False,
        "torch_dtype": config.dtype,
    }
    return written if sglang else {**written, BIAS_KEY: False}


def with_fc_bias(config: DrafterConfig, tensors: dict[str, "Tensor"], raw: Json) -> DrafterConfig:
    """Decide by the tensors whether fc has a bias, if config.json does not say; a bias of zeros is removed."""
    if "fc.bias" in tensors and raw.get(BIAS_KEY) is not False and not tensors["fc.bias"].any():
        del tensors["fc.bias"]
        return replace(config, fc_bias=False)
    return config if raw.get(BIAS_KEY) is not None else replace(config, fc_bias="fc.bias" in tensors)


def unknown_tensor_remedy(name: str) -> str:
    """Return the advice for a tensor that an EAGLE-1 drafter does not have."""
    if name == "lm_head.weight":
        return "an EAGLE-1 drafter uses the target's head, and vLLM refuses another: remove it"
    if name == "fc.bias":
        return "config.json says bias is false: set it to true if fc was trained with it"
    if name in ("layers.0.input_layernorm.weight", "layers.0.hidden_norm.weight", "norm.weight"):
        return "an EAGLE-1 drafter has no norm there: was it trained as something else?"
    if name.endswith((".q_proj.bias", ".k_proj.bias", ".v_proj.bias")):
        return (
            "config.json says no attention_bias; where queries, keys and values alone have biases, as Qwen2's "
            "have, eyas and vLLM do not run it"
        )
    if name.endswith(".bias"):
        return "vLLM would leave it out without a word: correct attention_bias or mlp_bias in config.json, or remove it"
    if ".experts." in name or ".block_sparse_moe." in name:
        return "eyas runs EAGLE-1 drafters with layers of Llama, not with experts: use such a one"
    if name.startswith("model."):
        return "EAGLE tensors have no 'model.' prefix: is this path the target instead of its drafter?"
    return "vLLM would refuse it: remove it or correct config.json"
