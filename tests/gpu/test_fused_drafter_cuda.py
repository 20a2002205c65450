"""On a GPU the fused pass of a drafter computes what its model does; where it would not, the model runs.

It also runs on a CPU in Triton's interpreter: TRITON_INTERPRET=1, with `--noconftest` against the skip.
"""

import copy
import logging
from math import sqrt
from typing import Any

import pytest
import torch
from torch import Tensor

import tiny
from eyas.drafter.model import Drafter
from eyas.drafter.quantised_linears import linear_names
from eyas.engine.kv_cache.cache import KVCache, PagedAttention
from eyas.engine.runner import fused_drafter as choice
from eyas.engine.runner.draft_passes import DraftPasses
from eyas.engine.runner.drafter import DrafterRunner
from eyas.kernels.attention.metadata import AttentionMetadata
from eyas.kernels.linear.quantised_weight import quantise_float8, quantise_int8
from eyas.kernels.linear.w8a8_linear import W8A8Linear
from eyas.kernels.llama.block import NotLlamaError
from eyas.kernels.llama.trial import ROUNDED_TOLERANCE, TOLERANCE, UNSTABLE

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16  # the interpreter truncates bfloat16
BLOCK_SIZE, ROWS, READS = 4, 3, 3

EAGLE_31 = {"fc_norm": True, "norm_output": True}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
ODD = {"hidden_size": 576, "target_hidden_size": 72, "intermediate_size": 100, "num_attention_heads": 9}
VARIANTS: dict[str, dict[str, Any]] = {
    "eagle 3": {},
    "eagle 3.1": EAGLE_31,
    "fc_norm": {"fc_norm": True},
    "norm_output": {"norm_output": True},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_before_fc": {"norm_before_fc": True},
    "all norms": {**EAGLE_31, "norm_before_fc": True, "norm_before_residual": True},
    "biases": {"attention_bias": True, "mlp_bias": True, **EAGLE_31},
    "yarn and a scale": {"rope_parameters": YARN, "logit_scale": 0.5},
    "9 heads of 80": {"num_key_value_heads": 3, "head_dim": 80, **ODD, **EAGLE_31},
    "9 heads of 64": {"num_key_value_heads": 9, "head_dim": 64, **ODD},
    "layers of Qwen3": {"qk_norm": True, **EAGLE_31},
    "two states, pruned": {"num_aux_hidden_states": 2, "aux_layer_ids": (1, 3), "draft_vocab_size": 40, **EAGLE_31},
}


@pytest.fixture(autouse=True)
def _exact_float32() -> None:
    torch.set_float32_matmul_precision("highest")


def drafter_of(dtype: torch.dtype = torch.float32, **changes: Any) -> Drafter:
    drafter = tiny.random_drafter(tiny.drafter_config(**changes)).eval().requires_grad_(False)
    for name, parameter in drafter.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.uniform_(parameter, -0.5, 0.5)
    return drafter.to(DEVICE, dtype)


def by_kernels(drafter: Drafter, *, few: bool = False) -> DraftPasses:
    from eyas.engine.runner.triton_drafter import TritonDrafter, require_same

    fused = TritonDrafter(drafter)
    made = fused.with_few_rows() if few else fused
    assert made is not None
    require_same(made, drafter)
    return made


def layout(base: list[int], live: list[int], count: int, cache: KVCache) -> AttentionMetadata:
    """Chains of three requests, some of which may be padding."""
    table_RP = torch.tensor([[4, 1, 6], [0, 3, 2], [5, 5, 5]], dtype=torch.int32, device=DEVICE)
    base_R, live_R = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in (base, live))
    return AttentionMetadata.padded(
        table_RP, base_R, live_R, count=count, block_size=BLOCK_SIZE, null_slot=cache.null_slot
    )


