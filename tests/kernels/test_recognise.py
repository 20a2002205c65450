"""A fused pass computes what the model's own code computes, and other models get none."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from each import each
from engine.test_target_runner import built
from eyas.engine.kv_cache.cache import KVCache
from eyas.engine.runner.fused_target import fused_target, recognised, require_same
from eyas.engine.runner.target import TargetRunner
from eyas.kernels.attention.backend import AttentionBackend, AttentionCall
from eyas.kernels.attention.choose import choose_backend
from eyas.kernels.attention.metadata import AttentionMetadata, AttentionRow
from eyas.kernels.elementwise import Activation
from eyas.kernels.linear.packed_linear import pack_linears
from eyas.kernels.linear.quantised_linear import QuantisedLinear, load_quantised, quantise
from eyas.kernels.linear.w8a8_linear import W8A8Linear, rows_kept
from eyas.kernels.llama import trial
from eyas.kernels.llama.block import FusedLlama, GatedMlp, KVLayers, NotLlamaError, Product, join
from eyas.kernels.llama.experts import PlainExperts, Router
from eyas.kernels.llama.recognise import _one_norm, recognise
from eyas.target.capture import capture
from eyas.target.model import Target, _computes
from eyas.target.quantise import replace_linears

CPU = torch.device("cpu")
LAYERS = 4
BLOCK_SIZE = 4
GEMMA3_LAYERS = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]
ReasonAgainst = Callable[[Target], str]
TREE = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool)
PASSES = (
    [AttentionRow(blocks=(5, 1, 7), base=0, count=6), AttentionRow(blocks=(2, 0), base=0, count=3)],
    [AttentionRow(blocks=(5, 1, 7), base=6, count=3, ancestors=TREE), AttentionRow(blocks=(2, 0), base=3, count=1)],
    [AttentionRow(blocks=(2, 0), base=4, count=4)],
)


DENSE: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral with a window": ("mistral", {"sliding_window": 5}),
    "qwen2": ("qwen2", {}),
    "qwen2 with windows": ("qwen2", {"use_sliding_window": True, "max_window_layers": 2, "sliding_window": 5}),
    "qwen3": ("qwen3", {}),
    "qwen3 with windows": ("qwen3", {"use_sliding_window": True, "max_window_layers": 2, "sliding_window": 5}),
    "phi3": ("phi3", {"num_key_value_heads": 2, "sliding_window": None}),
    "phi3 partly rotated": ("phi3", {"partial_rotary_factor": 0.5, "sliding_window": 5}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {"sliding_window": 5, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 20}),
    "gemma3": ("gemma3_text", {"sliding_window": 5, "query_pre_attn_scalar": 20, "layer_types": GEMMA3_LAYERS}),
}
WITH_EXPERTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {"num_local_experts": 5, "sliding_window": None}),
    "qwen3 experts": ("qwen3_moe", {"num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": True}),
    "qwen3 experts here and there": (
        "qwen3_moe",
        {"num_experts": 6, "norm_topk_prob": False, "mlp_only_layers": [2], "decoder_sparse_step": 2},
    ),
}
GPT_OSS = {"num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 5, "max_position_embeddings": 512}
WITH_EXPERTS["gpt-oss"] = ("gpt_oss", GPT_OSS)
BLOCKS = DENSE | WITH_EXPERTS
"""Blocks with different parts: a model family and its configuration."""


def plain(block: str = "llama", **changes: Any) -> Target:
    family, configured = BLOCKS[block]
    return built(family, **{**configured, **changes})


def sizes_of_panels(block: str) -> dict[str, int]:
    """Sizes that fill panels and vectors of every CPU: otherwise linears cannot be joined and remainders round
    differently.
    """
    return {"hidden_size": 64, "intermediate_size": 64} | ({} if block.startswith("phi3") else {"head_dim": 32})


def in_bfloat16(block: str) -> Target:
    target = plain(block)
    target.model.to(torch.bfloat16)
    return target


def lean_of(target: Target) -> FusedLlama:
    lean = fused_target(target)
    assert lean is not None
    return lean


@pytest.fixture
def reason_against(caplog: pytest.LogCaptureFixture) -> ReasonAgainst:
    caplog.set_level(logging.INFO, logger="eyas")

    def reason(target: Target) -> str:
        caplog.clear()
        assert fused_target(target) is None
        (record,) = caplog.records
        return record.getMessage()

    return reason


def zeros(fused: FusedLlama, *, blocks: int = 8, block_size: int = BLOCK_SIZE) -> KVLayers:
    shape = fused.sizes.key_heads, blocks * block_size, fused.sizes.head_dim
    like = fused.embedding_VD
    return {layer: (like.new_zeros(shape), like.new_zeros(shape)) for layer in range(len(fused.blocks))}


@torch.inference_mode()
def assert_same_pass(target: Target, lean: FusedLlama, aux_layer_ids: Sequence[int] = (1, 3), **close: float) -> None:
    own, kv = TargetRunner(target, KVCache(blocks=8, block_size=BLOCK_SIZE)), zeros(lean)
    generator = torch.Generator().manual_seed(4)
    for rows in PASSES:
        layout = AttentionMetadata.of(rows, block_size=BLOCK_SIZE, device=CPU)
        ids_N = torch.randint(80, layout.slot_mapping_N.shape, generator=generator)
        keep_M = torch.arange(len(ids_N)).flip(0)[::2]
        with capture(target.model, aux_layer_ids) as captured:
            theirs = own.forward(ids_N, layout, keep_M)
        ours, aux = lean.forward(ids_N, choose_backend(layout), kv, keep_M, aux_layer_ids)
        tolerances = close or {"rtol": 1e-4, "atol": 2e-4}
        torch.testing.assert_close(ours, theirs, **tolerances)
        torch.testing.assert_close(aux, captured.aux_hidden()[0], **tolerances)


@each("tied", [False, True])
@each("block", BLOCKS)
def test_a_fused_pass_equals_the_models_own(block: str, tied: bool) -> None:
    target = plain(block, tie_word_embeddings=tied)
    assert_same_pass(target, lean_of(target), range(LAYERS + 1))


def test_parts_of_blocks_are_recognised() -> None:
    windows = [block.window for block in recognised(plain("qwen2 with windows")).blocks]
    assert windows == [None, None, 5, 5]
    gemma = recognised(plain("gemma3"))
    assert [block.window for block in gemma.blocks] == [5, None, 5, 5]
    assert [block.rotation for block in gemma.blocks] == [0, 1, 0, 0]
    assert gemma.blocks[0].scale == 20**-0.5
    assert gated(gemma, 0).activation is Activation.GELU_TANH
    assert gemma.embedding_scale is not None
    phi = recognised(plain("phi3 partly rotated"))
    assert (phi.sizes.head_dim, phi.sizes.rotary_dim) == (8, 4)
    gemma2 = recognised(plain("gemma2"))
    assert (gemma2.blocks[0].softcap, gemma2.logit_softcap) == (2.0, 3.0)


@each("wrong", [{"window": None}, {"rotation": 1}, {"activation": Activation.SILU}, {"scale": 0.2}])
def test_a_layer_with_a_wrong_setting_is_rejected(wrong: dict[str, Any]) -> None:
    target = plain("gemma3")
    with pytest.raises(NotLlamaError, match="after 1 layers"):
        require_same(with_block(recognised(target), 0, **wrong), target)


@each("block", WITH_EXPERTS)
def test_wrong_experts_are_rejected(block: str) -> None:
    target = plain(block)
    lean = recognised(target)
    layer, experts = next((i, x.mlp) for i, x in enumerate(lean.blocks) if isinstance(x.mlp, PlainExperts))
    router = experts.router
    assert isinstance(router, Router)

    def tried(**changes: Any) -> None:
        blocks = list(lean.blocks)
        blocks[layer] = replace(blocks[layer], mlp=replace(experts, **changes))
        require_same(replace(lean, blocks=blocks), target)

    tried()
    with pytest.raises(NotLlamaError, match=f"its routers gave other routes after {layer + 1} layers"):
        tried(router=replace(router, renormalises=not router.renormalises))
    with pytest.raises(NotLlamaError, match=f"its routers gave other routes after {layer + 1} layers"):
        tried(router=replace(router, weight_ED=router.weight_ED.flip(0)))
    with pytest.raises(NotLlamaError, match=f"each layer alone gave other states after {layer + 1} layers"):
        tried(down_EDI=experts.down_EDI.flip(0))
    with pytest.raises(NotLlamaError, match=f"each layer alone gave other states after {layer + 1} layers"):
        tried(gating=Activation.GELU_TANH)


@each(
    "changes",
    [
        {"attention_bias": True, "mlp_bias": True},
        {"num_key_value_heads": 4},
        {"num_key_value_heads": 1, "head_dim": 16},
        {"rms_norm_eps": 0.5},
    ],
)
def test_shapes_biases_and_epsilons_of_llama_are_followed(changes: dict[str, Any]) -> None:
    target = plain(**changes)
    assert_same_pass(target, lean_of(target))


@each(
    "rope",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "dynamic", "factor": 4.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    ],
)
def test_rotations_are_the_models_own(rope: dict[str, Any]) -> None:
    target = plain(rope_parameters={"rope_theta": 100.0, **rope}, max_position_embeddings=64)
    assert_same_pass(target, lean_of(target))


@pytest.mark.parametrize("block", ["qwen3", "gemma3"])
def test_half_precision_rounds_where_the_model_does(block: str) -> None:
    if not _computes(torch.bfloat16, CPU):
        pytest.skip("this processor computes bfloat16 slowly")
    target = plain(block)
    target = replace(target, model=target.model.bfloat16())
    assert_same_pass(target, lean_of(target), rtol=2e-2, atol=2e-2)


@each("dtype", [torch.float32, torch.bfloat16])
@each("block", ["llama", "gemma3"])
def test_norms_round_where_the_model_does(block: str, dtype: torch.dtype) -> None:
    target = plain(block)
    norm: Any = target.model.model.norm.to(dtype)
    x = (torch.randn(6, 32, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    ours, theirs = _one_norm(norm, dtype)(x), norm(x)
    if dtype == torch.float32:
        torch.testing.assert_close(ours, theirs)
    else:
        assert torch.equal(ours, theirs)


def test_states_of_every_depth_are_those_that_are_captured() -> None:
    target = plain()
    lean = lean_of(target)
    assert_same_pass(target, lean, (0, LAYERS))
    assert_same_pass(target, lean, (LAYERS,))


def test_logits_are_made_for_the_tokens_asked_for() -> None:
    lean = lean_of(plain())
    layout = AttentionMetadata.of(PASSES[0], block_size=BLOCK_SIZE, device=CPU)
    ids_N = torch.arange(len(layout.slot_mapping_N))

    def run(keep_M: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return lean.forward(ids_N, choose_backend(layout), zeros(lean), keep_M)

    everything, aux = run(None)
    assert everything.shape == (9, 80)
    assert aux is None
    assert run(torch.tensor([], dtype=torch.int64))[0].shape == (0, 80)
    torch.testing.assert_close(run(torch.tensor([7, 2]))[0], everything[[7, 2]])


def test_joined_weights_replace_their_parts() -> None:
    target = plain("qwen2", tie_word_embeddings=True)
    model: Any = target.model
    before = {name: x.clone() for name, x in model.state_dict().items()}
    first, second = lean_of(target), lean_of(target)
    for name, x in model.state_dict().items():
        assert torch.equal(x, before[name]), name
    attention = model.model.layers[1].self_attn
    storages = {getattr(attention, name).weight.untyped_storage().data_ptr() for name in ("q_proj", "k_proj", "v_proj")}
    assert len(storages) == 1
    for lean in (first, second):
        qkv: Any = lean.blocks[1].qkv
        assert qkv.weight_ED.data_ptr() == attention.q_proj.weight.data_ptr()
        assert qkv.bias_E.data_ptr() == attention.q_proj.bias.data_ptr()
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


def test_packed_linears_are_joined_in_place() -> None:
    target = plain(hidden_size=64, head_dim=32, intermediate_size=96)
    model: Any = target.model
    if not pack_linears(model).linears:
        pytest.skip("there is no compiler")
    lean = lean_of(target)
    assert_same_pass(target, lean)
    qkv: Any = lean.blocks[1].qkv
    assert qkv.linear.panels_PKC.data_ptr() == model.model.layers[1].self_attn.q_proj.panels_PKC.data_ptr()


@torch.no_grad()
def amplifying(left: float) -> Target:
    """A model in which a quarter of the tokens lose most of one number and then grow a hundredfold by the rest.

    Only one gate of the first two layers is open, equally for all tokens, so that everything else stays the same.
    """
    target = plain(mlp_bias=True)
    model: Any = target.model.model
    embedding = model.embed_tokens.weight
    embedding[:, 0] = 0
    embedding.copy_(nn.functional.normalize(embedding))
    embedding[:20, 0] = 1
    for layer, squares, goes_to, by in zip(model.layers, (2, 1), (0, 1), (left - 1, 100 / left), strict=False):
        layer.self_attn.o_proj.weight.zero_()
        layer.post_attention_layernorm.weight.fill_(1)
        for part in layer.mlp.parameters():
            part.zero_()
        layer.mlp.gate_proj.bias[0] = 9.0
        layer.mlp.up_proj.weight[0, 0] = 1.0
        root = (squares / 32 + layer.post_attention_layernorm.variance_epsilon) ** 0.5
        layer.mlp.down_proj.weight[goes_to, 0] = by * root / nn.functional.silu(torch.tensor(9.0))
    return target


def wrong_at(product: Product, factor: float, only: Callable[[int], slice] = slice) -> Product:
    """A product with some wrong rows."""

    def product_(x_ND: Tensor, out_NE: Tensor | None = None) -> Tensor:
        made_NE = product(x_ND, out_NE)
        made_NE[only(len(x_ND))] *= factor
        return made_NE

    return product_


def first_of_two(count: int) -> slice:
    return slice(1 if count == 2 else 0)


def gated(lean: FusedLlama, number: int) -> GatedMlp:
    mlp = lean.blocks[number].mlp
    assert isinstance(mlp, GatedMlp)
    return mlp


def with_block(lean: FusedLlama, number: int, **parts: Any) -> FusedLlama:
    blocks = list(lean.blocks)
    of_mlp = {name: parts.pop(name) for name in list(parts) if name in {part.name for part in fields(GatedMlp)}}
    mlp = replace(blocks[number].mlp, **of_mlp)
    blocks[number] = replace(blocks[number], **{"mlp": mlp, **parts})
    return replace(lean, blocks=blocks)


def test_amplified_rounding_is_accepted() -> None:
    target = amplifying(left=1e-4)
    lean = recognised(target)
    rounded = with_block(lean, 0, down=wrong_at(gated(lean, 0).down, 1 + 1e-6))
    layout = AttentionMetadata.of(PASSES[0], block_size=BLOCK_SIZE, device=CPU)
    ids_N = torch.arange(len(layout.slot_mapping_N))
    aux = [one.forward(ids_N, choose_backend(layout), zeros(one), None, (1, 2))[1] for one in (rounded, lean)]
    (before, behind), (their_before, theirs) = (x.chunk(2, dim=-1) for x in aux if x is not None)
    assert (theirs.norm(dim=-1) > 80 * their_before.norm(dim=-1)).all()
    assert ((before - their_before).norm(dim=-1) < 1e-5 * their_before.norm(dim=-1)).all()
    assert ((behind - theirs).norm(dim=-1) > 5e-3 * theirs.norm(dim=-1)).all()
    require_same(rounded, target)


@each("factor", [1.01, float("nan")])
@each("layer", range(LAYERS))
def test_one_wrong_token_of_one_layer_is_rejected(layer: int, factor: float) -> None:
    target = plain()
    lean = recognised(target)
    wrong = with_block(lean, layer, down=wrong_at(gated(lean, layer).down, factor, first_of_two))
    with pytest.raises(NotLlamaError, match=f"each layer alone gave other states after {layer + 1} layers"):
        require_same(wrong, target)


class OffInHalfPrecision(nn.Module):
    """A linear that is wrong in the first of two rows, in half precision only, as rounding could make it."""

    def __init__(self, linear: nn.Linear, *, runs_in_float32: bool = True) -> None:
        super().__init__()
        self.linear, self.runs_in_float32 = linear, runs_in_float32

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float32 and not self.runs_in_float32:
            raise RuntimeError("no such kernel")
        made: Tensor = self.linear(x)
        if made.dtype != torch.float32:
            made[:, first_of_two(made.shape[1])] *= 3.0
        return made


def test_a_token_may_be_off_where_the_models_own_is_further_from_float32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = in_bfloat16("qwen2")
    lean = recognised(target)
    mlp = target.model.model.layers[-1].mlp
    mlp.down_proj = OffInHalfPrecision(mlp.down_proj)
    require_same(lean, target)
    wrong = with_block(lean, LAYERS - 1, down=wrong_at(gated(lean, LAYERS - 1).down, 30.0, first_of_two))
    with pytest.raises(NotLlamaError, match=f"each layer alone gave other states after {LAYERS} layers.*for one"):
        require_same(wrong, target)
    for bound in ("NO_WORSE", "NO_WORSE_AT_WORST"):
        with monkeypatch.context() as changed:
            changed.setattr(trial, bound, 0.0)
            with pytest.raises(NotLlamaError, match=r"for one.*their distance from float32"):
                require_same(lean, target)


def test_distances_from_float32_are_judged_over_all_tokens() -> None:
    """Which token rounding hits is chance: ours may be off where the model's own is not, and vice versa."""
    errors, precise = trial.Errors(), torch.eye(8)
    theirs, ours = precise.clone(), precise.clone()
    theirs[0] *= 1.5
    ours[1] *= 1.4
    errors.add("states", 1, ours, theirs, precise=precise)
    errors.judge("each layer alone", lambda _: 0.01, single=7.0)
    ours[1] *= 2
    errors.add("states", 1, ours, theirs, precise=precise)
    with pytest.raises(trial.SingleTokensError, match="that of its own code"):
        errors.judge("each layer alone", lambda _: 0.01, single=7.0)


