"""GGUF's quantised kinds as blocks for the integer product (`kernels/linear/quantised_linear.py`).

Every kind is a number of few bits times a scale, shared by 16 or 32 neighbours, and some add a minimum. Kinds with `_K`
have scales of scales: those are multiplied out and rounded to half precision, which changes a weight by at most 1/2048,
far less than its own rounding. Numbers of 5 and 6 bits take 8. A new kind is a function and an entry in `_READERS`.

GGUF's documentation specifies the layouts of blocks; the tests compare with the `gguf` package.

Shapes: N rows, K numbers of a row, B blocks of 32, U blocks of 256.
"""

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType as Kind

from eyas.kernels.linear.quantised_linear import Bits, Blocks

Bytes = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.int8]
Floats = npt.NDArray[np.float32]


def blocks_of(stored_NX: Bytes, kind: Kind, inputs: int) -> Blocks:
    """Read rows as they lie in a file."""
    return _READERS[kind](stored_NX, inputs)


def is_packable(kind: Kind) -> bool:
    """Whether `blocks_of` can read this kind."""
    return kind in _READERS


def _halves(bytes_: Bytes) -> Floats:
    """Half-precision numbers in the last dimension, as float32."""
    return np.ascontiguousarray(bytes_).view(np.float16).astype(np.float32)


def _blocks(q: Numbers, scale: Floats, minimum: Floats | None, bits: Bits, inputs: int) -> Blocks:
    rows = len(q)
    return Blocks(
        q_NK=torch.from_numpy(q.reshape(rows, inputs)),
        scale_NS=torch.from_numpy(scale.reshape(rows, -1)).half(),
        minimum_NB=None if minimum is None else torch.from_numpy(minimum.reshape(rows, -1)).half(),
        bits=bits,
    )


def _nibbles(bytes_: Bytes) -> Numbers:
    """The lower four bits of all bytes of a block, then the upper four."""
    return np.concatenate([bytes_ & 15, bytes_ >> 4], axis=-1).view(np.int8)


def _fifth_bits(bytes_: Bytes) -> Numbers:
    """32 bits, worth 16 each."""
    return (np.unpackbits(bytes_, axis=-1, bitorder="little") << 4).view(np.int8)


def _q4_0(stored: Bytes, inputs: int) -> Blocks:
    block = stored.reshape(len(stored), -1, 18)
    return _blocks(_nibbles(block[..., 2:]) - np.int8(8), _halves(block[..., :2]), None, 4, inputs)


def _q4_1(stored: Bytes, inputs: int) -> Blocks:
    block = stored.reshape(len(stored), -1, 20)
    return _blocks(_nibbles(block[..., 4:]), _halves(block[..., :2]), _halves(block[..., 2:4]), 4, inputs)


def _q5_0(stored: Bytes, inputs: int) -> Blocks:
    block = stored.reshape(len(stored), -1, 22)
    q = _nibbles(block[..., 6:]) | _fifth_bits(block[..., 2:6])
    return _blocks(q - np.int8(16), _halves(block[..., :2]), None, 8, inputs)


def _q5_1(stored: Bytes, inputs: int) -> Blocks:
    block = stored.reshape(len(stored), -1, 24)
    q = _nibbles(block[..., 8:]) | _fifth_bits(block[..., 4:8])
    return _blocks(q, _halves(block[..., :2]), _halves(block[..., 2:4]), 8, inputs)


def _q8_0(stored: Bytes, inputs: int) -> Blocks:
    block = stored.reshape(len(stored), -1, 34)
    return _blocks(np.ascontiguousarray(block[..., 2:]).view(np.int8), _halves(block[..., :2]), None, 8, inputs)


def _scales_and_minima(block: Bytes) -> tuple[Floats, Floats]:
    """Scales and minima of a super-block's eight blocks: two factors, then eight of each with 6 bits in 12 bytes."""
    factors, packed = _halves(block[..., :4]), block[..., 4:16]
    first, second, third = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scale = np.concatenate([first & 63, third & 15 | first >> 6 << 4], axis=-1)
    minimum = np.concatenate([second & 63, third >> 4 | second >> 6 << 4], axis=-1)
    return factors[..., :1] * scale, factors[..., 1:] * -minimum.astype(np.float32)


def _q4_k(stored: Bytes, inputs: int) -> Blocks:
    block = stored.reshape(len(stored), -1, 144)
    q = _nibbles(block[..., 16:].reshape(*block.shape[:2], 4, 32))
    return _blocks(q, *_scales_and_minima(block), 4, inputs)


def _q5_k(stored: Bytes, inputs: int) -> Blocks:
    block = stored.reshape(len(stored), -1, 176)
    low = _nibbles(block[..., 48:].reshape(*block.shape[:2], 4, 32)).reshape(*block.shape[:2], 8, 32)
    # Bit i of byte k is the fifth bit of number k in block i.
    high = (block[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1) << 4
    return _blocks(low | high.view(np.int8), *_scales_and_minima(block), 8, inputs)


def _q6_k(stored: Bytes, inputs: int) -> Blocks:
    block = stored.reshape(len(stored), -1, 210)
    halves = block[..., :128].reshape(*block.shape[:2], 2, 1, 64)
    low = np.concatenate([halves & 15, halves >> 4], axis=-2).reshape(*block.shape[:2], 2, 4, 32)
    pairs = block[..., 128:192].reshape(*block.shape[:2], 2, 1, 32)
    high = (pairs >> np.array([[0], [2], [4], [6]], dtype=np.uint8) & 3) << 4
    scale = _halves(block[..., 208:]) * np.ascontiguousarray(block[..., 192:208]).view(np.int8)
    return _blocks((low | high).view(np.int8) - np.int8(32), scale, None, 8, inputs)


_READERS: Mapping[Kind, Callable[[Bytes, int], Blocks]] = {
    Kind.Q4_0: _q4_0,
    Kind.Q4_1: _q4_1,
    Kind.Q5_0: _q5_0,
    Kind.Q5_1: _q5_1,
    Kind.Q8_0: _q8_0,
    Kind.Q4_K: _q4_k,
    Kind.Q5_K: _q5_k,
    Kind.Q6_K: _q6_k,
}
