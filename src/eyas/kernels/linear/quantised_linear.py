"""Linear layers of 4- or 8-bit weights in blocks, multiplied as integers on a CPU.

Decoding takes as long as reading the weights. Blocks of 32 with a scale, as GGUF files have them, are a quarter or an
eighth of float32; and integer instructions do four times as much at once, which helps prompts too. quantised_linear.c
says how weights lie and what is computed.

GGUF's kinds are stored in five formats (`Blocks`): 4 or 8 bits, with or without a minimum per block, and 8 bits with a
scale per half block. Kinds of 5 and 6 bits take 8.

Invariant: a row's result is the same to the last bit however many rows are computed with it. So drafts do not change
the tokens of a quantised target.

Shapes: M rows, N outputs, K inputs, B blocks, S scales of an output (B, or 2 B by halves); P panels of C outputs each.
"""

import ctypes
import logging
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from eyas.kernels.linear.quantised_weight import QuantisedWeight
from eyas.kernels.linear.served_linear import CompiledKernel, CompiledLinear, ProductWeight
from eyas.kernels.linear.weight_memory import laid_apart
from eyas.kernels.native import load_native

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("quantised_linear.c")
BLOCK = 32
FOUR_BITS, MINIMA, SCALES_OF_HALVES = 1, 2, 4
"""Flags of a format, as in quantised_linear.c."""
FORMATS = (0, FOUR_BITS, MINIMA, FOUR_BITS | MINIMA, SCALES_OF_HALVES)
Bits = Literal[4, 8]
Form = Literal["NEON", "VNNI", "AVX2", "PORTABLE"]
"""Instruction sets that quantised_linear.c can be compiled for; VNNI without AMX."""
TILED_ROWS = 32
"""AMX, if there is one, is used from this many rows on."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Blocks:
    """A matrix [N, K] in blocks: scale * q + minimum."""

    q_NK: Tensor
    """Integers, int8. With 4 bits: 0 to 15 with a minimum, -8 to 7 without."""
    scale_NS: Tensor
    minimum_NB: Tensor | None
    bits: Bits

    @property
    def format(self) -> int:
        """The format flags, as in quantised_linear.c."""
        halves = self.scale_NS.shape[1] > -(-self.q_NK.shape[1] // BLOCK)
        return (
            (FOUR_BITS if self.bits == 4 else 0)
            | (0 if self.minimum_NB is None else MINIMA)
            | (SCALES_OF_HALVES if halves else 0)
        )

    def rows(self, index: Tensor) -> "Blocks":
        minimum = None if self.minimum_NB is None else self.minimum_NB[index]
        return replace(self, q_NK=self.q_NK[index], scale_NS=self.scale_NS[index], minimum_NB=minimum)

    def weight(self) -> Tensor:
        scales = self.scale_NS.shape[1] // -(-self.q_NK.shape[1] // BLOCK)
        inputs = self.q_NK.shape[1]
        scale_NK = self.scale_NS.float().repeat_interleave(BLOCK // scales, dim=1)[:, :inputs]
        weight_NK = scale_NK * self.q_NK
        if self.minimum_NB is not None:
            weight_NK += self.minimum_NB.float().repeat_interleave(BLOCK, dim=1)[:, :inputs]
        return weight_NK


@torch.no_grad()
def quantise(weight_NK: Tensor, bits: Bits) -> Blocks:
    """Quantise a matrix to blocks as GGUF's Q8_0 and Q4_1 do: 4 bits need a minimum to use their whole range."""
    outputs, inputs = weight_NK.shape
    weight_NBI = functional.pad(weight_NK.float(), (0, -inputs % BLOCK)).view(outputs, -1, BLOCK)
    lowest_NB, highest_NB = weight_NBI.aminmax(dim=-1)
    if bits == 4:
        scale_NB, minimum_NB = ((highest_NB - lowest_NB) / 15).half(), lowest_NB.half()
        weight_NBI = weight_NBI - minimum_NB.float()[..., None]
    else:
        scale_NB, minimum_NB = (torch.maximum(highest_NB, -lowest_NB) / 127).half(), None
    divisor_NB1 = scale_NB.float()[..., None]
    q_NBI = torch.where(divisor_NB1 == 0, 0.0, weight_NBI / divisor_NB1).round_()
    q_NBI = q_NBI.clamp_(0, 15) if bits == 4 else q_NBI.clamp_(-127, 127)
    q_NK = q_NBI.to(torch.int8).view(outputs, -1)[:, :inputs]
    return Blocks(q_NK=q_NK, scale_NS=scale_NB, minimum_NB=minimum_NB, bits=bits)