@torch.inference_mode()
def drafted(
    drafter: Drafter, run: DraftPasses, *, window: int | None = None, sinks: int = 0, others: list[Tensor] | None = None
) -> list[Tensor]:
    """All numbers of a round as captured passes have it: states from a ring, reading, then three depths.

    Each pass is given the states of a former call, `others`, in place of its own.
    """
    config, generator = drafter.config, torch.Generator().manual_seed(1)
    cache = KVCache(blocks=7, block_size=BLOCK_SIZE)
    made: list[Tensor] = []

    def note(x: Tensor) -> Tensor:
        made.append(x)
        return x if others is None else others[len(made) - 1]

    width = config.num_aux_hidden_states * config.target_hidden_size
    ring_SX = (torch.randn(23, width, generator=generator) * torch.linspace(0.1, 30, 23)[:, None]).to(DEVICE)
    place_N = torch.randint(23, (2 * ROWS * READS,), generator=generator).to(DEVICE)
    token_N = torch.randint(config.vocab_size, (len(place_N),), generator=generator).to(DEVICE)
    hidden_ND = note(run.fuse_rows(ring_SX, place_N))
    count = ROWS * READS
    read = layout([0, 0, 0], [3, 2, 0], READS, cache)
    run.remember_in(cache, read, hidden_ND[:count], token_N[:count])
    hidden_ND, token_N = hidden_ND[count:], token_N[count:]
    for base, live, tokens in (([3, 2, 0], [3, 1, 0], READS), ([6, 3, 0], [1, 1, 0], 1), ([7, 4, 0], [1, 0, 0], 1)):
        metadata = layout(base, live, tokens, cache)
        attend = PagedAttention(cache, metadata, window=window, sinks=sinks)
        output = run.step(hidden_ND, token_N[: ROWS * tokens], metadata.position_N, attend)
        normed_ND, feedback_ND = note(output.normed), note(output.feedback)
        note(run.logits(normed_ND))
        last_R = torch.arange(tokens - 1, ROWS * tokens, tokens, device=DEVICE)
        last = run.step_for(hidden_ND, token_N[: ROWS * tokens], metadata.position_N, attend, last_R)
        note(last.normed)
        note(last.feedback)
        hidden_ND, token_N = feedback_ND[-ROWS:], token_N.flip(0)
    for x_GCK in cache.layers[0]:
        note(x_GCK[:, : cache.null_slot].transpose(0, 1).flatten(1))
    return made


def assert_alike(drafter: Drafter, run: DraftPasses, *, tolerance: float | None = None, **options: int) -> None:
    theirs = drafted(drafter, DraftPasses(drafter), **options)  # type: ignore[arg-type]
    ours = drafted(drafter, run, others=theirs, **options)  # type: ignore[arg-type]
    allowed = sqrt(2) * (tolerance or TOLERANCE[drafter.norm.weight.dtype])
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.shape == other.shape
        assert mine.dtype == other.dtype
        error_N = (mine - other).float().norm(dim=-1) / other.float().norm(dim=-1).clamp(min=1e-30)
        assert error_N.median() <= allowed
        assert error_N.max() <= UNSTABLE * allowed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_kind_of_drafter_drafts_as_its_model(variant: str, dtype: torch.dtype) -> None:
    drafter = drafter_of(dtype, **VARIANTS[variant])
    assert_alike(drafter, by_kernels(drafter))


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize("variant", ["eagle 3", "all norms", "biases"])
def test_a_few_tokens_have_products_of_their_own(variant: str, dtype: torch.dtype) -> None:
    drafter = drafter_of(dtype, **VARIANTS[variant])
    assert_alike(drafter, by_kernels(drafter, few=True))


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("variant", ["eagle 3.1", "biases"])
def test_linears_of_8_bits_are_multiplied_as_they_are(variant: str, kind: str) -> None:
    drafter = drafter_of(HALF, **VARIANTS[variant])
    quantise = quantise_int8 if kind == "int8" else quantise_float8
    for name in linear_names(drafter.config):
        linear = drafter.get_submodule(name)
        assert isinstance(linear, torch.nn.Linear)
        drafter.set_submodule(name, W8A8Linear.of(quantise(linear.weight), linear.bias, HALF))
    run = by_kernels(drafter)
    assert run.phased  # type: ignore[attr-defined]
    assert_alike(drafter, run, tolerance=ROUNDED_TOLERANCE)


@pytest.mark.parametrize(("window", "sinks"), [(3, 0), (3, 2)])
def test_windows_and_sinks_are_kept(window: int, sinks: int) -> None:
    drafter = drafter_of(**EAGLE_31)
    assert_alike(drafter, by_kernels(drafter), window=window, sinks=sinks)


