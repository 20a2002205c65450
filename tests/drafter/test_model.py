"""The drafter's forward pass equals its equations, for all flags, widths and ropes.

The equations are written out here on plain tensors, with their own rotation and softmax.
"""

import copy
from collections.abc import Mapping
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from transformers import DeepseekV3Config, LlamaConfig, Qwen3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from each import each
from eyas.drafter.checkpoint import checkpoint_of
from eyas.drafter.config import DrafterConfig
from eyas.drafter.model import DepthOutput, Drafter
from eyas.drafter.rope import Rope
from eyas.errors import UserError
from oracle.dense import DenseAttention
from tiny import drafter_config, latent_drafter_config, random_drafter

FLAGS = ("fc_norm", "norm_output", "norm_before_fc", "norm_before_residual")
ROPES: Mapping[str, Mapping[str, object]] = {
    "default": {"rope_type": "default", "rope_theta": 1e4},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128},
}
TOKENS = 7


# --- the contract, written out ---------------------------------------------------------------------------------


class Equations:
    """The forward pass of the contract on a plain dict of weights; keys and values pile up over the calls."""

    def __init__(self, drafter: Drafter) -> None:
        self.w: dict[str, Tensor] = dict(drafter.state_dict())
        self.c = drafter.config
        self.past: dict[int, tuple[Tensor, Tensor]] = {}

    def rms(self, x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(dim=-1, keepdim=True) + self.c.rms_norm_eps).sqrt() * self.w[name + ".weight"]

    def linear(self, x: Tensor, name: str) -> Tensor:
        y = x @ self.w[name + ".weight"].T
        return y + self.w[name + ".bias"] if name + ".bias" in self.w else y

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        half = self.c.head_dim // 2
        out = torch.empty_like(x)
        for i in range(half):
            angle = positions * float(self.c.rope_parameters["rope_theta"]) ** (-i / half)
            cos, sin = angle.cos()[:, None], angle.sin()[:, None]
            out[..., i] = x[..., i] * cos - x[..., i + half] * sin
            out[..., i + half] = x[..., i + half] * cos + x[..., i] * sin
        return out

    def attention(self, x: Tensor, positions: Tensor, layer: int) -> Tensor:
        name, size = f"layers.{layer}.self_attn.", self.c.head_dim
        q, k, v = (self.linear(x, name + f"{p}_proj").reshape(len(x), -1, size) for p in "qkv")
        if self.c.qk_norm:
            q, k = self.rms(q, name + "q_norm"), self.rms(k, name + "k_norm")
        q, k = self.rotate(q, positions), self.rotate(k, positions)
        if layer in self.past:
            k, v = (torch.cat([old, new]) for old, new in zip(self.past[layer], (k, v), strict=True))
        self.past[layer] = (k, v)
        before = len(k) - len(x)
        group = self.c.num_attention_heads // self.c.num_key_value_heads
        rows = []
        for t in range(len(x)):
            heads = []
            for h in range(self.c.num_attention_heads):
                seen_k, seen_v = k[: before + t + 1, h // group], v[: before + t + 1, h // group]
                weights = (seen_k @ q[t, h] / size**0.5).exp()
                heads.append(weights @ seen_v / weights.sum())
            rows.append(torch.cat(heads))
        return self.linear(torch.stack(rows), name + "o_proj")

    def mlp(self, x: Tensor, layer: int) -> Tensor:
        name = f"layers.{layer}.mlp."
        gate = self.linear(x, name + "gate_proj")
        return self.linear(gate / (1 + (-gate).exp()) * self.linear(x, name + "up_proj"), name + "down_proj")

    def fuse(self, x: Tensor) -> Tensor:
        if self.c.norm_before_fc:
            x = self.rms(x, "input_norm")
        states = x.split(self.c.target_hidden_size, dim=-1)
        if self.c.fc_norm:
            states = tuple(self.rms(state, f"fc_norm.{i}") for i, state in enumerate(states))
        return self.linear(torch.cat(states, dim=-1), "fc")

    def depth(self, g: Tensor, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Logits and the next depth's input."""
        e = self.rms(self.w["embed_tokens.weight"][tokens], "layers.0.input_layernorm")
        n = self.rms(g, "layers.0.hidden_norm")
        r = n if self.c.norm_before_residual else g
        r = r + self.attention(torch.cat([e, n], dim=-1), positions, 0)
        p = self.mlp(self.rms(r, "layers.0.post_attention_layernorm"), 0) + r
        for layer in range(1, self.c.num_hidden_layers):
            p = p + self.attention(self.rms(p, f"layers.{layer}.input_layernorm"), positions, layer)
            p = p + self.mlp(self.rms(p, f"layers.{layer}.post_attention_layernorm"), layer)
        y = self.rms(p, "norm")
        return self.linear(y, "lm_head") * self.c.logit_scale, y if self.c.norm_output else p


def inputs(config: DrafterConfig, tokens: int = TOKENS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    width = config.num_aux_hidden_states * config.target_hidden_size
    # Each state at its own scale, so that norming them together or apart makes a difference.
    scales = torch.tensor([1.0, 3.0, 0.3, 2.0, 5.0])[: config.num_aux_hidden_states]
    aux = torch.randn(tokens, width, generator=generator) * scales.repeat_interleave(config.target_hidden_size)
    return aux, torch.randint(config.vocab_size, (tokens,), generator=generator)


def run_ours(drafter: Drafter, depths: int = 3) -> list[tuple[Tensor, Tensor]]:
    """Depth 0 over all slots, then one slot per depth, as decoding does: logits and feedback of each."""
    aux, tokens = inputs(drafter.config)
    hidden, positions = drafter.fuse(aux.to(drafter.fc.weight.dtype)), torch.arange(TOKENS)
    past: list[tuple[Tensor, Tensor]] = []
    results = []
    for _ in range(depths):
        attend = DenseAttention(past)
        output = drafter.step(hidden, tokens, positions, attend)
        past = attend.present
        logits = drafter.logits(output.normed)
        results.append((logits, output.feedback))
        hidden, tokens, positions = output.feedback[-1:], logits[-1:].argmax(-1), positions[-1:] + 1
    return results


def run_equations(drafter: Drafter, depths: int = 3) -> list[tuple[Tensor, Tensor]]:
    equations = Equations(drafter)
    aux, tokens = inputs(drafter.config)
    hidden, positions = equations.fuse(aux), torch.arange(TOKENS)
    results = []
    for _ in range(depths):
        logits, feedback = equations.depth(hidden, tokens, positions)
        results.append((logits, feedback))
        hidden, tokens, positions = feedback[-1:], logits[-1:].argmax(-1), positions[-1:] + 1
    return results


def assert_equal_runs(ours: list[tuple[Tensor, Tensor]], theirs: list[tuple[Tensor, Tensor]]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        assert_close(mine, other, atol=1e-5, rtol=1e-5)


@each("values", list(product([False, True], repeat=4)))
def test_the_forward_pass_equals_the_equations_for_all_flags(values: tuple[bool, ...]) -> None:
    drafter = random_drafter(drafter_config(**dict(zip(FLAGS, values, strict=True))))
    assert_equal_runs(run_ours(drafter), run_equations(drafter))


@each(
    "changes",
    [
        {"num_hidden_layers": 2},
        {"num_hidden_layers": 3, "fc_norm": True, "norm_output": True},
        {"attention_bias": True},
        {"mlp_bias": True},
        {"attention_bias": True, "mlp_bias": True, "num_hidden_layers": 2},
        {"qk_norm": True},
        {"qk_norm": True, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
        {"logit_scale": 0.25},
        {"rms_norm_eps": 0.1},
        {"num_aux_hidden_states": 1, "aux_layer_ids": (2,), "fc_norm": True},
        {"num_aux_hidden_states": 2, "aux_layer_ids": (0, 4), "norm_before_fc": True},
        {"num_aux_hidden_states": 5, "aux_layer_ids": (0, 1, 2, 3, 4), "fc_norm": True},
        {"hidden_size": 32, "head_dim": 16},
        {"hidden_size": 96, "fc_norm": True, "norm_output": True, "norm_before_fc": True},
        {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
        {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 24},
        {"draft_vocab_size": 48},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 37.0}},
    ],
)
def test_the_forward_pass_equals_the_equations_for_all_shapes(changes: dict[str, object]) -> None:
    drafter = random_drafter(drafter_config(**changes))
    ours = run_ours(drafter)
    assert ours[0][0].shape == (TOKENS, drafter.config.draft_vocab_size)
    assert_equal_runs(ours, run_equations(drafter))


def with_flag(drafter: Drafter, flag: str, value: bool) -> Drafter:
    """Return equal weights with another flag; new norms are random."""
    other = random_drafter(replace(drafter.config, **{flag: value}), seed=1)
    other.load_state_dict({k: v for k, v in drafter.state_dict().items() if k in other.state_dict()}, strict=False)
    return other


@each("flag", FLAGS)
@each("others", [False, True])
def test_each_flag_changes_the_result_on_the_same_weights(flag: str, others: bool) -> None:
    off = random_drafter(drafter_config(**dict.fromkeys(FLAGS, others) | {flag: False}))
    on = with_flag(off, flag, True)
    # norm_output shows only from depth 1 on; all others at once.
    depth = 1 if flag == "norm_output" else 0
    before, after = run_ours(off)[depth][0], run_ours(on)[depth][0]
    assert (before - after)[-1].abs().max() > 1e-2


# --- traps -----------------------------------------------------------------------------------------------------


def first_depth(drafter: Drafter) -> DepthOutput:
    aux, tokens = inputs(drafter.config)
    return drafter.step(drafter.fuse(aux), tokens, torch.arange(TOKENS), DenseAttention())


def test_norm_output_changes_the_feedback_and_nothing_else() -> None:
    without = random_drafter(drafter_config())
    plain, fed = first_depth(without), first_depth(with_flag(without, "norm_output", True))
    assert torch.equal(plain.normed, fed.normed)
    assert torch.equal(fed.feedback, fed.normed)
    assert torch.equal(without.norm(plain.feedback), plain.normed)
    assert not torch.allclose(plain.feedback, plain.normed, atol=1e-2)


def test_fc_norm_norms_each_state_by_itself() -> None:
    drafter = random_drafter(drafter_config(fc_norm=True))
    aux, _ = inputs(drafter.config)
    louder = aux.clone()
    louder[:, :64] *= 100  # one state's scale must not reach the others
    assert_close(drafter.fuse(aux), drafter.fuse(louder), atol=1e-3, rtol=1e-3)
    together = with_flag(random_drafter(drafter_config(norm_before_fc=True)), "fc_norm", False)
    assert not torch.allclose(together.fuse(aux), together.fuse(louder), atol=1e-1)


def test_bfloat16_is_close_to_float32() -> None:
    drafter = random_drafter(drafter_config(fc_norm=True, norm_output=True))
    exact = first_depth(drafter)
    cast = copy.deepcopy(drafter).to(torch.bfloat16)
    aux, tokens = inputs(drafter.config)
    rough = cast.step(cast.fuse(aux.bfloat16()), tokens, torch.arange(TOKENS), DenseAttention())
    assert rough.normed.dtype == torch.bfloat16
    distance = (rough.normed.float() - exact.normed).norm() / exact.normed.norm()
    assert 0 < distance < 0.03


# --- attention -------------------------------------------------------------------------------------------------


@each("cuts", [(1,), (3,), (2, 5), (1, 2, 3, 4, 5, 6)])
@each("layers", [1, 2])
def test_passes_in_parts_equal_one_full_pass(cuts: tuple[int, ...], layers: int) -> None:
    drafter = random_drafter(drafter_config(num_hidden_layers=layers))
    aux, tokens = inputs(drafter.config)
    hidden, whole, past = drafter.fuse(aux), first_depth(drafter).normed, []
    parts = []
    for start, end in zip((0, *cuts), (*cuts, TOKENS), strict=True):
        attend = DenseAttention(past)
        parts.append(drafter.step(hidden[start:end], tokens[start:end], torch.arange(start, end), attend).normed)
        past = attend.present
    assert_close(torch.cat(parts), whole, atol=1e-5, rtol=1e-5)


def test_branches_from_one_past_do_not_disturb_each_other() -> None:
    drafter = random_drafter(drafter_config(num_hidden_layers=2))
    aux, tokens = inputs(drafter.config)
    trunk = DenseAttention()
    output = drafter.step(drafter.fuse(aux), tokens, torch.arange(TOKENS), trunk)
    kept = [(k.clone(), v.clone()) for k, v in trunk.present]

    def branch(token: int) -> Tensor:
        attend = DenseAttention(trunk.present)
        return drafter.step(output.feedback[-1:], torch.tensor([token]), torch.tensor([TOKENS]), attend).normed

    alone = branch(3)
    assert not torch.allclose(branch(4), alone, atol=1e-3)
    assert torch.equal(branch(3), alone)
    for before, after in zip(kept, trunk.present, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_slot_does_not_see_later_ones() -> None:
    drafter = random_drafter(drafter_config())
    aux, tokens = inputs(drafter.config)
    changed = tokens.clone()
    changed[-1] = (changed[-1] + 1) % drafter.config.vocab_size
    before, after = (
        drafter.step(drafter.fuse(aux), ids, torch.arange(TOKENS), DenseAttention()).normed for ids in (tokens, changed)
    )
    assert torch.equal(before[:-1], after[:-1])
    assert not torch.allclose(before[-1], after[-1], atol=1e-3)


# --- against transformers --------------------------------------------------------------------------------------


def llama_config(config: DrafterConfig) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        max_position_embeddings=config.max_position_embeddings,
        attention_bias=config.attention_bias,
        mlp_bias=config.mlp_bias,
        rope_parameters=dict(config.rope_parameters),
        attn_implementation="eager",
    )


def assert_later_layer_is(config: DrafterConfig, theirs: nn.Module) -> None:
    """Compare a layer after the first with transformers' layer of equal weights."""
    ours = random_drafter(config).layers[1]
    theirs.eval().load_state_dict(ours.state_dict())
    hidden = torch.randn(1, TOKENS, config.hidden_size, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(300, 300 + TOKENS)
    cos_sin = LlamaRotaryEmbedding(llama_config(config))(hidden, positions[None])
    mask = torch.full((1, 1, TOKENS, TOKENS), float("-inf")).triu(1)
    with torch.no_grad():
        expected = theirs(hidden, attention_mask=mask, position_embeddings=cos_sin)
        attend = DenseAttention()
        attend.present = [(hidden, hidden)]  # layer 0 has had its turn
        actual = ours(hidden[0], *Rope(config)(positions, torch.float32), attend)
    assert_close(actual, expected.reshape(TOKENS, -1), atol=1e-5, rtol=1e-5)


@each("bias", [False, True])
@each("rope", ROPES)
def test_later_layers_are_llamas(rope: str, bias: bool) -> None:
    config = drafter_config(num_hidden_layers=2, rope_parameters=ROPES[rope], attention_bias=bias, mlp_bias=bias)
    assert_later_layer_is(config, LlamaDecoderLayer(llama_config(config), layer_idx=0))


def test_later_layers_with_qk_norm_are_qwen3s() -> None:
    config = drafter_config(num_hidden_layers=2, qk_norm=True)
    shape = Qwen3Config(**{**llama_config(config).to_dict(), "model_type": "qwen3"}, attn_implementation="eager")
    assert_later_layer_is(config, Qwen3DecoderLayer(shape, layer_idx=0))


LATENT_ROPES = {
    "default": {"rope_type": "default", "rope_theta": 1e4},
    "yarn": {"rope_type": "yarn", "rope_theta": 5e4, "factor": 16.0, "original_max_position_embeddings": 64},
    "yarn with scales": {
        "rope_type": "yarn",
        "rope_theta": 5e4,
        "factor": 16.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 16.0,
        "mscale": 0.7,
        "mscale_all_dim": 1.3,
    },
}


@each("q_lora_rank", [16, None])
@each("rope", LATENT_ROPES)
def test_latent_attention_is_deepseeks(rope: str, q_lora_rank: int | None) -> None:
    sizes = {"kv_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10}
    sizes |= {"q_lora_rank": q_lora_rank}
    config = latent_drafter_config(mla=sizes, num_hidden_layers=2, rope_parameters=LATENT_ROPES[rope])
    drafter = random_drafter(config)
    shape = DeepseekV3Config(
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_attention_heads,
        **sizes,
        rope_parameters=dict(config.rope_parameters),
        max_position_embeddings=1024,
        attn_implementation="eager",
    )
    ours, theirs = drafter.layers[1].self_attn, DeepseekV3Attention(shape, layer_idx=0).eval()
    theirs.load_state_dict(ours.state_dict())
    for part in theirs.modules():  # transformers has 1e-6 in its norms, vLLM and SGLang what the config says
        if hasattr(part, "variance_epsilon"):
            part.variance_epsilon = config.rms_norm_eps
    hidden = torch.randn(1, TOKENS, config.hidden_size, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(300, 300 + TOKENS)
    cos_sin = DeepseekV3RotaryEmbedding(shape)(hidden, positions[None])
    mask = torch.full((1, 1, TOKENS, TOKENS), float("-inf")).triu(1)
    with torch.no_grad():
        expected, _ = theirs(hidden, position_embeddings=cos_sin, attention_mask=mask)
        for attend in (DenseAttention(), ExpandingAttention()):
            attend.present = [(hidden, hidden)]  # layer 0 has had its turn
            actual = ours(hidden[0], *drafter.rope(positions, torch.float32), 1, attend)
            assert_close(actual, expected[0], atol=1e-5, rtol=1e-5)
            heads, key_dim = attend.present[1][0].shape[1:]
            assert (heads, key_dim) == ((2, 20) if isinstance(attend, ExpandingAttention) else (1, 32))


class ExpandingAttention(DenseAttention):
    """Takes keys and values of every head."""

    expands_latents = True


def test_remember_returns_the_keys_and_values_of_step_with_latent_attention() -> None:
    drafter = random_drafter(latent_drafter_config())
    aux_TX, token_T = inputs(drafter.config)
    fused_TD, position_T = drafter.fuse(aux_TX), torch.arange(TOKENS)
    for attend, expanded in ((DenseAttention(), False), (ExpandingAttention(), True)):
        drafter.step(fused_TD, token_T, position_T, attend)
        made = drafter.remember(fused_TD, token_T, position_T, expanded=expanded)
        for ours, theirs in zip(made, attend.present[0], strict=True):
            assert_close(ours, theirs)


@each("kind", ROPES)
def test_rope_is_llamas_far_beyond_the_trained_positions(kind: str) -> None:
    config = drafter_config(rope_parameters=ROPES[kind])
    positions = torch.tensor([0, 1, 511, 512, 5_000, 32_768, 99_999, 100_000])
    cos, sin = Rope(config)(positions, torch.float32)
    their_cos, their_sin = LlamaRotaryEmbedding(llama_config(config))(torch.zeros(1), positions[None])
    assert torch.equal(cos[:, 0], their_cos[0])
    assert torch.equal(sin[:, 0], their_sin[0])


def test_rope_kinds_differ_from_each_other() -> None:
    tables = [
        Rope(drafter_config(rope_parameters=rope))(torch.tensor([1000]), torch.float32)[0] for rope in ROPES.values()
    ]
    for i, first in enumerate(tables):
        assert not any(torch.allclose(first, second, atol=1e-2) for second in tables[i + 1 :])


@each("kind", ROPES)
def test_casting_the_drafter_leaves_the_frequencies_alone(kind: str) -> None:
    config = drafter_config(rope_parameters=ROPES[kind])
    exact = Rope(config).inverse_frequencies
    cast = random_drafter(config).to(torch.bfloat16)
    assert cast.fc.weight.dtype == torch.bfloat16  # the cast did happen
    assert cast.rope.inverse_frequencies.dtype == torch.float32
    assert torch.equal(cast.rope.inverse_frequencies, exact)
    assert torch.equal(copy.deepcopy(cast).float().rope.inverse_frequencies, exact)
    assert not torch.equal(exact.bfloat16().float(), exact)


def test_rope_is_real_in_a_drafter_built_without_storage() -> None:
    config = drafter_config(rope_parameters=ROPES["yarn"])
    with torch.device("meta"):
        drafter = Drafter(config)
    assert drafter.fc.weight.is_meta
    assert torch.equal(drafter.rope.inverse_frequencies, Rope(config).inverse_frequencies)
    assert "inverse_frequencies" not in "".join(drafter.state_dict())


# --- sharing with the target -----------------------------------------------------------------------------------


def test_sharing_uses_the_targets_very_tensors() -> None:
    drafter = random_drafter(drafter_config(), own_embedding=False, own_head=False)
    embedding, head = torch.randn(96, 64), torch.randn(96, 64)
    drafter.share_target(embedding, head)
    assert drafter.embed_tokens is not None
    assert drafter.lm_head is not None
    assert drafter.embed_tokens.weight.data_ptr() == embedding.data_ptr()
    assert drafter.lm_head.weight.data_ptr() == head.data_ptr()
    assert not drafter.embed_tokens.weight.requires_grad
    before = drafter.logits(first_depth(drafter).normed)
    head *= 2  # in place: seen at once
    assert_close(drafter.logits(first_depth(drafter).normed), before * 2)


def test_own_tensors_are_not_replaced_by_the_targets() -> None:
    drafter = random_drafter(drafter_config())
    before = drafter.logits(first_depth(drafter).normed)
    drafter.share_target(torch.zeros(96, 64), torch.zeros(96, 64))
    assert torch.equal(drafter.logits(first_depth(drafter).normed), before)


def test_shared_tensors_are_not_saved_and_own_ones_are() -> None:
    shared = random_drafter(drafter_config(), own_embedding=False, own_head=False)
    shared.share_target(torch.randn(96, 64), torch.randn(96, 64))
    own = random_drafter(drafter_config())
    tied = {"embed_tokens.weight", "lm_head.weight"}
    assert not tied & checkpoint_of(shared).tensors.keys()
    assert checkpoint_of(own).tensors.keys() - checkpoint_of(shared).tensors.keys() == tied


def test_a_cast_drafter_is_saved_as_what_it_is() -> None:
    drafter = random_drafter(drafter_config()).to(torch.bfloat16)
    assert checkpoint_of(drafter).config == replace(drafter.config, dtype="bfloat16")


@each(
    ("embedding", "head", "message"),
    [
        ((95, 64), (96, 64), r"embed_tokens and the target's is \[95, 64\], but the drafter needs \[96, 64\]; ship"),
        ((96, 64), (96, 65), r"lm_head and the target's is \[96, 65\], but the drafter needs \[96, 64\]; ship"),
    ],
)
def test_a_target_of_another_shape_is_refused(embedding: tuple[int, int], head: tuple[int, int], message: str) -> None:
    drafter = random_drafter(drafter_config(), own_embedding=False, own_head=False)
    with pytest.raises(UserError, match=message) as caught:
        drafter.share_target(torch.zeros(embedding), torch.zeros(head))
    assert "\n" not in str(caught.value)


def test_a_drafter_without_its_target_says_so() -> None:
    drafter = random_drafter(drafter_config(), own_embedding=False, own_head=False)
    with pytest.raises(UserError, match="no embed_tokens of its own; load it together with its target"):
        first_depth(drafter)
    with pytest.raises(UserError, match="no lm_head of its own; load it together with its target"):
        drafter.logits(torch.zeros(1, 64))


@each("values", product([False, True], repeat=3))
def test_remember_returns_the_keys_and_values_of_step(values: tuple[bool, ...]) -> None:
    flags = dict(zip(("fc_norm", "norm_before_residual", "qk_norm"), values, strict=True))
    drafter = random_drafter(drafter_config(**flags)).eval()
    aux_TX, token_T = inputs(drafter.config)
    fused_TD, position_T, attend = drafter.fuse(aux_TX), torch.arange(TOKENS), DenseAttention()
    drafter.step(fused_TD, token_T, position_T, attend)
    for ours, theirs in zip(drafter.remember(fused_TD, token_T, position_T), attend.present[0], strict=True):
        assert_close(ours, theirs)
