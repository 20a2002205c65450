"""On a GPU the kernels of experts compute what torch computes expert by expert, in any batch.

It also runs on a CPU in Triton's interpreter: TRITON_INTERPRET=1, with `--noconftest` against the skip.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tiny
from engine.common import OFF, at_depth, options, request
from eyas.engine.engine import Engine
from eyas.engine.runner.fused_target import fused_target
from eyas.kernels.elementwise import Activation
from eyas.kernels.llama.experts import ClampedSwiglu, PlainExperts, Router, Routes
from kernels.test_recognise import WITH_EXPERTS, plain

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16  # the interpreter cannot multiply bfloat16
CLOSE = {torch.float32: {"rtol": 1e-4, "atol": 1e-5}, HALF: {"rtol": 0.02, "atol": 0.02}}


def drawn(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def made(
    dtype: torch.dtype, *, count: int, top_k: int, hidden: int, inner: int, odd: bool = False, **router: Any
) -> PlainExperts:
    """Experts with random weights; odd numbers have the layout of gpt-oss."""
    by_default: dict[str, Any] = {"renormalises": True, "dtype": dtype, "module": nn.Identity()}
    return PlainExperts(
        router=Router(
            weight_ED=drawn(count, hidden, dtype=dtype, seed=1) / hidden**0.5,
            bias_E=drawn(count, dtype=dtype, seed=2) if odd else None,
            top_k=top_k,
            **{**by_default, **router},
        ),
        gate_up_EGD=drawn(count, 2 * inner, hidden, dtype=dtype, seed=3) / hidden**0.5,
        gate_up_bias_EG=drawn(count, 2 * inner, dtype=dtype, seed=4) if odd else None,
        interleaved=odd,
        gating=ClampedSwiglu(1.7, 1.5) if odd else Activation.SILU,
        down_EDI=drawn(count, hidden, inner, dtype=dtype, seed=5) / inner**0.5,
        down_bias_ED=drawn(count, hidden, dtype=dtype, seed=6) if odd else None,
    )


def by_kernels(experts: PlainExperts, x_ND: Tensor, *, rows: int | None = None) -> Tensor:
    """Output of the kernels, with blocks of so many pairs."""
    from eyas.kernels.llama.experts_triton import ExpertTiling, mixture

    tiling = None if rows is None else ExpertTiling(rows=rows, outputs=32, inputs=32, warps=4, stages=2)
    return mixture(experts, x_ND, experts.router(x_ND), gate_tiling=tiling, down_tiling=tiling)


SHAPES = [
    {"count": 5, "top_k": 2, "hidden": 72, "inner": 40},
    {"count": 8, "top_k": 8, "hidden": 33, "inner": 20},
    {"count": 1, "top_k": 1, "hidden": 16, "inner": 100},
    {"count": 40, "top_k": 3, "hidden": 64, "inner": 32},
]


@pytest.mark.parametrize(
    ("dtype", "odd"), [(torch.float32, True), (HALF, False), (HALF, True)], ids=["float32", "half", "half-odd"]
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_mixture_is_torchs_own(shape: dict[str, int], dtype: torch.dtype, odd: bool) -> None:
    experts = made(dtype, odd=odd, **shape)
    for tokens in (1, 3, 21):  # one block per pair, and grouped
        x_ND = drawn(tokens, shape["hidden"], dtype=dtype, seed=7)
        torch.testing.assert_close(by_kernels(experts, x_ND), experts(x_ND), **CLOSE[dtype])


@pytest.mark.parametrize("rows", [0, 16])
def test_a_token_gets_the_same_numbers_in_every_company(rows: int) -> None:
    experts = made(HALF, count=5, top_k=2, hidden=72, inner=40)
    x_ND = drawn(17, 72, dtype=HALF, seed=7)
    together = by_kernels(experts, x_ND, rows=rows)
    assert torch.equal(by_kernels(experts, x_ND, rows=rows), together)
    order_N = torch.randperm(17, generator=torch.Generator().manual_seed(8)).to(DEVICE)
    assert torch.equal(by_kernels(experts, x_ND[order_N], rows=rows), together[order_N])
    for some in ([5], [16, 0, 3]):
        assert torch.equal(by_kernels(experts, x_ND[some], rows=rows), together[some])


def test_all_tokens_may_choose_the_same_experts_and_none_may_come() -> None:
    experts = made(torch.float32, count=6, top_k=2, hidden=32, inner=24)
    x_ND = drawn(1, 32, dtype=torch.float32, seed=7).expand(50, 32).contiguous()
    theirs = experts(x_ND)
    for rows in (0, 16, 32):
        torch.testing.assert_close(by_kernels(experts, x_ND, rows=rows), theirs, rtol=1e-4, atol=1e-5)
    assert by_kernels(experts, x_ND[:0]).shape == (0, 32)


@pytest.mark.parametrize("renormalises", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize(("count", "top_k"), [(5, 2), (128, 8), (3, 3), (60, 4)])
def test_routes_are_torchs_own(count: int, top_k: int, dtype: torch.dtype, renormalises: bool) -> None:
    from eyas.kernels.llama.experts_triton import route

    router = made(torch.float32, count=count, top_k=top_k, hidden=32, inner=16, renormalises=renormalises).router
    assert isinstance(router, Router)
    router, x_ND = replace(router, dtype=dtype), drawn(19, 32, dtype=torch.float32, seed=9)
    theirs, ours = router(x_ND), route(x_ND @ router.weight_ED.T, router)
    assert ours.weight_NK.dtype == dtype
    assert torch.equal(ours.expert_NK.long(), theirs.expert_NK)
    close = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 8e-3, "atol": 1e-6}
    torch.testing.assert_close(ours.weight_NK, theirs.weight_NK, **close)


@pytest.mark.parametrize("score", [float("nan"), float("-inf"), float("inf"), 0.0])
def test_scores_without_a_largest_choose_experts_that_there_are(score: float) -> None:
    from eyas.kernels.llama.experts_triton import route

    router = made(torch.float32, count=5, top_k=2, hidden=16, inner=16).router
    assert isinstance(router, Router)
    chosen: Routes = route(torch.full((3, 5), score, device=DEVICE), router)
    assert ((chosen.expert_NK >= 0) & (chosen.expert_NK < 5)).all()


@pytest.mark.skipif(DEVICE.type != "cuda", reason="only there passes are captured")
def test_a_captured_mixture_follows_other_routes() -> None:
    experts = made(HALF, count=16, top_k=4, hidden=128, inner=64)
    x_ND = drawn(48, 128, dtype=HALF, seed=7)
    by_kernels(experts, x_ND)
    torch.cuda.synchronize()
    from eyas.kernels.llama.experts_triton import mixture

    routes = experts.router(x_ND)
    routes = Routes(routes.expert_NK.int(), routes.weight_NK)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = mixture(experts, x_ND, routes)
    for seed in (10, 11):
        x_ND.copy_(drawn(48, 128, dtype=HALF, seed=seed))
        chosen = experts.router(x_ND)
        routes.expert_NK.copy_(chosen.expert_NK)
        routes.weight_NK.copy_(chosen.weight_NK)
        graph.replay()
        torch.testing.assert_close(captured, experts(x_ND), **CLOSE[HALF])


@pytest.mark.skipif(DEVICE.type != "cuda", reason="only there passes are captured")
@pytest.mark.parametrize("block", WITH_EXPERTS)
@pytest.mark.parametrize("graphs", [True, False], ids=["captured", "uncaptured"])
def test_engines_answer_as_transformers_does(block: str, graphs: bool, caplog: pytest.LogCaptureFixture) -> None:
    torch.set_float32_matmul_precision("highest")
    target = plain(block)
    model: Any = target.model.cuda()
    model.generation_config.eos_token_id = None
    target = replace(target, model=model, tokenizer=tiny.Letters())
    fused = fused_target(target)
    assert (type(fused).__name__, fused is not None and fused.few_rows > 0) == ("TritonLlama", True)
    config = tiny.drafter_config(vocab_size=80, draft_vocab_size=80, hidden_size=32, target_hidden_size=32)
    drafter = tiny.random_drafter(replace(config, aux_layer_ids=(1, 2, 3))).cuda()
    engine = Engine(target, drafter, config=options(graphs=graphs))
    prompts = [torch.randint(3, 80, (length,), generator=torch.Generator().manual_seed(5)) for length in (3, 14, 40)]
    asked = [
        request(prompt.tolist(), max_new_tokens=16, speculation=how) for how in (OFF, at_depth(3)) for prompt in prompts
    ]
    for prompt, answer in zip(2 * prompts, engine.generate(asked), strict=True):
        with torch.no_grad():
            ids = model.generate(prompt[None].cuda(), max_new_tokens=16, do_sample=False)
        assert list(answer.tokens) == ids[0, len(prompt) :].tolist()
    assert "cannot be captured" not in caplog.text
