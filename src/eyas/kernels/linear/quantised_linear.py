"""Linear layers over weights of 4 or 8 bits in blocks, multiplied as integers, for decoding on a processor.

Decoding takes as long as reading the weights. Blocks of 32 with a scale, as GGUF files have them, are a quarter or an
eighth of float32; and integer products do four times as much at once, so that prompts gain too. quantised_linear.c says
what is computed and how weights lie.

The kinds of GGUF come in five formats here (`Blocks`): 4 or 8 bits, with a minimum per block or without, and 8 bits
with a scale for each half of a block. Kinds of 5 and 6 bits take 8.

Invariant: a row's result does not depend on how many rows are computed with it, to the last bit. So drafts change
nothing about what a quantised target says.

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
from eyas.kernels.linear.weight_memory import laid_apart
from eyas.kernels.native import load_native

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("quantised_linear.c")
BLOCK = 32
FOUR_BITS, MINIMA, SCALES_OF_HALVES = 1, 2, 4
"""What a format is made of, as quantised_linear.c has it."""
FORMATS = (0, FOUR_BITS, MINIMA, FOUR_BITS | MINIMA, SCALES_OF_HALVES)
Bits = Literal[4, 8]
Form = Literal["NEON", "VNNI", "AVX2", "PORTABLE"]
"""What quantised_linear.c can be made for; VNNI without AMX."""
TILED_ROWS = 32
"""Rows from which on AMX is used, where it is."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Blocks:
    """A matrix [N, K] in blocks: scale * q + minimum."""

    q_NK: Tensor
    """int8. Of 4 bits: 0 to 15 with a minimum, -8 to 7 without."""
    scale_NS: Tensor
    """float16."""
    minimum_NB: Tensor | None
    """float16."""
    bits: Bits

    @property
    def format(self) -> int:
        """What quantised_linear.c calls it."""
        halves = self.scale_NS.shape[1] > -(-self.q_NK.shape[1] // BLOCK)
        return (
            (FOUR_BITS if self.bits == 4 else 0)
            | (0 if self.minimum_NB is None else MINIMA)
            | (SCALES_OF_HALVES if halves else 0)
        )

    def rows(self, index: Tensor) -> "Blocks":
        """Some rows, in this order."""
        minimum = None if self.minimum_NB is None else self.minimum_NB[index]
        return replace(self, q_NK=self.q_NK[index], scale_NS=self.scale_NS[index], minimum_NB=minimum)

    def weight(self) -> Tensor:
        """[N, K], float32."""
        scales = self.scale_NS.shape[1] // -(-self.q_NK.shape[1] // BLOCK)
        inputs = self.q_NK.shape[1]
        scale_NK = self.scale_NS.float().repeat_interleave(BLOCK // scales, dim=1)[:, :inputs]
        weight_NK = scale_NK * self.q_NK
        if self.minimum_NB is not None:
            weight_NK += self.minimum_NB.float().repeat_interleave(BLOCK, dim=1)[:, :inputs]
        return weight_NK


@torch.no_grad()
def quantise(weight_NK: Tensor, bits: Bits) -> Blocks:
    """Blocks of a matrix, as GGUF's Q8_0 and Q4_1 choose them: 4 bits are too few to leave half of them unused."""
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
    """A published weight in blocks of 8 bits: its integers where a scale holds for whole blocks, else rounded anew."""
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
class QuantisedKernel:
    """The compiled product."""

    library: ctypes.CDLL
    made_by: str

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

    def __deepcopy__(self, memo: dict[int, Any]) -> "QuantisedKernel":
        return self  # code, not state: copies of a model share it

    @property
    def width(self) -> int:
        """Outputs in a panel, C."""
        return int(self.library.panel_width())

    @property
    def uses(self) -> str:
        """The instructions it multiplies with."""
        return str(self.library.uses().decode())

    @property
    def tiles(self) -> bool:
        """Whether many rows are multiplied by the processor's matrix unit (AMX)."""
        return bool(self.library.uses_tiles())

    def use_tiles(self, wanted: bool) -> None:
        """Switch the matrix unit on or off, where there is one: for all who use this library. Results are the same."""
        self.library.use_tiles(wanted)

    def workspace_bytes(self, inputs: int) -> int:
        """What a row takes beside its results."""
        return int(self.library.workspace_bytes(inputs))

    def linear(self, x: Tensor, layer: "QuantisedLinear", out: Tensor | None = None) -> Tensor:
        """As torch's linear; x and `out` are float32 on the processor, and lie densely but for x."""
        x = x.contiguous()
        y = x.new_empty((*x.shape[:-1], layer.out_features)) if out is None else out
        if x.dtype != torch.float32 or y.dtype != torch.float32:  # anything else would be read and written past its end
            raise TypeError(f"compiled products read and write float32, not {x.dtype} and {y.dtype}")
        rows = x.numel() // layer.in_features
        workspace = torch.empty(rows * self.workspace_bytes(layer.in_features), dtype=torch.uint8)
        self.library.quantised_linear(
            *(x.data_ptr(), rows, layer.in_features, ctypes.addressof(layer.parts), len(layer.parts)),
            *(y.data_ptr(), layer.out_features, workspace.data_ptr(), torch.get_num_threads()),
        )
        return y

    def rows(self, layer: "QuantisedLinear", ids: Tensor) -> Tensor:
        """Rows of the layer's only matrix, as float32 [..., K]."""
        assert len(layer.parts) == 1
        ids = ids.contiguous()
        y = torch.empty((*ids.shape, layer.in_features), dtype=torch.float32)
        self.library.dequantised_rows(
            ctypes.addressof(layer.parts), layer.in_features, ids.data_ptr(), ids.numel(), y.data_ptr()
        )
        return y

    def pack(self, blocks: Blocks) -> Tensor:
        """Panels of a matrix: bytes [P, B, ...]."""
        (outputs, inputs), width = blocks.q_NK.shape, self.width
        panels, count = -(-outputs // width), -(-inputs // BLOCK)
        missing = panels * width - outputs

        def heads(x_NS: Tensor) -> Tensor:
            """Numbers of blocks, as bytes [P, B, ...], all outputs of a panel side by side."""
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
    """Return the kernel and who compiled it, or None and the reason why there is none.

    It is made for what the processor can do best, unless tests name a form. AMX is used if it gives the same bits.
    """
    library, words = load_native(SOURCE, cache=cache, defines=() if form is None else (form,))
    if library is None:
        return None, words
    kernel = QuantisedKernel(library, words)
    if kernel.tiles and (differing := _differing_with_tiles(kernel)):
        kernel.use_tiles(False)
        logger.warning(
            f"AMX int8 is off: {differing} gave other results with it than without; products are by {kernel.uses}"
        )
    return (kernel, words) if _is_right(kernel) else (None, f"what {words} made computes wrongly")


@torch.no_grad()
def _is_right(kernel: QuantisedKernel) -> bool:
    """Try every format: the compiler is one that nobody here has met. All numbers are such that sums are exact."""
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
    """The first products that differ between the matrix unit and vectors, in words; none does where all is well."""
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
    """A packed matrix, with the bias that goes with it."""

    bytes_PBX: Tensor
    format: int
    outputs: int
    bias_N: Tensor | None

    @property
    def nbytes(self) -> int:
        """In memory."""
        return self.bytes_PBX.nbytes


class QuantisedLinear(nn.Module):
    """A linear layer for inference over one packed matrix, or several that read the same input."""

    def __init__(self, kernel: QuantisedKernel, panels: Sequence[Panels], in_features: int) -> None:
        super().__init__()
        self.kernel = kernel
        self.in_features, self.out_features = in_features, sum(one.outputs for one in panels)
        self.panels = tuple(panels)  # no buffers: nothing may cast or move them
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
        """Pack a matrix."""
        outputs, inputs = blocks.q_NK.shape
        bias_N = None if bias_N is None else bias_N.detach().float().contiguous()
        return cls(kernel, [Panels(laid_apart(kernel.pack(blocks)), blocks.format, outputs, bias_N)], inputs)

    def __deepcopy__(self, memo: dict[int, Any]) -> "QuantisedLinear":
        # A drafter's are written when it gets other weights: a copy has its own.
        panels = [replace(one, bytes_PBX=laid_apart(one.bytes_PBX), bias_N=deepcopy(one.bias_N)) for one in self.panels]
        return QuantisedLinear(self.kernel, panels, self.in_features)

    def packed(self) -> list[Tensor]:
        """What its weights take memory for."""
        return [one.bytes_PBX for one in self.panels]

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weights."""
        return sum(one.nbytes for one in self.panels)

    @property
    def weight(self) -> Tensor:
        """The weight as nn.Linear keeps it, [N, K], dequantised to float32: a copy made on each call."""
        alone = [QuantisedLinear(self.kernel, [one], self.in_features) for one in self.panels]
        return torch.cat([self.kernel.rows(one, torch.arange(one.out_features)) for one in alone])

    @property
    def bias(self) -> Tensor | None:
        """[N], or None."""
        if all(one.bias_N is None for one in self.panels):
            return None
        return torch.cat([torch.zeros(one.outputs) if one.bias_N is None else one.bias_N for one in self.panels])

    def forward(self, x: Tensor) -> Tensor:
        """The outputs of rows [..., K], [..., N]."""
        if x.requires_grad and torch.is_grad_enabled():
            raise RuntimeError("a quantised linear has no gradient; load the target with quantization none")
        return self.kernel.linear(x.float(), self).to(x.dtype)

    def product(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """As `QuantisedKernel.linear`."""
        return self.kernel.linear(x, self, out)

    def extra_repr(self) -> str:
        """As nn.Linear prints itself."""
        return f"in_features={self.in_features}, out_features={self.out_features}, {self.nbytes} bytes"

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """A saved model holds the names and shapes of nn.Linear."""
        destination[prefix + "weight"] = self.weight
        if self.bias is not None:
            destination[prefix + "bias"] = self.bias


def joined_quantised(linears: Sequence[QuantisedLinear]) -> QuantisedLinear:
    """One layer with the outputs of all, in order, on the same memory; x is quantised once for all."""
    first = linears[0]
    return QuantisedLinear(first.kernel, [one for linear in linears for one in linear.panels], first.in_features)


def replace_by_blocks(model: nn.Module, kernel: QuantisedKernel, blocks_of: Callable[[nn.Linear], Blocks]) -> int:
    """Replace every nn.Linear inside `model`, in place, and return how many; the model can no longer be trained."""
    count = 0
    for parent in list(model.modules()):
        for name, linear in list(parent.named_children()):
            if type(linear) is nn.Linear and linear.weight.numel():
                setattr(parent, name, QuantisedLinear.of(kernel, blocks_of(linear), linear.bias))
                count += 1
    return count


class QuantisedEmbedding(nn.Module):
    """Embeddings looked up in a packed matrix, which a head may be multiplied with."""

    def __init__(self, table: QuantisedLinear, scale: float | None = None) -> None:
        super().__init__()
        self.table = table
        self.num_embeddings, self.embedding_dim = table.out_features, table.in_features
        self.scale = scale
        """What some models multiply embeddings by."""

    def __len__(self) -> int:
        return self.num_embeddings

    @property
    def weight(self) -> Tensor:
        """The table [V, D], dequantised to float32: a copy made on each call."""
        return self.table.weight

    def rows(self, ids: Tensor) -> Tensor:
        """Rows of the table [..., D], float32."""
        return self.table.kernel.rows(self.table, ids)

    def forward(self, ids: Tensor) -> Tensor:
        """Embeddings [..., D]."""
        rows = self.rows(ids)
        return rows if self.scale is None else rows.mul_(self.scale)
