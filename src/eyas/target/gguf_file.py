"""Reads a GGUF file: metadata and tensors. Every broken file is refused in one line.

The header is read here and not by the `gguf` package, whose reader takes seconds for a vocabulary and believes any
length it finds; dequantisation is the package's. Nothing is read past the end of the file, and nothing is guessed.
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import gguf
import numpy as np
import numpy.typing as npt

from eyas.errors import UserError

T = TypeVar("T")
D = TypeVar("D")

_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_STRING, _ARRAY = 8, 9
# Scalar value types of the format by number, as struct letters.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}

_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, kw_only=True)
class _Stored:
    """Place of a tensor in the file; the shape is row-major, the reverse of GGUF's."""

    shape: tuple[int, ...]
    kind: gguf.GGMLQuantizationType
    offset: int


class _Cursor:
    """Reads little-endian values in sequence, never past the end; raises ValueError where bytes break the format."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.position = 0

    def bytes(self, count: int) -> bytes:
        if count > len(self._data) - self.position:
            raise ValueError(f"{count} bytes wanted at {self.position} of {len(self._data)}")
        self.position += count
        return self._data[self.position - count : self.position]

    def scalars(self, letter: str, count: int) -> list[Any]:
        size = struct.calcsize(letter)
        return list(struct.unpack(f"<{count}{letter}", self.bytes(size * count)))

    def number(self, letter: str) -> int:
        return int(self.scalars(letter, 1)[0])

    def string(self) -> str:
        return self.strings(1)[0]

    def strings(self, count: int) -> list[str]:
        """Read `count` strings, with few calls for each: a vocabulary has a hundred thousand."""
        data, position, size = self._data, self.position, len(self._data)
        found = []
        for _ in range(count):
            (length,) = _LENGTH.unpack_from(data, position)
            position += _LENGTH.size
            if length > size - position:
                raise ValueError(f"{length} bytes wanted at {position} of {size}")
            found.append(data[position : position + length].decode("utf-8"))
            position += length
        self.position = position
        return found

    def values(self, kind: int, count: int) -> list[Any]:
        if kind == _STRING:
            return self.strings(count)
        if kind not in _SCALARS:
            raise ValueError(f"value type {kind}")
        return self.scalars(_SCALARS[kind], count)

    def value(self, kind: int) -> Any:
        if kind == _ARRAY:
            inner = self.number("I")
            return self.values(inner, self.number("Q"))
        return self.values(kind, 1)[0]


class GgufFile:
    """An open GGUF file; tensors stay on disk until they are read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as stream:
                magic = stream.read(4)
                if magic != b"GGUF":
                    raise UserError(f"{path} is not a GGUF file: it starts with {magic!r}; give one that is")
                self._data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
            self._values, self._tensors = _read_header(self._data)
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror or error}; check its permissions") from error
        except (ValueError, struct.error) as error:
            raise UserError(f"{path} is damaged or cut short ({error}); download it again") from error
        pieces = self.optional("split.count", int, 1)
        if pieces > 1:
            raise UserError(
                f"{path} is one of {pieces} pieces of a model; join them with `llama-gguf-split --merge` first"
            )

    def unsupported(self, reason: str) -> UserError:
        """Return the error for a model that is not understood; `reason` ends with its punctuation."""
        return UserError(f"{self.path} {reason} use the model's safetensors folder instead")

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(self._values)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Row-major shape of every tensor in file order."""
        return {name: stored.shape for name, stored in self._tensors.items()}

    @property
    def tensor_types(self) -> dict[str, int]:
        kinds = [stored.kind.name for stored in self._tensors.values()]
        return {kind: kinds.count(kind) for kind in sorted(set(kinds))}

    def required(self, key: str, kind: type[T]) -> T:
        if key not in self._values:
            raise UserError(f"{self.path} has no key {key}; convert the model to GGUF again with a current converter")
        value = self._values[key]
        if kind is float and isinstance(value, float):
            # GGUF keeps floats in 32 bits; the shortest decimal is the author's (1e-05).
            value = float(str(np.float32(value)))
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise UserError(
                f"key {key} of {self.path} is {type(value).__name__}, expected {kind.__name__}; "
                "such a model is not supported"
            )
        return value

    def optional(self, key: str, kind: type[T], default: D) -> T | D:
        return self.required(key, kind) if key in self._values else default

    def kind(self, name: str) -> gguf.GGMLQuantizationType:
        return self._tensors[name].kind

    def packed(self, name: str) -> npt.NDArray[np.uint8]:
        """Return the bytes of a tensor by row, read-only and mapped from the file."""
        stored = self._tensors[name]
        shape = gguf.quant_shape_to_byte_shape(stored.shape, stored.kind)
        return np.frombuffer(self._data, np.uint8, count=math.prod(shape), offset=stored.offset).reshape(shape)

    def tensor(self, name: str, part: int | None = None) -> npt.NDArray[np.float32]:
        """Return a tensor, or one part along its first dimension, dequantised to float32."""
        stored, packed = self._tensors[name], self.packed(name)
        try:
            values = gguf.dequantize(packed if part is None else packed[part], stored.kind)
        except NotImplementedError as error:
            raise UserError(
                f"tensor {name} of {self.path} has type {stored.kind.name}, which cannot be dequantised; "
                "use a file with another quantisation, such as Q8_0 or Q4_K_M"
            ) from error
        return np.require(values, np.float32, ["C", "W"])


def _read_header(data: mmap.mmap) -> tuple[dict[str, Any], dict[str, _Stored]]:
    cursor = _Cursor(data)
    cursor.bytes(4)
    version = cursor.number("I")
    if version not in _VERSIONS:
        raise ValueError(f"format version {version}, known are {_VERSIONS}")
    tensor_count, value_count = cursor.number("Q"), cursor.number("Q")
    values: dict[str, Any] = {}
    for _ in range(value_count):
        key = cursor.string()
        values[key] = cursor.value(cursor.number("I"))
    relative: dict[str, _Stored] = {}
    for _ in range(tensor_count):
        name = cursor.string()
        shape = tuple(reversed(cursor.scalars("Q", cursor.number("I"))))
        kind = cursor.number("I")
        if kind not in gguf.GGML_QUANT_SIZES:
            raise ValueError(f"tensor {name} has type {kind}")
        relative[name] = _Stored(shape=shape, kind=gguf.GGMLQuantizationType(kind), offset=cursor.number("Q"))
    alignment = values.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"alignment {alignment}")
    start = math.ceil(cursor.position / alignment) * alignment
    return values, {name: _placed(name, stored, start, len(data)) for name, stored in relative.items()}


def _placed(name: str, stored: _Stored, start: int, end: int) -> _Stored:
    per_block, block_bytes = gguf.GGML_QUANT_SIZES[stored.kind]
    if not stored.shape or stored.shape[-1] % per_block:
        raise ValueError(f"tensor {name} of shape {stored.shape} cannot be {stored.kind.name}")
    size = math.prod(stored.shape) // per_block * block_bytes
    if start + stored.offset + size > end:
        raise ValueError(f"tensor {name} ends at {start + stored.offset + size} of {end} bytes")
    return _Stored(shape=stored.shape, kind=stored.kind, offset=start + stored.offset)
