"""Published weight formats, written here number by number, are read as they are defined."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from each import each
from eyas.errors import UserError
from eyas.quantization.quantization_config import weight_scheme
from eyas.quantization.weight_format import WeightScheme

E, K, GROUP = 16, 64, 32


def scheme_of(**said: Any) -> WeightScheme:
    scheme = weight_scheme({"quantization_config": said}, "a checkpoint")
    assert scheme is not None
    return scheme


def words(integers: list[int], bits: int) -> int:
    """Integers in an int32, the first in the lowest bits."""
    word = sum((x & (2**bits - 1)) << (bits * i) for i, x in enumerate(integers))
    return word - 2**32 if word >= 2**31 else word


def packed_rows(q: Tensor, bits: int) -> Tensor:
    """Pack integers along the last dimension."""
    each = 32 // bits
    return torch.tensor(
        [[words(row[i : i + each], bits) for i in range(0, len(row), each)] for row in q.tolist()], dtype=torch.int32
    )


def integers(*shape: int, below: int) -> Tensor:
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(sum(shape) + below))


def scales(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return (torch.rand(shape, generator=torch.Generator().manual_seed(1)) + 0.5).mul(0.01).to(dtype)


def dequantised(q_EK: Tensor, zero_EG: Tensor, scale_EG: Tensor, group_of: list[int]) -> Tensor:
    """Dequantise weight by weight."""
    weight = torch.empty(q_EK.shape)
    for e in range(len(q_EK)):
        for k in range(q_EK.shape[1]):
            g = group_of[k]
            weight[e, k] = float(int(q_EK[e, k]) - int(zero_EG[e, g])) * float(scale_EG[e, g])
    return weight


NEIGHBOURS = [k // GROUP for k in range(K)]


def test_awq() -> None:
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    q_EK, zero_EG, scale_EG = integers(E, K, below=16), integers(E, 2, below=16), scales(E, 2)

    def packed(x_RE: Tensor) -> Tensor:
        return packed_rows(x_RE.unflatten(1, (-1, 8))[..., list(order)].flatten(1), 4)

    tensors = {"qweight": packed(q_EK.t()), "qzeros": packed(zero_EG.t()), "scales": scale_EG.t().contiguous()}
    scheme = scheme_of(quant_method="awq", bits=4, group_size=GROUP, version="gemm", zero_point=True)
    assert scheme.owns(tensors)
    found = scheme.read(tensors, "a layer")
    assert torch.equal(found.dequantised(), dequantised(q_EK, zero_EG, scale_EG, NEIGHBOURS))


@each("bits", [4, 8])
@each("form", ["gptq", "gptq_v2"])
@each("sorted_", [False, True])
def test_gptq(bits: int, form: str, sorted_: bool) -> None:
    q_EK, zero_EG, scale_EG = integers(E, K, below=2**bits), integers(E, 2, below=2**bits), scales(E, 2)
    group_of = NEIGHBOURS
    if not sorted_:  # desc_act: any input may be in any group
        group_of = [NEIGHBOURS[i] for i in torch.randperm(K, generator=torch.Generator().manual_seed(0)).tolist()]
    stored = zero_EG - 1 if form == "gptq" else zero_EG
    tensors = {
        "qweight": packed_rows(q_EK, bits).t().contiguous(),
        "qzeros": packed_rows(stored.t(), bits),
        "scales": scale_EG.t().contiguous(),
        "g_idx": torch.tensor(group_of, dtype=torch.int32),
    }
    scheme = scheme_of(quant_method="gptq", bits=bits, group_size=GROUP, checkpoint_format=form, desc_act=not sorted_)
    found = scheme.read(tensors, "a layer")
    assert torch.equal(found.dequantised(), dequantised(q_EK, zero_EG, scale_EG, group_of))
    assert (found.order_K is None) == sorted_


def compressed(form: str, inputs: object = None, **weights: Any) -> WeightScheme:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}}
    return scheme_of(
        quant_method="compressed-tensors", format=form, config_groups=groups, quantization_status="compressed"
    )


@each("bits", [4, 8])
@each("kind", ["symmetric", "zero points", "g_idx", "channel"])
def test_packed_compressed_tensors(bits: int, kind: str) -> None:
    half = 2 ** (bits - 1)
    group = K if kind == "channel" else GROUP
    q_EK, scale_EG = integers(E, K, below=2**bits) - half, scales(E, K // group, dtype=torch.bfloat16)
    zero_EG = integers(E, K // group, below=2**bits) - half if kind == "zero points" else torch.zeros_like(scale_EG)
    group_of = [k // group for k in range(K)]
    tensors = {
        "weight_packed": packed_rows(q_EK + half, bits),
        "weight_scale": scale_EG,
        "weight_shape": torch.tensor([E, K]),
    }
    if kind == "zero points":
        tensors["weight_zero_point"] = packed_rows((zero_EG + half).t(), bits).t().contiguous()
    if kind == "g_idx":
        group_of = [NEIGHBOURS[i] for i in torch.randperm(K, generator=torch.Generator().manual_seed(0)).tolist()]
        tensors["weight_g_idx"] = torch.tensor(group_of, dtype=torch.int32)
    said: dict[str, Any] = {"num_bits": bits, "type": "int", "symmetric": kind != "zero points"}
    said |= {"strategy": "channel"} if kind == "channel" else {"strategy": "group", "group_size": GROUP}
    found = compressed("pack-quantized", **said).read(tensors, "a layer")
    assert torch.equal(found.dequantised(), dequantised(q_EK, zero_EG, scale_EG, group_of))


@each("strategy", ["tensor", "channel", "block"])
def test_fp8_compressed_tensors(strategy: str) -> None:
    torch.manual_seed(0)
    weight = torch.randn(E, K).to(torch.float8_e4m3fn)
    scale = {"tensor": scales(1), "channel": scales(E, 1), "block": scales(1, 2)}[strategy]
    said: dict[str, Any] = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True}
    if strategy == "block":
        said["block_structure"] = [E, GROUP]
    scheme = compressed("float-quantized", {"dynamic": True, "strategy": "token"}, **said)
    assert scheme.quantised_inputs
    found = scheme.read({"weight": weight, "weight_scale": scale}, "a layer")
    by = scale.float().repeat_interleave(GROUP, dim=1) if strategy == "block" else scale.float()
    assert torch.equal(found.dequantised(), weight.float() * by)


def test_w8a8_compressed_tensors() -> None:
    weight, scale = (integers(E, K, below=255) - 127).to(torch.int8), scales(E, 1)
    scheme = compressed("int-quantized", {"dynamic": True}, num_bits=8, type="int", strategy="channel")
    found = scheme.read({"weight": weight, "weight_scale": scale}, "a layer")
    assert torch.equal(found.dequantised(), weight.float() * scale.float())


def test_blocks_of_fp8_that_do_not_fill_the_matrix() -> None:
    torch.manual_seed(0)
    weight, scale = torch.randn(20, 40).to(torch.float8_e4m3fn), scales(2, 3, dtype=torch.float32)
    scheme = scheme_of(quant_method="fp8", fmt="e4m3", activation_scheme="dynamic", weight_block_size=[16, 16])
    found = scheme.read({"weight": weight, "weight_scale_inv": scale}, "a layer")
    by = scale.repeat_interleave(16, dim=0)[:20].repeat_interleave(16, dim=1)[:, :40]
    assert torch.equal(found.dequantised(), weight.float() * by)


def test_one_scale_per_tensor_of_fp8() -> None:
    torch.manual_seed(0)
    weight = torch.randn(E, K).to(torch.float8_e4m3fn)
    scheme = scheme_of(quant_method="fp8", activation_scheme="static")
    tensors = {"weight": weight, "weight_scale": torch.tensor(0.25), "input_scale": torch.tensor(1.0)}
    assert torch.equal(scheme.read(tensors, "a layer").dequantised(), weight.float() / 4)


GROUP_OF_LAYERS = {"weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}}


@each(
    ("said", "words"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes'"),
        ({}, None),
        ({"bits": 4}, "quant_method None"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version 'gemv'"),
        ({"quant_method": "awq", "bits": 3}, "bits 3"),
        ({"quant_method": "gptq", "bits": 2}, "bits 2"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 7}, "group_size 7"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt 'e5m2'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size"),
        ({"quant_method": "compressed-tensors"}, "config_groups None"),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "nvfp4-pack-quantized",
                "config_groups": {"a": GROUP_OF_LAYERS},
            },
            "format 'nvfp4-pack-quantized'",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "config_groups": {"a": GROUP_OF_LAYERS, "b": {"weights": {"num_bits": 8, "type": "int"}}},
            },
            "one kind for all layers",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "float-quantized",
                "config_groups": {"a": {"weights": {"num_bits": 4, "type": "float"}}},
            },
            "4 bits of type float",
        ),
    ],
)
def test_unknown_settings_are_refused_by_name(said: Mapping[str, Any], words: str | None) -> None:
    if words is None:
        assert weight_scheme({"quantization_config": said}, "m") is None
        return
    with pytest.raises(UserError, match=words):
        weight_scheme({"quantization_config": said}, "m")


def test_tensors_that_are_missing_or_of_another_shape_are_refused() -> None:
    scheme = scheme_of(quant_method="gptq", bits=4, group_size=GROUP)
    tensors = {"qweight": torch.zeros(K // 8, E, dtype=torch.int32), "scales": torch.ones(2, E)}
    with pytest.raises(UserError, match=r"model\.q_proj has .* and no qzeros"):
        scheme.read(tensors, "model.q_proj")
    tensors["qzeros"] = torch.zeros(2, E // 8, dtype=torch.int32)
    scheme.read(tensors, "model.q_proj")
    with pytest.raises(UserError, match="does not give every group"):
        scheme.read({**tensors, "g_idx": torch.zeros(K)}, "model.q_proj")
    with pytest.raises(UserError, match="scales of shape"):
        scheme.read({**tensors, "scales": torch.ones(1, E)}, "model.q_proj")
    with pytest.raises(UserError, match="not finite"):
        scheme.read({**tensors, "scales": torch.full((2, E), torch.nan)}, "model.q_proj")
    blocks = scheme_of(quant_method="fp8", weight_block_size=[16, 16])
    with pytest.raises(UserError, match="needs a matrix of float8_e4m3fn"):
        blocks.read({"weight": torch.ones(E, K), "weight_scale_inv": torch.ones(1, 4)}, "a")
