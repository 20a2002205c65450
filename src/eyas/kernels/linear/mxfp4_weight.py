"""MXFP4 matrices of a layer's experts: 4-bit floats (e2m1), 32 of which share a power of two (e8m0).

    weight = (-1)^sign * (0, 0.5, 1, 1.5, 2, 3, 4, 6)[magnitude] * 2^(exponent - 127)

Checkpoints have bytes of two numbers, the lower four bits first, and one byte per exponent. In memory they lie as
`w4a16_triton.py` has integers, so that unpacking moves nothing: blocks of 4 planes of 32 inputs, the last one padded
with zeros; one word of 32 bits has the exponents of a block, the first plane's lowest. A matrix of 2,880 inputs takes
4.35 bits per weight, and 4.25 in the checkpoint.

bfloat16 and float32 hold every such number exactly; float16 those that are not too large or too small.

Shapes: E experts, O outputs, K inputs, G groups of 32 inputs, P = 16 pairs of a group, W words of four weights, B
blocks of 128 inputs, J = 4 planes of a block.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from eyas.kernels.linear.planes import PLANES, pack_planes, unpack_planes

GROUP = 32
"""Weights that share an exponent; also the inputs of a plane."""
BLOCK = PLANES * GROUP
"""Inputs of a block."""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
LEAST = 0x00400000
"""2^-127 as the bits of a float32: the value of exponent 0, which float32 has no exponent for."""


def numbers_of(codes: Tensor, exponents: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantise codes 0..15 [..., K] with exponents [..., K / 32]."""
    scales = (exponents.int() << 23).clamp(min=LEAST).view(torch.float32)
    values = torch.tensor(E2M1, device=codes.device)[codes.int()].view(*scales.shape, GROUP)
    numbers: Tensor = values * scales[..., None]
    return numbers.flatten(-2).to(dtype)


def codes_of(pairs: Tensor) -> Tensor:
    """Unpack published bytes [..., K / 32, 16] into codes 0..15 [..., K]; uint8."""
    return torch.stack([pairs & 15, pairs >> 4], dim=-1).flatten(-3)


def dequantised_mxfp4(pairs_EOGP: Tensor, exponent_EOG: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantise published matrices [E, O, K]; expert by expert, since intermediate results take several times the
    memory.
    """
    experts, outputs, groups = exponent_EOG.shape
    weight_EOK = torch.empty(experts, outputs, groups * GROUP, dtype=dtype, device=pairs_EOGP.device)
    for e in range(experts):
        weight_EOK[e] = numbers_of(codes_of(pairs_EOGP[e]), exponent_EOG[e], dtype)
    return weight_EOK


@dataclass(frozen=True, kw_only=True, eq=False)
class Mxfp4Weight:
    """The packed matrices of all experts."""

    words_EOW: Tensor
    exponents_EBO: Tensor
    inputs: int

    @classmethod
    def of(cls, pairs_EOGP: Tensor, exponent_EOG: Tensor) -> "Mxfp4Weight":
        """Pack published matrices, expert by expert."""
        experts, outputs, groups = exponent_EOG.shape
        inputs = groups * GROUP
        blocks = -(-inputs // BLOCK)
        device = pairs_EOGP.device
        words_EOW = torch.empty(experts, outputs, blocks * GROUP, dtype=torch.int16, device=device)
        exponents_EBO = torch.empty(experts, blocks, outputs, dtype=torch.int32, device=device)
        shift_J = torch.arange(0, 8 * PLANES, 8, dtype=torch.int32, device=device)
        for e in range(experts):
            codes_OK = functional.pad(codes_of(pairs_EOGP[e]), (0, blocks * BLOCK - inputs))
            words_EOW[e] = pack_planes(codes_OK, GROUP)
            padded_OG = functional.pad(exponent_EOG[e].int(), (0, blocks * PLANES - groups))
            # The parts have no bit in common; their sum would no longer be int32.
            parts_OBJ = padded_OG.view(outputs, blocks, PLANES) << shift_J
            exponents_EBO[e] = (parts_OBJ[..., 0] | parts_OBJ[..., 1] | parts_OBJ[..., 2] | parts_OBJ[..., 3]).t()
        return cls(words_EOW=words_EOW, exponents_EBO=exponents_EBO, inputs=inputs)

    @property
    def count(self) -> int:
        return len(self.words_EOW)

    @property
    def outputs(self) -> int:
        return self.words_EOW.shape[1]

    def packed(self) -> list[Tensor]:
        return [self.words_EOW, self.exponents_EBO]

    def dequantised(self, expert: int, dtype: torch.dtype) -> Tensor:
        """The matrix [O, K] of one expert: a copy."""
        codes_OK = unpack_planes(self.words_EOW[expert], GROUP)
        shift_J = torch.arange(0, 8 * PLANES, 8, dtype=torch.int32, device=codes_OK.device)
        exponent_OG = ((self.exponents_EBO[expert].t()[..., None] >> shift_J) & 255).flatten(1)
        return numbers_of(codes_OK, exponent_OG, dtype)[:, : self.inputs].contiguous()
