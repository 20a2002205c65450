"""A new weight format is one class in one file and one entry in `FORMATS`: here a toy one."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from eyas.drafter.quantised_linears import read_linears
from eyas.errors import UserError
from eyas.kernels.linear.quantised_weight import QuantisedWeight, quantise_int8
from eyas.kernels.linear.w8a8_linear import W8A8Linear
from eyas.plan.quantisation import stored_quantisation
from eyas.quantization.quantization_config import FORMATS
from eyas.quantization.weight_format import WeightFormat, WeightScheme
from eyas.target import quantised_checkpoint
from eyas.target.model import Target
from target import test_quantised_checkpoint as checkpoints
from target.test_quantised_checkpoint import Written

SAID = {"quant_method": "toy"}


class Toy(WeightFormat):
    """Bytes `codes`, which are 128 more than the integers, and one `step` per output."""

    name = "toy"
    methods = ("toy",)

    def parse(self, said: Mapping[str, Any], source: str) -> WeightScheme:
        return WeightScheme(format=self, kind="int8", quantised_inputs=True)

    def owns(self, names: Mapping[str, object]) -> bool:
        return "codes" in names

    def read(self, scheme: WeightScheme, tensors: Mapping[str, Tensor], name: str) -> QuantisedWeight:
        q_EK = (tensors["codes"].short() - 128).to(torch.int8)
        return QuantisedWeight(q_EK=q_EK, scale_EG=tensors["step"][:, None], bits=8, group=q_EK.shape[1])


def toy(weight: Tensor) -> Written:
    found = quantise_int8(weight)
    return {"codes": (found.q_EK.short() + 128).to(torch.uint8), "step": found.scale_EG[:, 0].contiguous()}, found


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(checkpoints.LAYOUTS, "toy", (toy, SAID, W8A8Linear))
    checkpoints.write(tmp_path, "toy")
    return tmp_path


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eyas.quantization.quantization_config.FORMATS", [*FORMATS, Toy()])


def test_targets_drafters_and_plans_read_it(known: None, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meant = checkpoints.write(folder, "toy")
    dense = Target.load(str(folder), dtype="float32", device="cpu")
    for name, weight in meant.state_dict().items():
        assert torch.equal(dense.model.get_parameter(name), weight), name

    monkeypatch.setattr(quantised_checkpoint, "multiplies", lambda *_: None)
    packed = Target.load(str(folder), dtype="float32", device="cpu")
    assert packed.quantization == "int8"
    assert sum(isinstance(module, W8A8Linear) for module in packed.model.modules()) == 14

    weight = torch.randn(4, 8)
    stored, as_meant = toy(weight)
    tensors, quantised = read_linears(SAID, {f"fc.{part}": x for part, x in stored.items()}, torch.float32, "it")
    assert torch.equal(tensors["fc.weight"], as_meant.dequantised())
    assert quantised.scheme.words == "int8 (toy)"

    assert stored_quantisation({"quantization_config": SAID}, "it").bits == pytest.approx(8, abs=0.01)


def test_a_missing_tensor_is_named(known: None, folder: Path) -> None:
    with pytest.raises(UserError, match=r"a layer has codes and no step, which int8 \(toy\) needs"):
        Toy().parse(SAID, "it").read({"codes": torch.zeros(4, 8, dtype=torch.uint8)}, "a layer")


def test_without_its_entry_it_is_unknown(folder: Path) -> None:
    with pytest.raises(UserError, match="quant_method 'toy'"):
        stored_quantisation({"quantization_config": SAID}, "it")
