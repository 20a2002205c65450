"""On a GPU the fused pass computes what the plain block computes: in float32 number by number, in half precision as
exactly as that.

It also runs on a CPU in Triton's interpreter: TRITON_INTERPRET=1, with `--noconftest` against the skip.
"""

import copy
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from eyas.engine.runner.fused_target import fused_target, recognised, require_same
from eyas.kernels.attention.choose import choose_backend
from eyas.kernels.attention.metadata import AttentionMetadata, AttentionRow
from eyas.kernels.llama.block import FusedLlama
from eyas.kernels.llama.experts import Experts
from eyas.target.facts import facts_of
from eyas.target.model import Target
from eyas.target.quantise import replace_linears
from kernels.test_recognise import gated, with_block, zeros

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16  # the interpreter cannot multiply bfloat16


WINDOWS = {"sliding_window": 5}
FAMILIES = {
    "llama": {},
    "mistral": WINDOWS,
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1, **WINDOWS},
    "qwen3": {},
    "phi3": {"partial_rotary_factor": 0.5, "pad_token_id": 0, **WINDOWS},
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 20, **WINDOWS},
    "gemma2": {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, **WINDOWS},
    "mixtral": {"num_local_experts": 5, "intermediate_size": 104, **WINDOWS},
    "qwen3_moe": {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "mlp_only_layers": [0]},
    "gpt_oss": {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 104, **WINDOWS},
}


def target(family: str, dtype: torch.dtype, heads: int, groups: int, size: int) -> Target:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 96,
        "hidden_size": 72,
        "intermediate_size": 100,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": size,
        "max_position_embeddings": 512,
    }
    config = AutoConfig.for_model(family, **{**sizes, **FAMILIES[family]})
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    model = model.to(DEVICE, dtype).eval().requires_grad_(False)
    for name, weight in model.named_parameters():
        if name.endswith("norm.weight"):
            torch.nn.init.uniform_(weight, 0.5, 1.5)
        if name.endswith("sinks"):
            torch.nn.init.uniform_(weight, -1.0, 2.0)
    return Target(facts=facts_of(model.config, family), model=model, tokenizer=None)  # type: ignore[arg-type]


EVERY = pytest.mark.parametrize(
    ("family", "heads", "groups", "size"),
    [*((family, 9, 3, 16) for family in FAMILIES if family != "phi3"), ("phi3", 9, 3, 8), ("llama", 4, 4, 24)],
)
ORDER_OF_SUMS = 1.5
"""How many times as far from float32 as the plain block, which rounds as the model's own code does, kernels may be in
half precision. They round at the same places, so over the hundreds of numbers of a comparison both are as far off, but
where another order of sums tips a number to its other neighbour; a single wrong one is much more than that."""


class Comparison:
    """A pass by kernels, a plain one, and in half precision a plain one in float32 over the same weights."""

    def __init__(self, made: Target, lean: FusedLlama, fused: Any) -> None:
        self.dtype = made.dtype
        exact = recognised(replace(made, model=copy.deepcopy(made.model).float()))
        self.passes = (fused, lean, exact)
        self.caches = [zeros(one, blocks=8, block_size=4) for one in self.passes]
        self._errors: dict[str, list[tuple[float, float]]] = {}

    @torch.inference_mode()
    def run(self, ids: Tensor, layout: AttentionMetadata, aux_layer_ids: Sequence[int]) -> Any:
        """Run the same tokens through all of them; returns logits and states of the kernels."""
        results = [
            one.forward(ids, choose_backend(layout), cache, None, aux_layer_ids)
            for one, cache in zip(self.passes, self.caches, strict=True)
        ]
        for what, numbers in zip(("logits", "states"), zip(*results, strict=True), strict=True):
            self._note(what, *numbers)
        return results[0]

    def judge(self) -> None:
        """Compare all results, keys and values included."""
        if self.dtype != torch.float32 and any(isinstance(block.mlp, Experts) for block in self.passes[0].blocks):
            return  # near-ties may choose other experts; the trial compares with equal choices
        for layer in range(2):
            for what, numbers in zip(
                ("keys", "values"), zip(*(x[layer] for x in self.caches), strict=True), strict=True
            ):
                self._note(f"{what} of layer {layer}", *numbers)
        for what, errors in self._errors.items():
            ours, theirs = (sum(several) ** 0.5 for several in zip(*errors, strict=True))
            assert ours <= ORDER_OF_SUMS * theirs, f"{what}: {ours:.4f} from float32, the plain block {theirs:.4f}"

    def _note(self, what: str, ours: Tensor, theirs: Tensor, exact: Tensor) -> None:
        if self.dtype == torch.float32:
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
        else:
            errors = [float((x.float() - exact).square().sum()) for x in (ours, theirs)]
            self._errors.setdefault(what, []).append((errors[0], errors[1]))


def by_kernels(lean: FusedLlama) -> Any:
    from eyas.kernels.llama.triton import TritonLlama

    return TritonLlama(**{part.name: getattr(lean, part.name) for part in fields(lean)})


