"""Bits of a weight and kind of arithmetic, by quantisation.

On a GPU, the layers' matrices are quantised; embedding, head, norms and biases stay in 16 bits. A group of weights
shares a scale and, with 4 bits, a zero point, 16 bits each.

On a processor, blocks of 32 weights share a scale and perhaps a minimum (16 bits each), the head is quantised too, and
everything else is float32 (`target/quantise.py`). A GGUF file's matrices stay in such blocks as they are.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from eyas.errors import UserError
from eyas.quantization.quantization_config import weight_scheme

GROUP = 128
"""Default number of weights that share a scale."""


@dataclass(frozen=True, kw_only=True)
class Quantisation:
    """Format of weights in memory."""

    name: str
    bits: float
    """Bits of a weight in the layers' matrices, its share of scales included."""
    expert_bits: float | None = None
    """Bits of a weight of experts; None: as in other matrices."""
    other_bytes: int = 2
    """Bytes of every other weight, and of a number in keys and values."""
    arithmetic: str = "bf16"
    """Kind of arithmetic of matrix products."""
    embedding_bits: float | None = None
    """Bits of a weight of the embedding; None: as every other weight."""
    head_bits: float | None = None
    """Bits of a weight of a head that is not the embedding; None: as every other weight."""
    drafter_bits: float | None = None
    """Bits of a weight in the drafter's matrices; None: it is not quantised along with the target."""
    halved: bool = False
    """Whether matrices stay in bfloat16 and are multiplied as float32, as on processors with wide vectors."""
    option: str = ""
    """Value of `eyas serve --quantization` that makes this of any checkpoint."""

    @property
    def plain(self) -> bool:
        """Whether nothing is quantised; a server can convert any checkpoint to it."""
        return self.bits == 8 * self.other_bytes and self.expert_bits is None

    @property
    def dtype(self) -> str:
        """Name of torch's dtype of everything that is not quantised."""
        return self.name if self.plain else ("float32" if self.other_bytes == 4 else "bfloat16")

    def matrix_bytes(self, matrices: float, experts: float) -> float:
        """Bytes of this many weights in the layers' matrices, of which `experts` are of experts."""
        whole = ((matrices - experts) * self.bits + experts * (self.expert_bits or self.bits)) / 8
        return whole / 2 if self.halved else whole

    def vocabulary_bytes(self, weights: int, *, tied: bool) -> float:
        """Bytes of the embedding and of an untied head, each of this many weights."""
        other = 8 * self.other_bytes
        bits, head = self.embedding_bits or other, self.head_bits or (other / 2 if self.halved else other)
        return weights * (bits if tied else bits + head) / 8

    def head_bytes(self, weights: int, *, tied: bool) -> float:
        """Bytes that multiplying by the head reads."""
        bits = (self.embedding_bits if tied else self.head_bits) or 8 * self.other_bytes
        return weights * bits / (16 if self.halved else 8)


