"""What a Gemma 3 file leaves unsaid, in transformers' words: layers with a window, two rotations, scale of attention.

GGUF stores the window and the rotation of the layers without one. The rest is the same in every published model, and
llama.cpp knows it by heart: five layers with a window to one without, base 10000 and no scaling where there is one.
Newer files may say it (`sliding_window_pattern`, `freq_base_swa`), and then the file is believed.
"""

from eyas.errors import UserError
from eyas.target.gguf_file import GgufFile

_WINDOW = "attention.sliding_window"
_PATTERN = "attention.sliding_window_pattern"
_LOCAL_BASE = "rope.freq_base_swa"
GEMMA3_KEYS = frozenset({_WINDOW, _PATTERN, _LOCAL_BASE})

_EVERY = 6
_DEFAULT_LOCAL_BASE = 10000.0
# Of the published models only this one divides the hidden size by its heads; no key tells, so its depth must.
_LAYERS_OF_27B = 62


def gemma3_settings(source: GgufFile, rope: dict[str, object]) -> dict[str, object]:
    """Return the part of `Gemma3TextConfig` that no other architecture has; `rope` is of layers without a window."""
    layers = source.required("gemma3.block_count", int)
    heads = source.required("gemma3.attention.head_count", int)
    hidden = source.required("gemma3.embedding_length", int)
    head_dim = source.optional("gemma3.attention.key_length", int, hidden // max(heads, 1))
    local_base = source.optional(f"gemma3.{_LOCAL_BASE}", float, _DEFAULT_LOCAL_BASE)
    return {
        "sliding_window": source.required(f"gemma3.{_WINDOW}", int),
        "layer_types": ["sliding_attention" if slides else "full_attention" for slides in _pattern(source, layers)],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": local_base},
            "full_attention": rope,
        },
        "query_pre_attn_scalar": hidden // heads if layers == _LAYERS_OF_27B else head_dim,
    }


def _pattern(source: GgufFile, layers: int) -> list[bool]:
    """Which layers have a window: the file says it as one number or layer by layer, or not at all."""
    key = f"gemma3.{_PATTERN}"
    said = source.required(key, object) if key in source.keys else _EVERY
    if isinstance(said, int) and not isinstance(said, bool) and said > 0:
        return [(layer + 1) % said != 0 for layer in range(layers)]
    if isinstance(said, list) and len(said) == layers and all(isinstance(slides, bool) for slides in said):
        return said
    raise UserError(
        f"key {key} of {source.path} is neither a number above 0 nor {layers} truth values; "
        "use the model's safetensors folder instead"
    )
