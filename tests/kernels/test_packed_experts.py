"""Packed experts compute what transformers' own compute, in any batch, and are saved under its names."""

from typing import Any

import pytest
import torch
from torch import nn

from each import each
from eyas.engine.runner.fused_target import fused_target
from eyas.kernels.attention.choose import choose_backend
from eyas.kernels.attention.metadata import AttentionMetadata, AttentionRow
from eyas.kernels.linear.packed_linear import load_kernel, pack_linears
from eyas.kernels.llama.packed_experts import CompiledExperts, PackedExperts, pack_experts
from kernels.test_recognise import WITH_EXPERTS, lean_of, plain, sizes_of_panels, zeros

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(load_kernel()[0] is None, reason="there is no compiler")


@each("block", WITH_EXPERTS)
@torch.inference_mode()
def test_a_model_with_packed_experts_is_the_same_and_is_saved_as_it_was(block: str) -> None:
    target = plain(block)
    ids = torch.arange(40)[None]
    before, state = target.model(ids).logits, {name: x.clone() for name, x in target.model.state_dict().items()}
    packed = pack_experts(target.model)
    assert packed == sum(isinstance(module, PackedExperts) for module in target.model.modules()) > 0
    torch.testing.assert_close(target.model(ids).logits, before, rtol=1e-4, atol=2e-4)
    saved = target.model.state_dict()
    assert saved.keys() == state.keys()
    assert all(torch.equal(saved[name], state[name]) for name in state)
    assert pack_experts(target.model) == 0


@each("block", WITH_EXPERTS)
@torch.inference_mode()
def test_a_token_is_the_same_to_the_last_bit_alone_and_among_others(block: str) -> None:
    target = plain(block, **sizes_of_panels(block))
    pack_linears(target.model)
    pack_experts(target.model)
    lean = lean_of(target)
    assert any(isinstance(one.mlp, CompiledExperts) for one in lean.blocks)
    ids_N = torch.arange(3, 20)
    row = AttentionRow(blocks=range(5), base=0, count=len(ids_N))
    layout = AttentionMetadata.of([row], block_size=4, device=CPU)
    together, _ = lean.forward(ids_N, choose_backend(layout), zeros(lean), None)
    kv = zeros(lean)
    for at, token in enumerate(ids_N):
        alone = AttentionMetadata.of([AttentionRow(blocks=range(5), base=at, count=1)], block_size=4, device=CPU)
        logits, _ = lean.forward(token[None], choose_backend(alone), kv, None)
        assert torch.equal(logits[0], together[at]), at


def test_gate_parameters_of_any_name_are_copied() -> None:
    target = plain("mixtral")
    model: Any = target.model
    experts = model.model.layers[1].mlp.experts

    class Clamping(type(experts)):  # type: ignore[misc]
        def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
            gate, up = gate_up.clamp(-self.swiglu_limit, self.swiglu_limit).chunk(2, dim=-1)
            return self.act_fn(gate) * up

    experts.__class__, experts.swiglu_limit = Clamping, 0.5
    ids = torch.arange(40)[None]
    before = model(ids).logits
    assert pack_experts(model) == len(model.model.layers)
    torch.testing.assert_close(model(ids).logits, before, rtol=1e-4, atol=2e-4)


def test_experts_whose_gate_reads_other_attributes_are_not_packed() -> None:
    model: Any = plain("mixtral").model
    experts = model.model.layers[1].mlp.experts

    class Shifted(type(experts)):  # type: ignore[misc]
        def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
            gate, up = gate_up.chunk(2, dim=-1)
            return self.act_fn(gate) * (up + self.shift)

    experts.__class__, experts.shift = Shifted, torch.ones(1)
    assert pack_experts(model) == len(model.model.layers) - 1
    assert model.model.layers[1].mlp.experts is experts


def test_experts_with_other_results_are_not_packed() -> None:
    target = plain("mixtral")
    model: Any = target.model
    experts = model.model.layers[1].mlp.experts

    class Doubling(type(experts)):  # type: ignore[misc]
        def forward(self, *given: Any) -> torch.Tensor:
            made: torch.Tensor = super().forward(*given)
            return 2 * made

    experts.__class__ = Doubling
    model.model.layers[2].mlp.experts.register_forward_hook(lambda *_: None)
    model.model.layers[3].mlp.experts.to(torch.float64)
    assert pack_experts(model) == 1
    kinds = [isinstance(layer.mlp.experts, PackedExperts) for layer in model.model.layers]
    assert kinds == [True, False, False, False]
    assert isinstance(model.model.layers[1].mlp.experts, nn.Module)


def test_packed_experts_run_by_the_fused_block() -> None:
    target = plain("qwen3 experts")
    pack_experts(target.model)
    assert fused_target(target) is not None