def test_a_layer_that_fails_in_float32_is_rejected_without_a_crash() -> None:
    target = in_bfloat16("qwen2")
    lean = recognised(target)
    mlp = target.model.model.layers[-1].mlp
    mlp.down_proj = OffInHalfPrecision(mlp.down_proj, runs_in_float32=False)
    with pytest.raises(NotLlamaError, match="for one"):
        require_same(lean, target)


def test_one_wrong_token_in_half_precision_is_rejected() -> None:
    target = in_bfloat16("qwen2")
    lean = recognised(target)
    require_same(lean, target)
    wrong = with_block(lean, 1, down=wrong_at(gated(lean, 1).down, 3.0, first_of_two))
    with pytest.raises(NotLlamaError, match=r"each layer alone gave other states after 2 layers.*for one"):
        require_same(wrong, target)


def test_one_wrong_token_of_the_head_is_rejected() -> None:
    target = plain()
    lean = recognised(target)
    with pytest.raises(NotLlamaError, match="each layer alone gave other logits"):
        require_same(replace(lean, head=wrong_at(lean.head, 1.01, lambda count: slice(count - 1, count))), target)


def test_a_wrong_layer_is_not_hidden_by_fp8_rounding() -> None:
    """After layers that round rows to 8 bits, an error of 2 % in one layer is invisible."""
    target = plain()
    replace_linears(target.model, "fp8")
    lean = recognised(target)
    assert lean.rounds_rows
    require_same(lean, target)
    wrong = with_block(lean, 1, down=wrong_at(gated(lean, 1).down, 1.02))
    with pytest.raises(NotLlamaError, match="each layer alone gave other states after 2 layers"):
        require_same(wrong, target)
    with rows_kept():
        assert not W8A8Linear.rounds_rows
    assert W8A8Linear.rounds_rows


