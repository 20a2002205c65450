"""A small model in every published format loads: packed where there are kernels, dequantised elsewhere."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from chat_tokenizer import letter_tokenizer
from each import each
from eyas.errors import UserError
from eyas.kernels.linear.quantised_weight import QuantisedWeight, quantise_float8, quantise_int4
from eyas.kernels.linear.w4a16_linear import W4A16Linear
from eyas.kernels.linear.w8a8_linear import W8A8Linear
from eyas.target import quantised_checkpoint
from eyas.target.model import Target
from quantization.test_formats import packed_rows

CONFIG = LlamaConfig(
    vocab_size=96,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    tie_word_embeddings=False,
)
Written = tuple[dict[str, Tensor], QuantisedWeight]


def awq(weight: Tensor) -> Written:
    found = quantise_int4(weight, 64)
    assert found.zero_EG is not None
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def packed(x: Tensor) -> Tensor:
        return packed_rows(x.unflatten(1, (-1, 8))[..., order].flatten(1), 4)

    scales = found.scale_EG.t().contiguous().bfloat16()
    return {"qweight": packed(found.q_EK.t()), "qzeros": packed(found.zero_EG.t()), "scales": scales}, found


def gptq(weight: Tensor) -> Written:
    found = quantise_int4(weight)
    assert found.zero_EG is not None
    stored = {
        "qweight": packed_rows(found.q_EK, 4).t().contiguous(),
        "qzeros": packed_rows(found.zero_EG.t() - 1, 4),
        "scales": found.scale_EG.t().contiguous().bfloat16(),
        "g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // 128,
    }
    return stored, found


def w4a16(weight: Tensor) -> Written:
    found = quantise_int4(weight)
    assert found.zero_EG is not None
    stored = {
        "weight_packed": packed_rows(found.q_EK, 4),
        "weight_scale": found.scale_EG.bfloat16(),
        "weight_zero_point": packed_rows(found.zero_EG.t(), 4).t().contiguous(),
        "weight_shape": torch.tensor(weight.shape),
    }
    return stored, found


def fp8(weight: Tensor) -> Written:
    found = quantise_float8(weight)
    return {"weight": found.q_EK, "weight_scale": found.scale_EG}, found


def blocks(weight: Tensor) -> Written:
    outputs, inputs = weight.shape
    scale = torch.rand(-(-outputs // 128), -(-inputs // 128)) + 0.5
    by = scale.repeat_interleave(128, dim=0)[:outputs]
    q = (weight / by.repeat_interleave(128, dim=1)[:, :inputs]).to(torch.float8_e4m3fn)
    return {"weight": q, "weight_scale_inv": scale}, QuantisedWeight(q_EK=q, scale_EG=by, bits=8, group=128)


GROUPS = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 128}
CHANNELS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
LAYOUTS: dict[str, tuple[Callable[[Tensor], Written], dict[str, Any], type[nn.Module]]] = {
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm"}, W4A16Linear),
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": 128}, W4A16Linear),
    "w4a16": (
        w4a16,
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"weights": GROUPS}},
            "ignore": ["lm_head"],
        },
        W4A16Linear,
    ),
    "fp8": (
        fp8,
        {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": {"group_0": {"weights": CHANNELS, "input_activations": {"dynamic": True}}},
        },
        W8A8Linear,
    ),
    "blocks": (blocks, {"quant_method": "fp8", "weight_block_size": [128, 128]}, W8A8Linear),
}


def write(folder: Path, layout: str, change: Callable[[dict[str, Tensor]], None] | None = None) -> LlamaForCausalLM:
    """Write a checkpoint in a format; returns the model that it represents."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG)
    quantise, said, _ = LAYOUTS[layout]
    tensors: dict[str, Tensor] = {}
    for name, weight in model.state_dict().items():
        if "_proj." not in name:
            tensors[name] = weight
            continue
        owner = name.removesuffix("weight")
        stored, meant = quantise(weight)
        tensors |= {owner + part: tensor for part, tensor in stored.items()}
        model.get_parameter(name).data = meant.dequantised()
    if change is not None:
        change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    said = {**CONFIG.to_dict(), "architectures": ["LlamaForCausalLM"], "quantization_config": said, "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(said))
    letter_tokenizer().save_pretrained(folder)
    return model


@each("layout", LAYOUTS)
def test_a_cpu_dequantises_and_logs_it(layout: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    meant = write(tmp_path, layout)
    with caplog.at_level(logging.INFO):
        loaded = Target.load(str(tmp_path), dtype="float32", device="cpu")
    assert "14 matrices of" in caplog.text
    assert "are dequantised to float32" in caplog.text
    assert loaded.quantization == "none"
    for name, weight in meant.state_dict().items():
        torch.testing.assert_close(loaded.model.get_parameter(name), weight, rtol=0, atol=0)


@each("layout", LAYOUTS)
def test_weights_stay_packed_where_there_are_kernels(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantised_checkpoint, "multiplies", lambda *_: None)
    meant = write(tmp_path, layout)
    loaded = Target.load(str(tmp_path), dtype="float32", device="cpu")
    kind = LAYOUTS[layout][2]
    packed = [module for module in loaded.model.modules() if isinstance(module, kind)]
    assert len(packed) == 14
    assert loaded.quantization == ("fp8" if kind is W8A8Linear else "int4")
    for name, weight in meant.state_dict().items():
        if "_proj." in name:
            owner: Any = loaded.model.get_submodule(name.removesuffix(".weight"))
            torch.testing.assert_close(owner.weight, weight, rtol=1e-6, atol=0)
    ids = torch.arange(20)[None] * 3
    ours, exact = loaded.model(ids).logits, meant(ids).logits
    limit = 0.15 if kind is W8A8Linear else 1e-4  # rows are rounded to 8 bits
    assert float((ours - exact).norm() / exact.norm()) < limit
    dense = Target.load(str(tmp_path), dtype="float32", device="cpu", quantization="none")
    assert dense.quantization == "none"
    torch.testing.assert_close(dense.model(ids).logits, exact)


def test_what_is_missing_or_does_not_fit_is_refused(tmp_path: Path) -> None:
    def without_a_norm(tensors: dict[str, Tensor]) -> None:
        del tensors["model.layers.1.input_layernorm.weight"]

    write(tmp_path, "gptq", without_a_norm)
    with pytest.raises(UserError, match=r"lacks 1 weights.*model\.layers\.1\.input_layernorm\.weight"):
        Target.load(str(tmp_path), dtype="float32", device="cpu")

    def without_zeros(tensors: dict[str, Tensor]) -> None:
        del tensors["model.layers.0.mlp.up_proj.qzeros"]

    write(tmp_path, "gptq", without_zeros)
    with pytest.raises(UserError, match=r"model\.layers\.0\.mlp\.up_proj has .* no qzeros"):
        Target.load(str(tmp_path), dtype="float32", device="cpu")

    def of_another_size(tensors: dict[str, Tensor]) -> None:
        tensors["model.embed_tokens.weight"] = torch.zeros(90, 128)

    write(tmp_path, "fp8", of_another_size)
    with pytest.raises(UserError, match=r"embed_tokens\.weight .* \(90, 128\)"):
        Target.load(str(tmp_path), dtype="float32", device="cpu")


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "fp8")
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UserError, match="are damaged"):
        Target.load(str(tmp_path), dtype="float32", device="cpu")


def test_it_is_not_quantised_twice(tmp_path: Path) -> None:
    write(tmp_path, "fp8")
    with pytest.raises(UserError, match=r"is quantised already .*fp8"):
        Target.load(str(tmp_path), device="cpu", quantization="int4")
