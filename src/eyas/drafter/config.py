"""Configuration of a drafter: sizes and flags. Imports no torch, since planning and checking start from here.

Invariant: a `DrafterConfig` is consistent. Its constructor refuses everything else, so no other code validates again.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

from eyas.errors import UserError

DTYPES = ("float32", "bfloat16", "float16")

# Rope types whose frequencies do not depend on the length of the sequence, with the keys that they need. transformers
# and vLLM compute the others (dynamic, longrope) differently, so a drafter would draft differently in each.
ROPE_KEYS: Mapping[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    "yarn": frozenset({"factor", "original_max_position_embeddings"}),
}
ROPE_OPTIONAL_KEYS: Mapping[str, frozenset[str]] = {
    "yarn": frozenset({"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}),
}

LATENT_ROPES = ("default", "yarn")
"""Rope types with latent attention: vLLM treats every other as yarn."""
NOT_LATENT = frozenset({"attention_factor", "truncate"})
"""Keys of yarn that vLLM ignores with latent attention."""

# Above any drafter, and low enough that a typing error is not a table of a billion tensors.
_LIMITS: Mapping[str, int] = {"num_hidden_layers": 256, "num_aux_hidden_states": 256}


@dataclass(frozen=True, kw_only=True)
class LatentSizes:
    """Sizes of multi-head latent attention (MLA): keys and values of all heads come from one latent per token."""

    kv_lora_rank: int
    """Size of the latent."""
    qk_nope_head_dim: int
    """Size of the part of a head's queries and keys without rotation; these keys are projected from the latent."""
    qk_rope_head_dim: int
    """Size of the part with rotation; all heads share its key."""
    v_head_dim: int
    q_lora_rank: int | None
    """Size of the latent of queries; None if they are projected from the layer's input."""

    def __post_init__(self) -> None:
        for item in fields(self):
            if (value := getattr(self, item.name)) is not None:
                _require_whole(item.name, value)
        if self.qk_rope_head_dim % 2:
            raise UserError(
                f"qk_rope_head_dim {self.qk_rope_head_dim} is odd; rotary embedding needs an even one: correct it in "
                "config.json"
            )

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim


@dataclass(frozen=True, kw_only=True)
class CachedSizes:
    """Sizes of one layer's KV cache for one token."""

    heads: int
    key_dim: int
    value_dim: int

    @property
    def numbers(self) -> int:
        """Elements of keys and values together."""
        return self.heads * (self.key_dim + self.value_dim)