def nothing(x_ND: Tensor, out_NE: Tensor | None = None) -> Tensor:
    return torch.zeros(len(x_ND), 32)


@each("wrongly", ["in another order", "without one", "over one cache"])
def test_right_layers_in_a_wrong_sequence_are_rejected(wrongly: str) -> None:
    class Wrong(FusedLlama):
        def forward(
            self, ids_N: Tensor, attention: AttentionBackend, kv: KVLayers, *asked: Any
        ) -> tuple[Tensor, Tensor | None]:
            lean: FusedLlama = self
            if len(self.blocks) == LAYERS and wrongly == "in another order":
                lean = replace(self, blocks=[self.blocks[layer] for layer in (0, 2, 1, 3)])
            elif len(self.blocks) == LAYERS and wrongly == "without one":
                lean = with_block(self, 1, output=nothing, down=nothing)
            elif wrongly == "over one cache":
                kv = dict.fromkeys(kv, kv[0]) if kv else kv
            return FusedLlama.forward(lean, ids_N, attention, kv, *asked)

    target = plain()
    lean = recognised(target)
    wrong = Wrong(**{part.name: getattr(lean, part.name) for part in fields(lean)})
    with pytest.raises(NotLlamaError, match="all layers gave other states"):
        require_same(wrong, target)