@EVERY
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_the_fused_pass_is_the_plain_one(family: str, dtype: torch.dtype, heads: int, groups: int, size: int) -> None:
    made = target(family, dtype, heads, groups, size)
    lean = recognised(made)
    fused = by_kernels(lean)
    require_same(fused, made)
    rows = [AttentionRow(blocks=(2, 0, 3), base=0, count=9), AttentionRow(blocks=(5, 1), base=0, count=2)]
    layout = AttentionMetadata.of(rows, block_size=4, device=DEVICE)
    both = Comparison(made, lean, fused)
    both.run(torch.arange(11, device=DEVICE), layout, (0, 1, 2))
    both.judge()


def test_keys_with_large_biases_are_no_reason_against_kernels() -> None:
    """As in the first layer of Qwen2.5, where rounding to 16 bits decides what its tokens attend to."""
    made = target("qwen2", HALF, 4, 2, 64)
    attention = made.model.model.layers[0].self_attn
    as_coarse = 354.0 if torch.bfloat16 == HALF else 8 * 354.0  # float16 has three bits more
    for linear, size in ((attention.k_proj, as_coarse), (attention.q_proj, 28.0)):
        linear.bias.data.view(-1, 64)[:, 5::16] = size
    fused = by_kernels(recognised(made))
    for one in (fused, fused.with_few_rows()):
        require_same(one, made)


@EVERY
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_passes_of_few_tokens_are_the_plain_ones(
    family: str, dtype: torch.dtype, heads: int, groups: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from eyas.kernels.linear import few_rows_triton

    if DEVICE.type == "cpu":  # the interpreter is slow
        tiling = few_rows_triton.Tiling(outputs=128, inputs=128, warps=4)
        monkeypatch.setattr(few_rows_triton, "tiling_for", lambda *_, **__: tiling)
    made = target(family, dtype, heads, groups, size)
    lean = recognised(made)
    fused = by_kernels(lean).with_few_rows()
    require_same(fused, made)
    both, base = Comparison(made, lean, fused), 0
    assert fused.few_rows == few_rows_triton.MOST_SMALL_ROWS
    for tokens in (1, 2, 3, 4, 6, 13):
        rows = [AttentionRow(blocks=(2, 0, 3, 7, 1, 4, 6, 5), base=base, count=tokens)]
        layout = AttentionMetadata.of(rows, block_size=4, device=DEVICE)
        ids = (7 * base + torch.arange(tokens, device=DEVICE)) % 50
        ours = both.run(ids, layout, (2, 0))
        with torch.inference_mode():
            again = fused.forward(ids, choose_backend(layout), both.caches[0], None, (2, 0))
        assert all(torch.equal(mine, same) for mine, same in zip(ours, again, strict=True))
        base += tokens
    both.judge()


@pytest.mark.parametrize("kind", ["fp8", "int4"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3_text"])
def test_quantised_linears_run_by_the_fused_pass(family: str, kind: str) -> None:
    """By torch in the interpreter; on a GPU by kernels for prompts and for decoding, which the trial covers."""
    made = target(family, HALF, 9, 3, 16)
    replace_linears(made.model, kind)
    lean = recognised(made)
    assert lean.phased
    fused = by_kernels(lean).with_few_rows()
    assert fused is not None
    assert fused.few_rows == 0
    require_same(fused, made)


def test_products_that_are_not_plain_run_by_the_general_pass() -> None:
    lean = recognised(target("llama", HALF, 9, 3, 16))
    down = gated(lean, 0).down
    assert by_kernels(with_block(lean, 0, down=lambda x, out: down(x, out))).with_few_rows() is None


@pytest.mark.skipif(DEVICE.type != "cuda", reason="only there kernels are chosen")
def test_it_is_chosen_on_cuda() -> None:
    chosen = fused_target(target("llama", HALF, 9, 3, 16))
    assert chosen is not None
    assert (type(chosen).__name__, chosen.few_rows > 0) == ("TritonLlama", True)


@pytest.mark.skipif(DEVICE.type != "cuda", reason="only there kernels are chosen")
def test_kernels_of_few_tokens_that_fail_their_trial_are_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from eyas.kernels.llama import triton

    few_linear = triton.few_linear
    monkeypatch.setattr(triton, "few_linear", lambda *given: few_linear(*given).mul_(1.5))
    with caplog.at_level("INFO"):
        chosen = fused_target(target("llama", HALF, 9, 3, 16))
    assert chosen is not None
    assert (type(chosen).__name__, chosen.few_rows) == ("TritonLlama", 0)
    assert "without kernels of its own for few tokens" in caplog.text


@pytest.mark.skipif(DEVICE.type != "cuda", reason="only there kernels are chosen")
def test_kernels_that_only_longer_passes_use_are_tried_as_well(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from eyas.kernels.llama import triton

    gate = triton.gate
    monkeypatch.setattr(triton, "gate", lambda both, activation, out: (gate(both, activation, out), out.mul_(1.5)))
    with caplog.at_level("INFO"):
        chosen = fused_target(target("llama", HALF, 9, 3, 16))
    assert type(chosen).__name__ == "FusedLlama"
    assert "without kernels of its own between its products" in caplog.text
