"""On a GPU experts stay in MXFP4 and equal their dequantised weights; rows do not depend on each other.

It also runs on a CPU in Triton's interpreter: TRITON_INTERPRET=1, with `--noconftest` against the skip.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tiny
from engine.common import OFF, at_depth, options, request
from eyas.engine.config import weight_bytes
from eyas.engine.engine import Engine
from eyas.engine.runner.fused_target import fused_target
from eyas.kernels.elementwise import Activation
from eyas.kernels.linear.mxfp4_weight import Mxfp4Weight, dequantised_mxfp4
from eyas.kernels.llama.experts import ClampedSwiglu, PlainExperts, Router, Routes
from eyas.kernels.llama.mxfp4_experts import FourBitExperts, Mxfp4Experts
from eyas.loading import load_target
from mxfp4_checkpoint import random_mxfp4, write_mxfp4
from target.test_mxfp4 import transformers_own

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16  # the interpreter cannot multiply bfloat16
CLOSE = {"rtol": 0.02, "atol": 0.03}
TILES = [0, 8, 16, 32]


def drawn(*shape: int, seed: int, dtype: torch.dtype = HALF) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def published(*shape: int, seed: int, exponents: tuple[int, int] = (121, 125)) -> tuple[Tensor, Tensor]:
    pairs, scales = random_mxfp4(*shape, generator=torch.Generator().manual_seed(seed), exponents=exponents)
    return pairs.to(DEVICE), scales.to(DEVICE)


def made(
    *, count: int, top_k: int, hidden: int, inner: int, odd: bool = True, dtype: torch.dtype = HALF
) -> tuple[FourBitExperts, PlainExperts]:
    """Random experts, packed and dequantised; odd numbers have the layout of gpt-oss."""
    router = Router(
        weight_ED=drawn(count, hidden, seed=1, dtype=dtype) / hidden**0.5,
        bias_E=None,
        top_k=top_k,
        renormalises=True,
        dtype=dtype,
        module=nn.Identity(),
    )
    gate_up, down = published(count, 2 * inner, hidden, seed=3), published(count, hidden, inner, seed=5)
    common: dict[str, Any] = {
        "router": router,
        "interleaved": odd,
        "gating": ClampedSwiglu(1.702, 7.0) if odd else Activation.SILU,
        "gate_up_bias_EG": drawn(count, 2 * inner, seed=4, dtype=dtype) if odd else None,
        "down_bias_ED": drawn(count, hidden, seed=6, dtype=dtype) if odd else None,
    }
    return (
        FourBitExperts(**common, gate_up=Mxfp4Weight.of(*gate_up), down=Mxfp4Weight.of(*down)),
        PlainExperts(
            **common, gate_up_EGD=dequantised_mxfp4(*gate_up, dtype), down_EDI=dequantised_mxfp4(*down, dtype)
        ),
    )


def by_kernels(experts: FourBitExperts, x_ND: Tensor, *, rows: int | None = None) -> Tensor:
    """Output of the kernels, with blocks of so many pairs."""
    from eyas.kernels.llama.experts_triton import mixture, mxfp4_tiling

    tilings: dict[str, Any] = {}
    if rows is not None:
        gate, down = (replace(mxfp4_tiling(1, 1, gates=gates), rows=rows) for gates in (True, False))
        tilings = {"gate_tiling": gate, "down_tiling": down}
    return mixture(experts, x_ND, experts.router(x_ND), **tilings)


SHAPES = [
    {"count": 5, "top_k": 2, "hidden": 96, "inner": 160},
    {"count": 3, "top_k": 3, "hidden": 32, "inner": 32},
    {"count": 40, "top_k": 4, "hidden": 128, "inner": 64},
]


@pytest.mark.parametrize("odd", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_mixture_is_that_of_dequantised_weights(shape: dict[str, int], odd: bool) -> None:
    packed, plain = made(odd=odd, **shape)
    for tokens in (1, 3, 21):
        x_ND = drawn(tokens, shape["hidden"], seed=7)
        expected = plain(x_ND)
        size = expected.float().abs().max().item()
        torch.testing.assert_close(by_kernels(packed, x_ND) / size, expected / size, **CLOSE)
        torch.testing.assert_close(packed(x_ND), expected, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [HALF, torch.float16], ids=str)
@pytest.mark.parametrize("inputs", [32, 96, 160])
def test_every_weight_is_unpacked_exactly(inputs: int, dtype: torch.dtype) -> None:
    """A one-hot row selects a column of weights: all 16 values, at each of the four places of a word."""
    from eyas.kernels.llama.experts_triton import _multiply, mxfp4_tiling

    stored = published(2, 48, inputs, seed=2, exponents=(115, 136))
    weight, dense_EOK = Mxfp4Weight.of(*stored), dequantised_mxfp4(*stored, dtype)
    one_KK = torch.eye(inputs, dtype=dtype, device=DEVICE)
    for expert in (0, 1):
        expert_B = torch.full((inputs,), expert, dtype=torch.int32, device=DEVICE)
        tiling = mxfp4_tiling(1, 2, gates=False)
        found = _multiply(one_KK, weight, None, expert_B, None, inputs, tiling)
        assert torch.equal(found.t(), dense_EOK[expert])


def test_a_token_gets_the_same_numbers_in_every_company_and_in_tiles_of_any_size() -> None:
    tokens, hidden, inner = (33, 2880, 1440) if DEVICE.type == "cuda" else (9, 32, 32)
    packed, _ = made(count=5, top_k=2, hidden=hidden, inner=inner)
    x_ND = drawn(tokens, hidden, seed=7)
    together = by_kernels(packed, x_ND, rows=0)
    order_N = torch.randperm(tokens, generator=torch.Generator().manual_seed(8)).to(DEVICE)
    for rows in TILES:
        assert torch.equal(by_kernels(packed, x_ND, rows=rows), together)
        assert torch.equal(by_kernels(packed, x_ND[order_N], rows=rows), together[order_N])
        for some in ([5], [8, 0, 3]):
            assert torch.equal(by_kernels(packed, x_ND[some], rows=rows), together[some])
    for few in (1, 2, 7, tokens):
        assert torch.equal(by_kernels(packed, x_ND[:few]), together[:few]), "tiles as they are chosen"


@pytest.mark.skipif(DEVICE.type != "cuda", reason="only there passes are captured")
@pytest.mark.parametrize("tokens", [1, 8, 64])
def test_a_captured_mixture_of_real_sizes_follows_other_routes(tokens: int) -> None:
    packed, plain = made(count=32, top_k=4, hidden=2880, inner=2880)
    x_ND = drawn(tokens, 2880, seed=7) / 50
    by_kernels(packed, x_ND)
    torch.cuda.synchronize()
    from eyas.kernels.llama.experts_triton import mixture

    routes = packed.router(x_ND)
    routes = Routes(routes.expert_NK.int(), routes.weight_NK)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = mixture(packed, x_ND, routes)
    for seed in (10, 11):
        x_ND.copy_(drawn(tokens, 2880, seed=seed) / 50)
        chosen = packed.router(x_ND)
        routes.expert_NK.copy_(chosen.expert_NK)
        routes.weight_NK.copy_(chosen.weight_NK)
        graph.replay()
        expected = plain(x_ND)
        size = expected.float().abs().max().item()
        torch.testing.assert_close(captured / size, expected / size, **CLOSE)
        assert torch.equal(captured[:1], by_kernels(packed, x_ND[:1])), "a row alone"


def near(ours: Sequence[list[int]], theirs: Sequence[list[int]]) -> int:
    return sum(a == b for a, b in zip(ours, theirs, strict=True))


@pytest.mark.skipif(DEVICE.type != "cuda", reason="only there experts stay packed")
@pytest.mark.parametrize("graphs", [True, False], ids=["captured", "uncaptured"])
def test_engines_serve_a_published_checkpoint(graphs: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Up to near-ties: attention, the head and torch round differently with other numbers of rows."""
    write_mxfp4(tmp_path)
    target = load_target(str(tmp_path), dtype="auto", device="cuda")
    model: Any = target.model
    assert target.quantization == "mxfp4"
    packed = [part for part in model.modules() if isinstance(part, Mxfp4Experts)]
    assert len(packed) == 3
    assert weight_bytes(model) < weight_bytes(
        load_target(str(tmp_path), dtype="auto", device="cuda", quantization="none").model
    )
    fused = fused_target(target)
    assert (type(fused).__name__, fused is not None and fused.few_rows > 0) == ("TritonLlama", True)
    model.generation_config.eos_token_id = None
    target = replace(target, tokenizer=tiny.Letters())
    config = tiny.drafter_config(vocab_size=96, draft_vocab_size=96, hidden_size=96, target_hidden_size=96)
    drafter = tiny.random_drafter(replace(config, aux_layer_ids=(1, 2, 3))).bfloat16().cuda()
    engine = Engine(target, drafter, config=options(graphs=graphs))
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(3, 90, (3 + length,), generator=generator).tolist() for length in range(12)]
    said = {
        depth: [
            list(answer.tokens)
            for answer in engine.generate([request(prompt, max_new_tokens=12, speculation=how) for prompt in prompts])
        ]
        for depth, how in ((0, OFF), (3, at_depth(3)))
    }
    assert near(said[0], said[3]) >= 9
    theirs = transformers_own(tmp_path, torch.bfloat16).cuda()
    theirs.generation_config.eos_token_id = None
    expected = [
        theirs.generate(torch.tensor([prompt]).cuda(), max_new_tokens=12, do_sample=False)[0, len(prompt) :].tolist()
        for prompt in prompts
    ]
    assert near(said[0], expected) >= 8
    assert "cannot be captured" not in caplog.text