def test_compiled_products_among_half_precision_weights_are_rejected(reason_against: ReasonAgainst) -> None:
    """They read and write float32; a half-precision pass would make them write past its memory."""
    kernel, words = load_quantised()
    if kernel is None:
        pytest.skip(words)
    target = plain()
    model: Any = target.model.bfloat16()
    for layer in model.model.layers:
        layer.mlp.down_proj = QuantisedLinear.of(kernel, quantise(layer.mlp.down_proj.weight, 8))
    assert "read and write float32" in reason_against(target)
    with pytest.raises(TypeError, match=r"not torch\.bfloat16"):
        model.model.layers[0].mlp.down_proj.product(torch.zeros(1, 1, dtype=torch.bfloat16))


def test_linears_that_are_not_alike_are_not_joined() -> None:
    assert join([nn.Linear(3, 2), nn.Linear(3, 2, bias=False)]) is None
    assert join([nn.Linear(3, 2), nn.Bilinear(3, 3, 2)]) is None


@each(
    ("family", "changes", "reason"),
    [
        ("qwen2_moe", {}, "does not consist of"),
        ("phimoe", {}, "does not consist of"),
        ("phi", {}, "does not consist of"),
        ("gpt2", {}, "does not consist of"),
        ("olmo2", {}, "does not consist of"),
        ("llama", {"hidden_act": "gelu"}, "activation"),
        ("granite", {"residual_multiplier": 0.9}, "after 1 layers"),
        ("granite", {"embedding_multiplier": 1.1}, "after 0 layers"),
        ("granite", {"logits_scaling": 1.1}, "logits"),
        ("cohere", {}, "does not consist of"),
        ("smollm3", {"no_rope_layer_interval": 2, "pad_token_id": 0}, "after 2 layers"),
    ],
)
def test_other_models_are_refused_with_a_reason(
    reason_against: ReasonAgainst, family: str, changes: dict[str, Any], reason: str
) -> None:
    assert reason in reason_against(built(family, **changes))