def test_numbers_are_rounded_where_the_model_rounds_them() -> None:
    """Without a product in between, numbers are bitwise equal."""
    from eyas.engine.runner.triton_drafter import TritonDrafter

    drafter = drafter_of(HALF, rope_parameters=YARN, **EAGLE_31)
    eagle = TritonDrafter(drafter)._eagle
    aux_NX = torch.randn(5, 3 * tiny.HIDDEN, device=DEVICE).to(HALF)
    hidden_ND, token_N = aux_NX[:, : tiny.HIDDEN], torch.arange(5, device=DEVICE)
    position_N = torch.tensor([0, 1, 17, 300, 511], device=DEVICE)
    layer = drafter.layers[0]
    assert drafter.fc_norm is not None
    assert drafter.embed_tokens is not None
    with torch.inference_mode():
        both_NE, x_ND, cos_NK, sin_NK = eagle._begin(hidden_ND, token_N, position_N)
        states = zip(drafter.fc_norm, aux_NX.chunk(3, dim=-1), strict=True)
        pairs = [
            (
                eagle._normed_states(aux_NX, None, eagle.states_norm, 3),  # type: ignore[arg-type]
                torch.cat([norm(x_ND) for norm, x_ND in states], dim=-1),
            ),
            (both_NE[:, : tiny.HIDDEN], layer.input_layernorm(drafter.embed_tokens(token_N))),  # type: ignore[operator, union-attr]
            (both_NE[:, tiny.HIDDEN :], layer.hidden_norm(hidden_ND)),  # type: ignore[operator, union-attr]
            (x_ND, hidden_ND),
            *zip((cos_NK, sin_NK), (x[:, 0] for x in drafter.rope(position_N, HALF)), strict=True),
        ]
    for ours, theirs in pairs:
        # A sum in another order may change the rounding of a few numbers.
        assert (ours != theirs).float().mean() < 0.01
        torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=0)


def test_what_it_is_given_stays_as_it_was() -> None:
    drafter = drafter_of(**EAGLE_31)
    run, cache = by_kernels(drafter), KVCache(blocks=7, block_size=BLOCK_SIZE)
    metadata = layout([0, 0, 0], [1, 1, 1], 1, cache)
    hidden_ND, token_N = torch.randn(ROWS, tiny.HIDDEN, device=DEVICE), torch.arange(ROWS, device=DEVICE)
    before = hidden_ND.clone()
    with torch.inference_mode():
        run.step(hidden_ND, token_N, metadata.position_N, PagedAttention(cache, metadata))
    torch.testing.assert_close(hidden_ND, before, rtol=0, atol=0)


def test_the_model_keeps_its_weights_and_works_on() -> None:
    drafter = drafter_of(**EAGLE_31)
    before = copy.deepcopy(drafter)
    run = by_kernels(drafter)
    for (name, ours), (_, theirs) in zip(drafter.state_dict().items(), before.state_dict().items(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, msg=name)
    with torch.no_grad():
        for parameter in drafter.layers.parameters():
            parameter.mul_(0.5)  # in place, so both change
    assert_alike(drafter, run)


@pytest.mark.parametrize("step", ["gate", "rotate", "add_norm"])
def test_a_kernel_that_computes_wrongly_is_found_out(
    step: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from eyas.kernels.llama import eagle_triton

    right = getattr(eagle_triton, step)

    def wrong(*given: Any) -> object:
        made = right(*given)
        (given[-1] if made is None else made).mul_(1.05)
        return made

    monkeypatch.setattr(eagle_triton, step, wrong)
    drafter = drafter_of()
    with pytest.raises(NotLlamaError, match="a trial of one depth gave other"):
        by_kernels(drafter)
    with caplog.at_level(logging.INFO, logger="eyas"):
        assert type(choice._by_kernels(drafter)) is DraftPasses
    assert "the drafter runs by its own code: a trial of one depth" in caplog.text


def test_without_the_products_of_few_tokens_the_other_kernels_stay(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from eyas.kernels.llama import eagle_triton

    right = eagle_triton.few_linear
    monkeypatch.setattr(eagle_triton, "few_linear", lambda *given: right(*given) * 1.05)
    drafter = drafter_of()
    with caplog.at_level(logging.INFO, logger="eyas"):
        assert type(choice._by_kernels(drafter)).__name__ == "TritonDrafter"
    assert "the drafter runs without kernels of its own for few tokens: a trial of one depth" in caplog.text
    assert "by its own code" not in caplog.text


def test_other_drafters_run_by_the_model_itself(caplog: pytest.LogCaptureFixture) -> None:
    deep, mixed, other = drafter_of(num_hidden_layers=2), drafter_of(), drafter_of(torch.float64)
    assert mixed.embed_tokens is not None
    mixed.embed_tokens.bfloat16()
    homeless = tiny.random_drafter(tiny.drafter_config(), own_embedding=False).to(DEVICE)
    for drafter, reason in (
        (deep, "it has 2 layers"),
        (mixed, "its weights are of several types"),
        (other, "its weights are torch.float64"),
        (homeless, "it has no embeddings"),
    ):
        with caplog.at_level(logging.INFO, logger="eyas"):
            assert type(choice._by_kernels(drafter)) is DraftPasses
        assert reason in caplog.text


@pytest.mark.skipif(DEVICE.type != "cuda", reason="only there kernels are chosen")
def test_it_is_chosen_on_cuda() -> None:
    runner = DrafterRunner(drafter_of(torch.bfloat16, **EAGLE_31), KVCache(blocks=1, block_size=BLOCK_SIZE))
    assert type(runner.run).__name__ == "TritonDrafter"
