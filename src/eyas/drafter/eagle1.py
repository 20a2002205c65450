"""EAGLE-1 and EAGLE-2 drafters, as config.json names them. They are one drafter: EAGLE-2 grows trees as it serves.

Their authors publish them as `LlamaForCausalLM` with one layer, in a pytorch_model.bin; vLLM calls them
`EagleLlamaForCausalLM` and SGLang `LlamaForCausalLMEagle`. Layers are Llama's. What they compute is said in `model.py`.

`bias` is of `fc`. Where config.json does not say it, the tensors do. vLLM and SGLang take it for biases of the layers,
so it is never written as true. vLLM's `fc` has none, and drops the tensor without a word; SGLang's always has one.
"""

from collections.abc import Mapping

from eyas.drafter.config import DrafterConfig
from eyas.drafter.layer_json import (
    CONSUMED,
    DRAFTER_FIELDS,
    IDS_KEY,
    QUANTIZATION_KEY,
    build_config,
    known_keys,
    layer_json,
    layer_values,
    refuse_unknown,
)
from eyas.drafter.layer_kinds import LAYER_KINDS, Json
from eyas.errors import UserError

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
    """Whether config.json is of an EAGLE-1 drafter; refuses those whose layers are not read."""
    named = [name for name in _architectures(raw) if isinstance(name, str)]
    if raw.get("model_type") == "eagle":
        raise UserError(
            "model_type is 'eagle', vLLM's old wrapping of an EAGLE-1 drafter; write what stands under 'model' at the "
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
    """Whether it is of an EAGLE-1 drafter as SGLang names it."""
    return SGLANG in _architectures(raw)


def _architectures(raw: Json) -> list[object]:
    named = raw.get("architectures")
    return named if isinstance(named, list) else []


def read_eagle1(raw: Json) -> tuple[DrafterConfig, Json]:
    """The config of an EAGLE-1 drafter, and the keys that change nothing here."""
    kind = LAYER_KINDS["llama"]
    # The authors' drafter of Mixtral has Llama's layers, under its target's name.
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
            f"{QUANTIZATION_KEY} stands in config.json: eyas reads EAGLE-1 drafters that are not quantised, as their "
            "authors publish them: use such a one"
        )
    if strange := [key for key in (IDS_KEY, "eagle_config") if raw.get(key)]:
        raise UserError(
            f"{strange[0]} is {raw[strange[0]]!r}, and an EAGLE-1 drafter reads the target's last state alone; is it "
            f"an EAGLE-3 drafter? Then architectures says {LAYER_KINDS['llama'].architectures[0]}"
        )
    refuse_unknown(raw, known_keys(raw, kind) | _OWN_KEYS, "config.json")
    values = {"num_aux_hidden_states": 1, **layer_values(raw, kind), "eagle1": True}
    values |= {key: raw[key] for key in DRAFTER_FIELDS if raw.get(key) is not None}
    if (bias := raw.get(BIAS_KEY)) is not None:
        if not isinstance(bias, bool):
            raise UserError(f"{BIAS_KEY} is {bias!r}; it must be true or false, or absent: it says whether fc has one")
        values["fc_bias"] = bias
    left_out = CONSUMED | {BIAS_KEY, "qkv_bias", QUANTIZATION_KEY}
    return build_config(values), {key: value for key, value in raw.items() if key not in left_out}


def write_eagle1(config: DrafterConfig, extras: Json, *, sglang: bool) -> Json:
    """What vLLM or SGLang reads; refuses what vLLM does not load."""
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