def test_model_code_that_does_more_than_its_parts_is_rejected(reason_against: ReasonAgainst) -> None:
    target = plain()
    layer: Any = target.model.model.layers[2]
    own_forward = layer.forward
    layer.forward = MethodType(lambda self, *args, **kwargs: own_forward(*args, **kwargs) + 0.01, layer)
    assert "states after 3 layers" in reason_against(target)


def test_model_code_that_changes_far_positions_is_rejected(reason_against: ReasonAgainst) -> None:
    target = plain(max_position_embeddings=4096)
    layer: Any = target.model.model.layers[0]
    own_forward = layer.forward

    def forward(self: nn.Module, hidden_states: Tensor, *, position_ids: Tensor, **kwargs: Any) -> Tensor:
        output: Tensor = own_forward(hidden_states, position_ids=position_ids, **kwargs)
        return output * torch.where(position_ids > 2048, 1.1, 1.0)[..., None]

    layer.forward = MethodType(forward, layer)
    assert "states after 1 layers" in reason_against(target)


@each(
    ("route", "reason"),
    [
        (lambda self, x, *, ids: x, "cannot be called with rows alone"),
        (lambda self, x: x, "cannot be called with rows alone"),
        (lambda self, x: (x[:, :2].long(), x[:, :2].long(), x[:, :2]), "does not return scores, weights and experts"),
    ],
)
def test_routers_with_another_signature_are_refused(route: Any, reason: str) -> None:
    target = plain("mixtral")
    calls = calls_of(target)
    router: Any = target.model.model.layers[1].mlp.gate
    router.forward = MethodType(route, router)
    with pytest.raises(NotLlamaError, match=f"MixtralTopKRouter {reason}"):
        recognise(target.model, calls)


