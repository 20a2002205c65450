"""How many bits a weight takes, and at which speed it is multiplied.

On a GPU, formats for serving make the layers' matrices smaller and leave embedding, head, norms and biases in 16 bits.
A group of weights shares a scale and, with 4 bits, a zero point, 16 bits each.

On a processor, blocks of 32 weights share a scale and perhaps a minimum (16 bits each), the head is quantised too, and
what is not is float32 (`target/quantise.py`). A GGUF file's matrices stay as they are, in these blocks.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from eyas.errors import UserError
from eyas.quantization.quantization_config import weight_scheme

GROUP = 128
"""Weights that share a scale, unless a format says otherwise."""


@dataclass(frozen=True, kw_only=True)
class Quantisation:
    """How weights are kept."""

    name: str
    bits: float
    """Of a weight in a matrix of the layers, its share of scales included."""
    expert_bits: float | None = None
    """Of a weight of experts; None: as in other matrices."""
    other_bytes: int = 2
    """Of every other weight, and of keys and values."""
    arithmetic: str = "bf16"
    """What the matrices are multiplied in."""
    embedding_bits: float | None = None
    """Of a weight of the embedding; None: as every other weight."""
    head_bits: float | None = None
    """Of a weight of the head, where that is not the embedding."""
    drafter_bits: float | None = None
    """Of a weight in a drafter's matrices; None: the drafter is not quantised."""
    halved: bool = False
    """Whether matrices lie in bfloat16 and are multiplied as float32: processors with wide vectors keep them as they
    are stored."""
    option: str = ""
    """What `eyas serve --quantization` is told to have it of any checkpoint."""

    @property
    def plain(self) -> bool:
        """Whether nothing is quantised: a server can do it with any checkpoint, by converting."""
        return self.bits == 8 * self.other_bytes and self.expert_bits is None

    @property
    def dtype(self) -> str:
        """Of what is not quantised, in torch's words."""
        return self.name if self.plain else ("float32" if self.other_bytes == 4 else "bfloat16")

    def matrix_bytes(self, matrices: float, experts: float) -> float:
        """Of so many weights in the layers' matrices, so many of them of experts."""
        whole = ((matrices - experts) * self.bits + experts * (self.expert_bits or self.bits)) / 8
        return whole / 2 if self.halved else whole

    def vocabulary_bytes(self, weights: int, *, tied: bool) -> float:
        """Of the embedding and of a head of its own, each of so many weights."""
        other = 8 * self.other_bytes
        bits, head = self.embedding_bits or other, self.head_bits or (other / 2 if self.halved else other)
        return weights * (bits if tied else bits + head) / 8

    def head_bytes(self, weights: int, *, tied: bool) -> float:
        """What multiplying by the head reads."""
        bits = (self.embedding_bits if tied else self.head_bits) or 8 * self.other_bytes
        return weights * bits / (16 if self.halved else 8)


def _grouped(bits: int, group: int) -> float:
    """Of a weight with its share of the group's scale, and with 4 bits of its zero point: 16 bits each."""
    return bits + (32 if bits == 4 else 16) / group


PLAIN = {
    "float32": Quantisation(name="float32", bits=32, other_bytes=4, arithmetic="fp32"),
    "bfloat16": Quantisation(name="bfloat16", bits=16),
    "float16": Quantisation(name="float16", bits=16),
}
MXFP4 = 4.25
"""Bits of a weight of experts as gpt-oss is published: an exponent of 8 bits for every 32."""
EIGHT, FOUR, FOUR_WITH_MINIMUM, EIGHT_WITH_MORE = 8.5, 4.5, 5.0, 9.0
"""Bits of a weight in a processor's blocks: with a scale; with a minimum, or a scale of each half, as well."""
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
"""Kinds of GGUF that stay packed, in memory; others are computed from float32."""
LADDER = ("bfloat16", "fp8", "int4")
"""From fine to coarse: what `--fit` tries."""
KINDS = (*PLAIN, "fp8", "int8", "int4")
_SHORT = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def parse_quantisation(name: str) -> Quantisation:
    """By name; int8 and int4 may end in the size of their groups, as in int4-g64."""
    name = _SHORT.get(name, name)
    if name in PLAIN:
        return PLAIN[name]
    if name == "fp8":
        return Quantisation(name=name, bits=8 + 32 / GROUP**2, arithmetic="fp8", option=name)
    made = re.fullmatch(r"int([48])(?:-g(\d+))?", name)
    group = int(made[2] or GROUP) if made else 0
    if made is None or group < 1:
        raise UserError(f"quantisation {name!r} is not one of {', '.join(KINDS)}; groups are told as in int4-g64")
    # Both are computed in 16 bits: kernels for few rows unpack weights on the way.
    return Quantisation(
        name=name, bits=_grouped(int(made[1]), group), option="int4" if name in ("int4", f"int4-g{GROUP}") else ""
    )


def in_blocks(name: str, *, tied: bool) -> Quantisation:
    """int8 or int4 as a processor makes them of any checkpoint."""
    return _on_processor(
        name,
        bits=EIGHT if name == "int8" else FOUR_WITH_MINIMUM,
        embedding_bits=EIGHT if tied else None,  # looked up in the head
        head_bits=EIGHT,
        option=name,
    )


def _on_processor(
    name: str, *, bits: float, embedding_bits: float | None, head_bits: float, option: str = ""
) -> Quantisation:
    return Quantisation(
        name=name,
        bits=bits,
        other_bytes=4,
        arithmetic="fp32",
        embedding_bits=embedding_bits,
        head_bits=head_bits,
        drafter_bits=EIGHT,
        option=option,
    )


def gguf_quantisation(kinds: Mapping[str, tuple[str, int]], *, tied: bool) -> Quantisation | None:
    """A GGUF file's matrices as they lie in memory, from kind and size by name; None where no kind stays packed."""
    matrices = {name: of for name, of in kinds.items() if name.startswith("blk.")}
    if not any(kind in GGUF_BITS for kind, _ in kinds.values()):
        return None

    def bits(named: Mapping[str, tuple[str, int]]) -> float:
        return sum(GGUF_BITS.get(kind, 32) * count for kind, count in named.values()) / sum(
            c for _, c in named.values()
        )

    embedding = bits({"it": kinds["token_embd.weight"]})
    head = embedding if tied else bits({"it": kinds["output.weight"]})
    return _on_processor("gguf", bits=bits(matrices), embedding_bits=embedding, head_bits=head)


def stored_quantisation(config: Mapping[str, Any], source: str) -> Quantisation:
    """What config.json says that the checkpoint is."""
    said = config.get("quantization_config") or config.get("compression_config")
    if not said:
        text = config.get("text_config") or config
        dtype = text.get("dtype") or text.get("torch_dtype") or config.get("torch_dtype") or "float32"
        if dtype not in PLAIN:
            raise UserError(f"{source} is stored as {dtype!r}, not one of {', '.join(PLAIN)}; say --quantisation")
        return PLAIN[str(dtype)]
    try:
        scheme = weight_scheme(config, source)
    except UserError as error:
        raise UserError(
            f"{source} is quantised by {said.get('quant_method')!r} in a way that is not known here ({error}); say "
            f"what comes nearest with --quantisation ({', '.join(KINDS)})"
        ) from error
    assert scheme is not None
    if scheme.kind == "mxfp4":
        return Quantisation(name="mxfp4", bits=16, expert_bits=MXFP4)
    # A group that is a whole row has a scale that weighs nothing.
    name = "fp8" if scheme.kind == "fp8" else f"{scheme.kind}-g{scheme.group_size or 2**20}"
    return replace(parse_quantisation(name), option="")
