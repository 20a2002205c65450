"""Drafters with 8-bit linears: written as vLLM reads them, read back, dequantised, and refused by name if broken."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from each import each
from eyas.drafter.check import check
from eyas.drafter.checkpoint import Checkpoint, checkpoint_of, load_drafter, read_checkpoint, write_checkpoint
from eyas.drafter.quantise import dequantised, quantised
from eyas.drafter.quantised_linears import KINDS
from eyas.errors import UserError
from tiny import drafter_config, random_drafter

V31 = {"fc_norm": True, "norm_output": True}
LINEARS = (
    "fc",
    *(f"midlayer.self_attn.{x}_proj" for x in "qkvo"),
    *(f"midlayer.mlp.{x}_proj" for x in ("gate", "up", "down")),
)
STORED = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


def plain(**changes: Any) -> Checkpoint:
    drafter = random_drafter(drafter_config(dtype="bfloat16", **V31, **changes), own_embedding=False)
    return checkpoint_of(drafter.bfloat16())


def save(folder: Path, kind: str = "int8", layout: str = "vllm", **changes: Any) -> Path:
    write_checkpoint(quantised(plain(**changes), kind, "it"), folder, layout=layout)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def edit(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def configure(folder: Path, **changes: Any) -> None:
    raw = json.loads((folder / "config.json").read_text())
    raw["quantization_config"] |= changes
    (folder / "config.json").write_text(json.dumps(raw))


@each("kind", KINDS)
def test_it_is_what_compressed_tensors_calls_w8a8(tmp_path: Path, kind: str) -> None:
    folder = save(tmp_path / "it", kind)
    tensors, before = load_file(folder / "model.safetensors"), plain()
    number = "int" if kind == "int8" else "float"
    said = json.loads((folder / "config.json").read_text())["quantization_config"]
    (group,) = said["config_groups"].values()
    assert (said["quant_method"], said["format"]) == ("compressed-tensors", f"{number}-quantized")
    assert said["ignore"] == ["lm_head"]
    assert group["targets"] == ["Linear"]
    for part, strategy, dynamic in (("weights", "channel", False), ("input_activations", "token", True)):
        assert group[part] == {
            "num_bits": 8,
            "type": number,
            "symmetric": True,
            "strategy": strategy,
            "dynamic": dynamic,
        }
    for name in LINEARS:
        weight, scale = tensors.pop(f"{name}.weight"), tensors.pop(f"{name}.weight_scale")
        meant = before.tensors[f"{name.replace('midlayer', 'layers.0')}.weight"].float()
        assert weight.dtype == STORED[kind]
        assert (scale.dtype, tuple(scale.shape)) == (torch.float32, (len(weight), 1))
        step = scale if kind == "int8" else meant.abs() / 8 + scale * 2**-8  # of fp8: 3 bits after the first
        assert bool(((weight.float() * scale - meant).abs() <= step * 0.51).all())
    # Everything else is unchanged bit for bit.
    for name, tensor in tensors.items():
        assert torch.equal(tensor, before.tensors[name.replace("midlayer", "layers.0")]), name
    assert "lm_head.weight" in tensors


@each("kind", KINDS)
@each("changes", [{}, {"draft_vocab_size": 32}, {"num_hidden_layers": 2}, {"attention_bias": True, "mlp_bias": True}])
def test_conversions_keep_quantised_weights_bit_for_bit(tmp_path: Path, kind: str, changes: dict[str, Any]) -> None:
    first = save(tmp_path / "first", kind, **changes)
    write_checkpoint(read_checkpoint(str(first)), tmp_path / "there", layout="speculators")
    write_checkpoint(read_checkpoint(str(tmp_path / "there")), tmp_path / "back")
    assert contents(tmp_path / "back") == contents(first)
    # vLLM reads this object, so the setting is there.
    nested = json.loads((tmp_path / "there" / "config.json").read_text())["transformer_layer_config"]
    assert nested["quantization_config"]["quant_method"] == "compressed-tensors"


@each("kind", KINDS)
def test_dequantising_restores_a_plain_drafter(tmp_path: Path, kind: str) -> None:
    folder = save(tmp_path / "it", kind)
    read = read_checkpoint(str(folder))
    write_checkpoint(dequantised(read, "it"), tmp_path / "back")
    back, before = read_checkpoint(str(tmp_path / "back")), plain()
    assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())
    assert back.quantised is None
    assert back.config == before.config
    assert {name: x.dtype for name, x in back.tensors.items()} == {name: x.dtype for name, x in before.tensors.items()}
    for name, tensor in back.tensors.items():
        assert torch.equal(tensor, read.tensors[name])
        close = 0.02 if kind == "int8" else 0.04
        assert float((tensor.float() - before.tensors[name].float()).norm()) <= close * float(tensor.float().norm())
    write_checkpoint(
        dequantised(read, "it"), tmp_path / "sglang", layout="sglang"
    )  # that layout takes no quantised drafter
    assert torch.equal(load_drafter(str(folder)).fc.weight, back.tensors["fc.weight"])


def test_the_check_names_the_quantisation(tmp_path: Path) -> None:
    found = check(str(save(tmp_path / "it")))
    assert found.ok
    assert found.findings == ()
    assert found.quantization == "int8 (compressed-tensors)"
    assert found.bytes == sum(tensor.nbytes for tensor in load_file(tmp_path / "it" / "model.safetensors").values())
    write_checkpoint(plain(), tmp_path / "plain")
    whole = check(str(tmp_path / "plain"))
    assert whole.quantization is None
    assert whole.parameters == found.parameters
    weights = sum(
        tensor.numel() for name, tensor in plain().tensors.items() if tensor.ndim == 2 and "lm_head" not in name
    )
    assert 0.9 * weights < whole.bytes - found.bytes < weights


def test_the_check_notes_a_linear_that_is_not_quantised(tmp_path: Path) -> None:
    folder = save(tmp_path / "it")

    def widen(tensors: dict[str, Tensor]) -> None:
        tensors["fc.weight"] = (tensors["fc.weight"].float() * tensors.pop("fc.weight_scale")).bfloat16()

    edit(folder, widen)
    (finding,) = check(str(folder)).findings
    assert finding.severity == "warning"
    assert "fc is not quantised beside linears that are" in finding.message
    assert read_checkpoint(str(folder)).tensors["fc.weight"].dtype == torch.bfloat16


def test_impossible_conversions_are_refused_by_name(tmp_path: Path) -> None:
    once = quantised(plain(), "int8", "it")
    with pytest.raises(UserError, match=r"it is quantised already \(int8 \(compressed-tensors\)\).*--quantize"):
        quantised(once, "fp8", "it")
    with pytest.raises(UserError, match="it is not quantised; leave --quantize none out"):
        dequantised(plain(), "it")
    with pytest.raises(UserError, match=r"SGLang's fc is a plain linear.*--quantize none"):
        write_checkpoint(once, tmp_path / "it", layout="sglang")
    assert not (tmp_path / "it").exists()


def without_scale(tensors: dict[str, Tensor]) -> None:
    del tensors["fc.weight_scale"]


def short_scale(tensors: dict[str, Tensor]) -> None:
    tensors["fc.weight_scale"] = tensors["fc.weight_scale"][1:].clone()


def infinite_scale(tensors: dict[str, Tensor]) -> None:
    tensors["fc.weight_scale"][3] = float("inf")


def narrow(tensors: dict[str, Tensor]) -> None:
    tensors["fc.weight"] = tensors["fc.weight"][:, 1:].clone()


@each(
    ("change", "words"),
    [
        (without_scale, "fc.weight is int8, expected BF16"),
        (short_scale, "fc has 63 scales.*needs 1 or 64"),
        (infinite_scale, "fc has scales that are not finite"),
        (narrow, r"fc.weight is \[64, 191\], expected \[64, 192\]"),
        (
            lambda tensors: [tensors.pop(x) for x in list(tensors) if x.endswith("_scale")],
            "none of its tensors has scales",
        ),
    ],
)
def test_broken_checkpoints_are_refused_by_name(
    tmp_path: Path, change: Callable[[dict[str, Tensor]], None], words: str
) -> None:
    folder = save(tmp_path / "it")
    edit(folder, change)
    with pytest.raises(UserError, match=words):
        read_checkpoint(str(folder))


def test_unknown_configurations_are_refused(tmp_path: Path) -> None:
    folder = save(tmp_path / "it")
    for changes, words in (
        ({"quant_method": "hqq"}, "'hqq'.*compressed-tensors"),
        ({"config_groups": {}}, "config_groups"),
        ({"format": "marlin-24"}, "'marlin-24'"),
        ({"format": "float-quantized", "config_groups": {"g": {"weights": {"num_bits": 8, "type": "float"}}}}, "int8"),
    ):
        right = (folder / "config.json").read_bytes()
        configure(folder, **changes)
        with pytest.raises(UserError, match=words):
            read_checkpoint(str(folder))
        (folder / "config.json").write_bytes(right)


def test_other_published_formats_are_read(tmp_path: Path) -> None:
    """fp8 blocks, as some model families are published."""
    before = plain()
    folder = tmp_path / "it"
    write_checkpoint(before, folder)
    raw = json.loads((folder / "config.json").read_text())
    raw["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    (folder / "config.json").write_text(json.dumps(raw))

    def blocks(tensors: dict[str, Tensor]) -> None:
        for name in LINEARS:
            tensors[f"{name}.weight_scale_inv"] = torch.full(
                [-(-size // 32) for size in tensors[f"{name}.weight"].shape], 0.25
            )
            tensors[f"{name}.weight"] = (tensors[f"{name}.weight"] * 4).to(torch.float8_e4m3fn)

    edit(folder, blocks)
    read = read_checkpoint(str(folder))
    assert read.quantised is not None
    assert read.quantised.scheme.words == "fp8 in blocks of 32 x 32 (fp8)"
    torch.testing.assert_close(read.tensors["fc.weight"], before.tensors["fc.weight"], rtol=0.07, atol=0.01)
    write_checkpoint(read, tmp_path / "again")
    assert contents(tmp_path / "again")["model.safetensors"] == contents(folder)["model.safetensors"]
    assert contents(tmp_path / "again").keys() == contents(folder).keys()