PLAIN = {
    "float32": Quantisation(name="float32", bits=32, other_bytes=4, arithmetic="fp32"),
    "bfloat16": Quantisation(name="bfloat16", bits=16),
    "float16": Quantisation(name="float16", bits=16),
}
MXFP4 = 4.25
"""Bits of a weight of experts in gpt-oss as published: 32 weights share an exponent of 8 bits."""
EIGHT, FOUR, FOUR_WITH_MINIMUM, EIGHT_WITH_MORE = 8.5, 4.5, 5.0, 9.0
"""Bits of a weight in a processor's blocks: with a scale; also with a minimum, or with a scale of each half."""
GGUF_BITS: Mapping[str, float] = {
    "Q4_0": FOUR,
    "Q4_1": FOUR_WITH_MINIMUM,
    "Q4_K": FOUR_WITH_MINIMUM,
    "Q8_0": EIGHT,
    "Q5_0": EIGHT,
    "Q5_1": EIGHT_WITH_MORE,
    "Q5_K": EIGHT_WITH_MORE,
    "Q6_K": EIGHT_WITH_MORE,
}
"""Bits in memory of the GGUF types that stay packed; other types become float32."""
LADDER = ("bfloat16", "fp8", "int4")
"""Formats that `--fit` tries, from fine to coarse."""
KINDS = (*PLAIN, "fp8", "int8", "int4")
_SHORT = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def parse_quantisation(name: str) -> Quantisation:
    """Read a name; int8 and int4 may end in their group size, as in int4-g64."""
    name = _SHORT.get(name, name)
    if name in PLAIN:
        return PLAIN[name]
    if name == "fp8":
        return Quantisation(name=name, bits=8 + 32 / GROUP**2, arithmetic="fp8", option=name)
    made = re.fullmatch(r"int([48])(?:-g(\d+))?", name)
    group = int(made[2] or GROUP) if made else 0
    if made is None or group < 1:
        raise UserError(f"quantisation {name!r} is not one of {', '.join(KINDS)}; groups are written as in int4-g64")
    # Products are in 16 bits: kernels for few rows unpack weights on the way.
    bits = 4 + 32 / group if made[1] == "4" else 8 + 16 / group
    return Quantisation(name=name, bits=bits, option="int4" if name in ("int4", f"int4-g{GROUP}") else "")


_PROCESSOR = Quantisation(name="", bits=EIGHT, other_bytes=4, arithmetic="fp32", head_bits=EIGHT, drafter_bits=EIGHT)


def in_blocks(name: str, *, tied: bool) -> Quantisation:
    """Format that `--quantization int8` or int4 makes on a processor."""
    bits = EIGHT if name == "int8" else FOUR_WITH_MINIMUM
    # A tied embedding is looked up in the quantised head.
    return replace(_PROCESSOR, name=name, bits=bits, embedding_bits=EIGHT if tied else None, option=name)


def gguf_quantisation(kinds: Mapping[str, tuple[str, int]], *, tied: bool) -> Quantisation | None:
    """Format of a GGUF file in memory, from type and size of its matrices; None where no type stays packed."""
    if not any(kind in GGUF_BITS for kind, _ in kinds.values()):
        return None
    sizes = [(GGUF_BITS.get(kind, 32), count) for name, (kind, count) in kinds.items() if name.startswith("blk.")]
    bits = sum(bits * count for bits, count in sizes) / sum(count for _, count in sizes)
    embedding = GGUF_BITS.get(kinds["token_embd.weight"][0], 32)
    head = embedding if tied else GGUF_BITS.get(kinds["output.weight"][0], 32)
    return replace(_PROCESSOR, name="gguf", bits=bits, embedding_bits=embedding, head_bits=head)


def stored_quantisation(config: Mapping[str, Any], source: str) -> Quantisation:
    """Format of a checkpoint as config.json states it."""
    stated = config.get("quantization_config") or config.get("compression_config")
    if not stated:
        text = config.get("text_config") or config
        dtype = text.get("dtype") or text.get("torch_dtype") or config.get("torch_dtype") or "float32"
        if dtype not in PLAIN:
            raise UserError(f"{source} is stored as {dtype!r}, not one of {', '.join(PLAIN)}; say --quantization")
        return PLAIN[str(dtype)]
    try:
        scheme = weight_scheme(config, source)
    except UserError as error:
        raise UserError(
            f"{source} is quantised by {stated.get('quant_method')!r} in a way that is not known here ({error}); say "
            f"what comes nearest with --quantization ({', '.join(KINDS)})"
        ) from error
    assert scheme is not None
    if scheme.kind == "mxfp4":
        return Quantisation(name="mxfp4", bits=16, expert_bits=MXFP4)
    # The scale of a whole row weighs next to nothing.
    name = "fp8" if scheme.kind == "fp8" else f"{scheme.kind}-g{scheme.group_size or 2**20}"
    return replace(parse_quantisation(name), option="")
