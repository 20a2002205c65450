"""Captured states are the residual stream after k layers, for every kind of decoder.

Shapes: B batch, T tokens, D hidden size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from each import each
from eyas.errors import UserError
from eyas.target.capture import capture, decoder_layers

if TYPE_CHECKING:
    from eyas.target.model import Target

LAYERS = 4
FAMILIES = (
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "gemma",
    "gemma2",
    "gemma3_text",
    "phi",
    "phi3",
    "mixtral",
    "qwen3_moe",
    "gpt2",
)
EXTRA: dict[str, dict[str, int]] = {
    "mixtral": {"num_local_experts": LAYERS, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": LAYERS, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "phi3": {"pad_token_id": 0},
}


def tiny(family: str) -> Any:
    torch.manual_seed(1)
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 48}
    if family in ("phi", "phi3", "gpt2"):
        del sizes["head_dim"], sizes["num_key_value_heads"]
    if family == "gpt2":
        del sizes["intermediate_size"]
    config = AutoConfig.for_model(
        family, vocab_size=80, hidden_size=32, num_hidden_layers=LAYERS, **sizes, **EXTRA.get(family, {})
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    return model.eval()


def some_ids() -> torch.Tensor:
    return torch.randint(0, 80, (2, 7), generator=torch.Generator().manual_seed(2))


def final_norm_of(model: Any) -> Any:
    decoder = model.get_decoder()
    names = [n for n in ("norm", "final_layernorm", "ln_f") if hasattr(decoder, n)]
    return getattr(decoder, names[0])


@torch.no_grad()
def assert_captures_the_stream(model: Any, ids_BT: torch.Tensor) -> None:
    layers = len(decoder_layers(model))
    before_norm: list[torch.Tensor] = []
    watch = final_norm_of(model).register_forward_pre_hook(lambda norm, args: before_norm.append(args[0]))
    everything = list(range(layers + 1))
    with capture(model, everything) as captured:
        model(input_ids=ids_BT, use_cache=False)
    watch.remove()
    hidden_BTD = model(input_ids=ids_BT, use_cache=False, output_hidden_states=True).hidden_states
    for k in range(layers):
        assert torch.equal(captured.state_BTD[k], hidden_BTD[k]), f"state {k}"
        assert not torch.equal(captured.state_BTD[k + 1], hidden_BTD[k]), f"state {k + 1} must differ from {k}"
    assert torch.equal(captured.state_BTD[layers], before_norm[0])
    assert not torch.equal(captured.state_BTD[layers], hidden_BTD[layers])
    assert torch.equal(captured.aux_hidden(), torch.cat([captured.state_BTD[k] for k in everything], dim=-1))


@each("family", FAMILIES)
def test_captured_states_equal_transformers_hidden_states_and_the_last_is_before_the_norm(family: str) -> None:
    assert_captures_the_stream(tiny(family), some_ids())


@pytest.mark.default
def test_captured_states_of_the_default_target_equal_transformers_hidden_states(default_target: Target) -> None:
    assert_captures_the_stream(default_target.model, some_ids())


def test_state_zero_of_gemma_includes_the_embedding_scale() -> None:
    model, ids_BT = tiny("gemma3_text"), some_ids()
    with torch.no_grad(), capture(model, [0]) as captured:
        model(input_ids=ids_BT)
    raw_BTD = model.get_input_embeddings().weight[ids_BT]
    scale = torch.tensor(32.0).sqrt()
    assert torch.allclose(captured.aux_hidden(), raw_BTD * scale)
    assert not torch.allclose(captured.aux_hidden(), raw_BTD)


def test_only_the_asked_states_are_kept() -> None:
    model = tiny("llama")
    with torch.no_grad(), capture(model, (1, LAYERS)) as captured:
        model(input_ids=some_ids())
    assert set(captured.state_BTD) == {1, LAYERS}
    assert captured.aux_hidden().shape == (2, 7, 2 * 32)


def test_the_latest_pass_counts() -> None:
    model, ids_BT = tiny("llama"), some_ids()
    with torch.no_grad():
        with capture(model, (1, 2)) as captured:
            model(input_ids=ids_BT)
            model(input_ids=ids_BT[:, :3])
            both = captured.aux_hidden()
        with capture(model, (1, 2)) as alone:
            model(input_ids=ids_BT[:, :3])
    assert torch.equal(both, alone.aux_hidden())


def hooks_of(model: Any) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_hooks_are_removed_after_the_block_and_after_an_exception() -> None:
    model = tiny("llama")
    before = hooks_of(model)
    with capture(model, (0, 2)):
        assert hooks_of(model) == before + 2
    assert hooks_of(model) == before
    with pytest.raises(ZeroDivisionError), capture(model, (0, 2)):
        _ = 1 / 0
    assert hooks_of(model) == before


def test_states_keep_the_dtype_of_the_model() -> None:
    model = tiny("llama").to(torch.float16)
    with torch.no_grad(), capture(model, (0, 2)) as captured:
        model(input_ids=some_ids())
    assert captured.aux_hidden().dtype == torch.float16


def test_asking_before_any_pass_is_a_programming_error() -> None:
    with capture(tiny("llama"), (1,)) as captured, pytest.raises(RuntimeError, match="run the model"):
        captured.aux_hidden()


@each(
    ("ids", "message"),
    [
        ((), "no auxiliary layer ids.*between 0 and 4"),
        ((1, 5), r"id 5 is outside 0\.\.4"),
        ((-1, 2), r"id -1 is outside 0\.\.4"),
        ((1, 1), r"\[1, 1\] are not strictly ascending; use \[1\]"),
        ((3, 1), r"\[3, 1\] are not strictly ascending; use \[1, 3\]"),
    ],
)
def test_ids_that_cannot_be_captured_are_refused(ids: tuple[int, ...], message: str) -> None:
    with pytest.raises(UserError, match=message), capture(tiny("llama"), ids):
        pass


def test_a_model_whose_layers_cannot_be_found_is_refused() -> None:
    model = tiny("llama")
    model.config.num_hidden_layers = 9
    with pytest.raises(UserError, match="cannot find the 9 decoder layers of LlamaForCausalLM"), capture(model, (1,)):
        pass