@torch.no_grad()
def as_blocks(weight: QuantisedWeight) -> Blocks:
    """Convert a published weight to blocks of 8 bits: exactly if its scales cover whole blocks, else rounded again."""
    inputs = weight.q_EK.shape[1]
    whole = weight.scale_EG.shape[1] == 1 or weight.group % BLOCK == 0
    if (
        weight.q_EK.dtype == torch.int8
        and weight.bits == 8
        and weight.zero_EG is None
        and weight.order_K is None
        and whole
    ):
        scale_EB = weight.scale_EG.repeat_interleave(-(-weight.group // BLOCK), dim=1)[:, : -(-inputs // BLOCK)]
        halved_EB = scale_EB.half()
        if torch.allclose(halved_EB.float(), scale_EB, rtol=2**-9, atol=0.0):  # small ones lose digits in 16 bits
            return Blocks(q_NK=weight.q_EK.cpu(), scale_NS=halved_EB.cpu(), minimum_NB=None, bits=8)
    return quantise(weight.dequantised(), 8)


class _Matrix(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("panels", "bias")),
        *((name, ctypes.c_int64) for name in ("format", "outputs")),
    )


@dataclass(frozen=True, eq=False)
class QuantisedKernel(CompiledKernel):
    """The compiled product."""

    def __post_init__(self) -> None:
        pointer, size = ctypes.c_void_p, ctypes.c_long
        library = self.library
        library.quantised_linear.argtypes = [
            *(pointer, size, size, pointer, size, pointer, size, pointer),
            ctypes.c_int,
        ]
        library.dequantised_rows.argtypes = [pointer, size, pointer, size, pointer]
        library.quantised_linear.restype = library.dequantised_rows.restype = None
        library.workspace_bytes.argtypes, library.workspace_bytes.restype = [size], size
        library.uses.restype = ctypes.c_char_p

    @property
    def uses(self) -> str:
        """The instruction set that it uses."""
        return str(self.library.uses().decode())

    def use_tiles(self, wanted: bool) -> None:
        """Switch the matrix unit on or off, if there is one, for every user of this library. Results are the same."""
        self.library.use_tiles(wanted)

    def workspace_bytes(self, inputs: int) -> int:
        return int(self.library.workspace_bytes(inputs))

    def linear(self, x: Tensor, layer: "QuantisedLinear", out: Tensor | None = None) -> Tensor:
        """torch's linear; x and `out` are float32 on the CPU, and `out` is contiguous."""
        x = x.contiguous()
        y = self.outputs_of(x, layer.out_features, out)
        rows = x.numel() // layer.in_features
        workspace = torch.empty(rows * self.workspace_bytes(layer.in_features), dtype=torch.uint8)
        self.library.quantised_linear(
            *(x.data_ptr(), rows, layer.in_features, ctypes.addressof(layer.parts), len(layer.parts)),
            *(y.data_ptr(), layer.out_features, workspace.data_ptr(), torch.get_num_threads()),
        )
        return y

    def rows(self, layer: "QuantisedLinear", ids: Tensor) -> Tensor:
        """Rows of the layer's only matrix, float32 [..., K]."""
        assert len(layer.parts) == 1
        ids = ids.contiguous()
        y = torch.empty((*ids.shape, layer.in_features), dtype=torch.float32)
        self.library.dequantised_rows(
            ctypes.addressof(layer.parts), layer.in_features, ids.data_ptr(), ids.numel(), y.data_ptr()
        )
        return y

    def pack(self, blocks: Blocks) -> Tensor:
        """Lay a matrix out in panels: bytes [P, B, ...]."""
        (outputs, inputs), width = blocks.q_NK.shape, self.width
        panels, count = -(-outputs // width), -(-inputs // BLOCK)
        missing = panels * width - outputs

        def heads(x_NS: Tensor) -> Tensor:
            """Scales or minima as bytes [P, B, ...], all outputs of a panel side by side."""
            x_PCBH = functional.pad(x_NS, (0, 0, 0, missing)).view(panels, width, count, -1)
            return x_PCBH.permute(0, 2, 3, 1).contiguous().view(torch.uint8).view(panels, count, -1)

        q_NK = functional.pad(blocks.q_NK, (0, count * BLOCK - inputs, 0, missing))
        q_NK, is_unsigned = q_NK.view(torch.uint8), bool(self.library.unsigned_bytes())
        if blocks.bits == 8:
            q_NK = q_NK ^ 128 if is_unsigned else q_NK
        elif blocks.minimum_NB is None:
            q_NK = q_NK + 8 & 15 if is_unsigned else q_NK & 15
        q_PBJCI = q_NK.view(panels, width, count, BLOCK // 4, 4).permute(0, 2, 3, 1, 4)
        if blocks.bits == 4:
            q_PBJCI = q_PBJCI[:, :, :4] | q_PBJCI[:, :, 4:] << 4
        minima = () if blocks.minimum_NB is None else (heads(blocks.minimum_NB),)
        return torch.cat([heads(blocks.scale_NS), *minima, q_PBJCI.reshape(panels, count, -1)], dim=2)


def load_quantised(*, cache: Path | None = None, form: Form | None = None) -> tuple[QuantisedKernel | None, str]:
    """Return the kernel and its compiler, or None and the reason why there is none.

    It is compiled for the best instructions of this CPU, unless tests name a form. AMX is used if it gives the same
    bits.
    """
    library, words = load_native(SOURCE, cache=cache, defines=() if form is None else (form,))
    if library is None:
        return None, words
    kernel = QuantisedKernel(library)
    if kernel.tiles and (differing := _differing_with_tiles(kernel)):
        kernel.use_tiles(False)
        logger.warning(
            f"AMX int8 is off: {differing} gave other results with it than without; products are by {kernel.uses}"
        )
    return (kernel, words) if _is_right(kernel) else (None, f"the library compiled by {words} computes wrong results")


@torch.no_grad()
def _is_right(kernel: QuantisedKernel) -> bool:
    """Try every format, since this compiler may never have been tested. The numbers are such that sums are exact."""
    outputs, inputs = 2 * kernel.width + 1, 5 * BLOCK + 3
    x_MK = (torch.arange(19 * inputs).view(19, -1) * 37 % 255 - 127).float()
    x_MK[:, ::BLOCK] = 127.0  # then a block's scale is 1
    for format_ in FORMATS:
        q_NK = torch.arange(outputs * inputs).view(outputs, -1) * 29
        four, with_minima = bool(format_ & FOUR_BITS), bool(format_ & MINIMA)
        q_NK = q_NK % 16 - (0 if with_minima else 8) if four else q_NK % 256 - 128
        scales = 12 if format_ & SCALES_OF_HALVES else 6
        blocks = Blocks(
            q_NK=q_NK.to(torch.int8),
            scale_NS=2.0 ** (torch.arange(outputs * scales).view(outputs, -1) % 3 - 1).half(),
            minimum_NB=(torch.arange(outputs * 6).view(outputs, -1) % 5 - 2).half() if with_minima else None,
            bits=4 if four else 8,
        )
        layer = QuantisedLinear.of(kernel, blocks, torch.arange(outputs).float())
        if not torch.equal(layer.weight, blocks.weight()):
            return False
        expected = functional.linear(x_MK.double(), blocks.weight().double(), torch.arange(outputs).double()).float()
        if any(not torch.equal(layer(x_MK[:rows]), expected[:rows]) for rows in (1, 2, 3, 4, 19)):
            return False
    return True


@torch.no_grad()
def _differing_with_tiles(kernel: QuantisedKernel) -> str:
    """Name the first product that differs between the matrix unit and vectors; empty if none does."""
    outputs, inputs = 2 * kernel.width + 1, 17 * BLOCK + 3
    generator = torch.Generator().manual_seed(0)
    x_MK = torch.randn(5 * TILED_ROWS - 11, inputs, generator=generator)
    for format_ in FORMATS:
        bits: Bits = 4 if format_ & FOUR_BITS else 8
        low, high = (0, 16) if bits == 4 and format_ & MINIMA else (-(2 ** (bits - 1)), 2 ** (bits - 1))
        blocks = Blocks(
            q_NK=torch.randint(low, high, (outputs, inputs), generator=generator).to(torch.int8),
            scale_NS=torch.randn(outputs, 36 if format_ & SCALES_OF_HALVES else 18, generator=generator).half(),
            minimum_NB=torch.randn(outputs, 18, generator=generator).half() if format_ & MINIMA else None,
            bits=bits,
        )
        layer = QuantisedLinear.of(kernel, blocks)
        for rows in (TILED_ROWS, TILED_ROWS + 1, len(x_MK)):
            tiled = layer(x_MK[:rows])
            kernel.use_tiles(False)
            same = torch.equal(tiled, layer(x_MK[:rows]))
            kernel.use_tiles(True)
            if not same:
                return f"{rows} rows by {bits} bits (format {format_})"
    return ""


@dataclass(frozen=True, eq=False)
class Panels:
    """A packed matrix and its bias."""

    bytes_PBX: Tensor
    format: int
    outputs: int
    bias_N: Tensor | None


class QuantisedLinear(CompiledLinear):
    """A linear layer of one packed matrix, or of several that read the same input."""

    rounds_inputs = True
    shared_packed = True

    def __init__(self, kernel: QuantisedKernel, panels: Sequence[Panels], in_features: int) -> None:
        super().__init__()
        self.kernel = kernel
        self.in_features, self.out_features = in_features, sum(one.outputs for one in panels)
        self.panels = tuple(panels)  # not buffers: nothing may cast or move them
        self.parts = (_Matrix * len(panels))(
            *(
                _Matrix(
                    one.bytes_PBX.data_ptr(),
                    None if one.bias_N is None else one.bias_N.data_ptr(),
                    one.format,
                    one.outputs,
                )
                for one in panels
            )
        )

    @classmethod
    def of(cls, kernel: QuantisedKernel, blocks: Blocks, bias_N: Tensor | None = None) -> "QuantisedLinear":
        outputs, inputs = blocks.q_NK.shape
        bias_N = None if bias_N is None else bias_N.detach().float().contiguous()
        return cls(kernel, [Panels(laid_apart(kernel.pack(blocks)), blocks.format, outputs, bias_N)], inputs)

    def __deepcopy__(self, memo: dict[int, Any]) -> "QuantisedLinear":
        # A swap writes new weights into a drafter's panels, so a copy needs its own.
        panels = [replace(one, bytes_PBX=laid_apart(one.bytes_PBX), bias_N=deepcopy(one.bias_N)) for one in self.panels]
        return QuantisedLinear(self.kernel, panels, self.in_features)

    def packed(self) -> list[Tensor]:
        return [one.bytes_PBX for one in self.panels]

    def product_weight(self) -> ProductWeight:
        return ProductWeight(
            parts=ctypes.addressof(self.parts),
            inputs=self.in_features,
            outputs=self.out_features,
            part_count=len(self.parts),
        )

    @property
    def steps(self) -> dict[str, Any]:
        library = self.kernel.library
        return {"quantised_product": library.quantised_linear, "packed_rows": library.dequantised_rows}

    @property
    def workspace_bytes(self) -> int:
        return self.kernel.workspace_bytes(self.in_features)

    @property
    def weight(self) -> Tensor:
        alone = [QuantisedLinear(self.kernel, [one], self.in_features) for one in self.panels]
        return torch.cat([self.kernel.rows(one, torch.arange(one.out_features)) for one in alone])

    @property
    def bias(self) -> Tensor | None:  # type: ignore[override]
        if all(one.bias_N is None for one in self.panels):
            return None
        return torch.cat([torch.zeros(one.outputs) if one.bias_N is None else one.bias_N for one in self.panels])

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float()).to(x.dtype)

    def product(self, x_NK: Tensor, out_NE: Tensor | None = None, *, decoding: bool = False) -> Tensor:
        return self.kernel.linear(x_NK, self, out_NE)

    @classmethod
    def join(cls, linears: Sequence["QuantisedLinear"]) -> "QuantisedLinear":
        """Always possible; rows are rounded once for all parts."""
        first = linears[0]
        return cls(first.kernel, [one for linear in linears for one in linear.panels], first.in_features)


def replace_by_blocks(model: nn.Module, kernel: QuantisedKernel, blocks_of: Callable[[nn.Linear], Blocks]) -> int:
    """Replace every nn.Linear inside `model`, in place, and return how many; the model can no longer be trained."""
    count = 0
    for parent in list(model.modules()):
        for name, linear in list(parent.named_children()):
            if type(linear) is nn.Linear and linear.weight.numel():
                setattr(parent, name, QuantisedLinear.of(kernel, blocks_of(linear), linear.bias))
                count += 1
    return count