class HasLayers(Protocol):
    """The facts of a target that decide which of its states a drafter reads."""

    @property
    def num_hidden_layers(self) -> int: ...
    def default_aux_layer_ids(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """Shape and flags of a drafter of the EAGLE family."""

    vocab_size: int
    """Size of the target's vocabulary: token ids and embeddings."""
    draft_vocab_size: int
    """Rows of the drafter's head; smaller than `vocab_size` if the vocabulary is pruned."""
    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    """Size of a head's queries and keys, and of its values except with latent attention."""
    num_hidden_layers: int = 1
    num_aux_hidden_states: int = 3
    aux_layer_ids: tuple[int, ...] | None = None
    """Target states that are read, as numbers of finished layers, ascending. None: the target's default."""
    fc_norm: bool = False
    """EAGLE 3.1, part one: a norm on each target state before `fc`."""
    norm_output: bool = False
    """EAGLE 3.1, part two: the next depth receives the normed state."""
    norm_before_fc: bool = False
    norm_before_residual: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """Qwen3 layers: each head's queries and keys are normed before rotation."""
    mla: LatentSizes | None = None
    """DeepSeek layers: multi-head latent attention."""
    eagle1: bool = False
    """EAGLE-1 or EAGLE-2, which are one drafter (see `eagle1_model.py`)."""
    fc_bias: bool = False
    """EAGLE-1 only: `fc` has a bias."""
    rms_norm_eps: float = 1e-5
    logit_scale: float = 1.0
    rope_parameters: Mapping[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    max_position_embeddings: int = 2048
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        for item in fields(self):
            if item.type is int:
                _require_whole(item.name, getattr(self, item.name))
        for item in fields(self):
            if item.type is bool and not isinstance(value := getattr(self, item.name), bool):
                raise UserError(f"{item.name} is {value!r}; it must be true or false in config.json")
        if self.qk_norm and (self.attention_bias or self.mlp_bias):
            raise UserError(
                f"attention_bias is {self.attention_bias} and mlp_bias {self.mlp_bias} beside qk_norm; layers of Qwen3 "
                "have no bias in vLLM: train the drafter without"
            )
        if self.draft_vocab_size > self.vocab_size:
            raise UserError(
                f"draft_vocab_size {self.draft_vocab_size} exceeds vocab_size {self.vocab_size}; "
                "vocab_size is the target's, so set draft_vocab_size to at most that"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise UserError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of num_key_value_heads "
                f"{self.num_key_value_heads}; correct one of them in config.json"
            )
        if self.head_dim % 2:
            raise UserError(
                f"head_dim {self.head_dim} is odd; rotary embedding needs an even one: correct it in config.json"
            )
        if self.mla is not None:
            self._check_latent(self.mla)
        self._check_eagle1()
        if self.dtype not in DTYPES:
            raise UserError(f"dtype {self.dtype!r} is not one of {', '.join(DTYPES)}; set it in config.json")
        for name in ("rms_norm_eps", "logit_scale"):
            _require_positive(name, getattr(self, name))
        self._check_aux_layer_ids()
        _check_rope(self.rope_parameters)

    def _check_latent(self, mla: LatentSizes) -> None:
        """Refuse what vLLM and SGLang do not compute with latent attention, or compute differently."""
        for flag in ("norm_before_fc", "attention_bias", "mlp_bias", "qk_norm"):
            if getattr(self, flag):
                raise UserError(
                    f"{flag} is true beside latent attention (MLA), where vLLM and SGLang ignore it: train the drafter "
                    "without"
                )
        if self.num_key_value_heads != self.num_attention_heads:
            raise UserError(
                f"num_key_value_heads is {self.num_key_value_heads} beside latent attention (MLA), whose keys come "
                f"from one latent; set it to num_attention_heads, {self.num_attention_heads}, in config.json"
            )
        if self.head_dim != mla.qk_head_dim:
            raise UserError(
                f"head_dim is {self.head_dim} beside qk_nope_head_dim + qk_rope_head_dim = {mla.qk_head_dim}; leave it "
                "out of config.json"
            )
        rope, kind = self.rope_parameters, self.rope_parameters.get("rope_type")
        if kind not in LATENT_ROPES:
            raise UserError(
                f"rope_type {kind!r} beside latent attention (MLA), where vLLM takes every scaling for yarn; use "
                "'default' or 'yarn'"
            )
        if kind == "yarn" and ("mscale" in rope) != ("mscale_all_dim" in rope):
            raise UserError(
                "one of mscale and mscale_all_dim is missing in rope_parameters, and vLLM and transformers fill it in "
                "differently; write both, or neither"
            )
        if strange := sorted(rope.keys() & NOT_LATENT):
            raise UserError(
                f"rope_parameters has {strange[0]} beside latent attention (MLA), where vLLM ignores it; leave it out"
            )

    def _check_eagle1(self) -> None:
        """Refuse EAGLE-3 features in an EAGLE-1 drafter, and the reverse."""
        if not self.eagle1:
            if self.fc_bias:
                raise UserError("fc has a bias, which EAGLE-3 drafters have not: remove fc.bias and bias")
            return
        for flag in ("fc_norm", "norm_output", "norm_before_fc", "norm_before_residual", "qk_norm"):
            if getattr(self, flag):
                raise UserError(f"{flag} is true, and an EAGLE-1 drafter has no such norm: remove it from config.json")
        if self.mla is not None:
            raise UserError("an EAGLE-1 drafter with latent attention (MLA) is not known to any server: use EAGLE-3")
        if self.num_aux_hidden_states != 1 or self.aux_layer_ids is not None:
            raise UserError(
                f"num_aux_hidden_states is {self.num_aux_hidden_states} and auxiliary layer ids {self.aux_layer_ids}, "
                "and an EAGLE-1 drafter reads the target's last state alone: remove both from config.json"
            )
        if self.hidden_size != self.target_hidden_size:
            raise UserError(
                f"hidden_size {self.hidden_size} is not target_hidden_size {self.target_hidden_size}; an EAGLE-1 "
                "drafter uses the target's head and is as wide as its target: correct config.json"
            )
        if self.pruned:
            raise UserError(
                f"draft_vocab_size {self.draft_vocab_size} is below vocab_size {self.vocab_size}; an EAGLE-1 drafter "
                "uses the target's whole head: remove draft_vocab_size"
            )

    def layers_read(self, target: HasLayers) -> tuple[int, ...]:
        """Return the states that are read of a target, as numbers of finished layers, ascending."""
        if self.eagle1:
            return (target.num_hidden_layers,)
        return self.aux_layer_ids or target.default_aux_layer_ids()

    def _check_aux_layer_ids(self) -> None:
        ids = self.aux_layer_ids
        if ids is None:
            return
        if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
            raise UserError(
                f"auxiliary layer ids {list(ids)} must be whole numbers from 0: correct them in config.json"
            )
        if len(ids) != self.num_aux_hidden_states:
            raise UserError(
                f"{len(ids)} auxiliary layer ids {list(ids)} but num_aux_hidden_states is "
                f"{self.num_aux_hidden_states}; make them agree in config.json"
            )
        if list(ids) != sorted(set(ids)):
            raise UserError(
                f"auxiliary layer ids {list(ids)} are not strictly ascending; servers concatenate states in layer "
                "order whatever the list says, so sort the ids, and the columns of fc.weight with them"
            )

    @property
    def family(self) -> str:
        """Name for people; EAGLE-3.1 has both of its flags."""
        if self.eagle1:
            return "EAGLE-1/2"
        if self.fc_norm and self.norm_output:
            return "EAGLE-3.1"
        flags = [name for name in ("fc_norm", "norm_output") if getattr(self, name)]
        return "EAGLE-3" if not flags else f"EAGLE-3 with {flags[0]}"

    @property
    def method(self) -> str:
        return "eagle" if self.eagle1 else "eagle3"

    @property
    def cached(self) -> CachedSizes:
        """Sizes of the KV cache; latent attention caches the latent, as key and as value."""
        if self.mla is not None:
            rank = self.mla.kv_lora_rank
            return CachedSizes(heads=1, key_dim=rank + self.mla.qk_rope_head_dim, value_dim=rank)
        return CachedSizes(heads=self.num_key_value_heads, key_dim=self.head_dim, value_dim=self.head_dim)

    @property
    def rotary_dim(self) -> int:
        return self.head_dim if self.mla is None else self.mla.qk_rope_head_dim

    @property
    def pruned(self) -> bool:
        """Whether the drafter proposes a part of the target's vocabulary only."""
        return self.draft_vocab_size < self.vocab_size


def _require_whole(name: str, value: object) -> None:
    most = _LIMITS.get(name, 2**31 - 1)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise UserError(f"{name} is {value!r}; it must be a whole number from 1 to {most}: correct it in config.json")


def _require_positive(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e38:
        raise UserError(f"{name} is {value!r}; it must be a number above 0 and below 1e38: correct it in config.json")


def _check_rope(rope: Mapping[str, Any]) -> None:
    kind = str(rope.get("rope_type"))
    if kind not in ROPE_KEYS:
        raise UserError(
            f"rope_type {kind!r} is not one of {', '.join(ROPE_KEYS)}; transformers and vLLM compute others "
            "differently, so retrain or re-express the drafter's rope as yarn"
        )
    needed = ROPE_KEYS[kind] | {"rope_theta"}
    missing = needed - rope.keys()
    if missing:
        raise UserError(f"rope_type {kind!r} lacks {', '.join(sorted(missing))}; add it to rope_parameters")
    unknown = rope.keys() - needed - ROPE_OPTIONAL_KEYS.get(kind, frozenset()) - {"rope_type"}
    if unknown:
        raise UserError(
            f"rope_type {kind!r} does not take {', '.join(sorted(unknown))}; known: {', '.join(sorted(needed))}"
        )
    if not isinstance(rope.get("truncate", True), bool):
        raise UserError(f"rope_parameters.truncate is {rope['truncate']!r}; it must be true or false in config.json")
    for name in rope.keys() - {"rope_type", "truncate"}:
        _require_positive(f"rope_parameters.{name}", rope[name])
