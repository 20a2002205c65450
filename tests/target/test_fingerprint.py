"""A model is told by its norms: in every format and precision the same, and another one's is another."""

from pathlib import Path
from typing import Any

import gguf
import torch

from each import each
from eyas.target.fingerprint import fingerprint
from eyas.target.model import Target
from tiny_gguf import tiny_model, write_gguf


@each("family", ["llama", "qwen3"])
def test_a_folder_and_gguf_files_of_one_model_agree_in_any_precision(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    ours = fingerprint(model)
    assert len(ours) == 16
    assert fingerprint(tiny_model(family).bfloat16()) == fingerprint(tiny_model(family).half()) == ours
    for kind in (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.Q8_0):
        path = write_gguf(model, tmp_path / f"{kind.name}.gguf", kind=kind)
        assert fingerprint(Target.load(str(path), cache=tmp_path / "cache").model) == ours


def test_norms_that_are_kept_as_one_more_than_they_are_agree() -> None:
    gemma, stored = tiny_model("gemma2"), tiny_model("gemma2")
    with torch.no_grad():
        for each in (gemma, stored):
            for name, weight in each.named_parameters():
                if "norm" in name:
                    weight.sub_(1).mul_(torch.logspace(-9, 0, len(weight))).copy_(weight.bfloat16().float())
        for name, weight in stored.named_parameters():
            if "norm" in name:
                weight.add_(1).sub_(1)
    assert fingerprint(gemma) == fingerprint(stored)


@each("change", [{"num_hidden_layers": 4}, {"vocab_size": 300}, {"hidden_size": 128}])
def test_other_sizes_are_another_model(change: dict[str, Any]) -> None:
    assert fingerprint(tiny_model(**change)) != fingerprint(tiny_model())


@each("norm", ["model.norm", "model.layers.1.input_layernorm"])
def test_one_other_weight_of_a_norm_is_another_model(norm: str) -> None:
    model = tiny_model()
    with torch.no_grad():
        model.get_parameter(f"{norm}.weight")[7] *= 1.01
    assert fingerprint(model) != fingerprint(tiny_model())