def calls_of(target: Target) -> list[AttentionCall]:
    return TargetRunner(target, KVCache(blocks=1, block_size=BLOCK_SIZE)).calls


def test_an_odd_rotary_dim_is_refused() -> None:
    target = plain()
    calls = calls_of(target)
    rotary: Any = target.model.model.rotary_emb
    rotary.inv_freq = torch.ones(5)
    with pytest.raises(NotLlamaError, match="rotates 10 of 8"):
        recognise(target.model, calls)


def test_another_norm_is_refused() -> None:
    class Doubling(nn.Module):
        def __init__(self, norm: Any) -> None:
            super().__init__()
            self.weight, self.eps = norm.weight, norm.variance_epsilon

        def forward(self, x: Tensor) -> Tensor:
            return 2 * nn.functional.rms_norm(x, self.weight.shape, self.weight, self.eps)

    target = plain()
    model: Any = target.model
    model.model.norm = Doubling(model.model.norm)
    with pytest.raises(NotLlamaError, match="Doubling is not an RMSNorm"):
        recognised(target)


def test_embeddings_that_do_more_than_scale_are_refused() -> None:
    class Shifted(nn.Embedding):
        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids) + 1

    target = plain()
    model: Any = target.model
    model.model.embed_tokens = Shifted(80, 32).requires_grad_(False)
    with pytest.raises(NotLlamaError, match="embeddings are Shifted"):
        recognised(target)


def test_weights_of_several_types_and_foreign_linears_are_refused(reason_against: ReasonAgainst) -> None:
    target = plain()
    calls = calls_of(target)
    mixed: Any = target.model
    mixed.model.norm.double()
    with pytest.raises(NotLlamaError, match="several types"):
        recognise(mixed, calls)

    class Quantised(nn.Linear):
        pass

    target = plain()
    foreign: Any = target.model
    foreign.model.layers[0].mlp.down_proj = Quantised(48, 32, bias=False).requires_grad_(False)
    assert "Quantised" in reason_against(target)
