"""Weights to safetensors files one tensor at a time.

The safetensors library wants all tensors of a file in memory; a dequantised 30 GB model often does not fit.
The format needs only names, shapes and types before the bytes, and these are known in advance, so the header
is written first and each tensor follows as it is produced: memory stays at one tensor.
Invariant: the files are those `transformers` writes: `model.safetensors`, or numbered shards with an index.
"""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

SHARD_BYTES = 5 * 10**9

_BYTES_EACH = 2


def write_bfloat16(
    folder: Path,
    shapes: Mapping[str, tuple[int, ...]],
    produce: Callable[[str], torch.Tensor],
    *,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write one bfloat16 tensor per name in `shapes`, asking `produce` for each in that order."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, shape in shapes.items():
        size = _size(shape)
        if shards[-1] and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    files = {
        name: "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        for number, names in enumerate(shards, start=1)
        for name in names
    }
    for names in shards:
        _write_shard(folder / files[names[0]], {name: shapes[name] for name in names}, produce)
    if len(shards) > 1:
        total = sum(_size(shape) for shape in shapes.values())
        index = {"metadata": {"total_size": total}, "weight_map": files}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _size(shape: tuple[int, ...]) -> int:
    return math.prod(shape) * _BYTES_EACH


def _write_shard(path: Path, shapes: Mapping[str, tuple[int, ...]], produce: Callable[[str], torch.Tensor]) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        end = offset + _size(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    # Tensor data must start at a multiple of eight bytes; the format pads the header with spaces.
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as stream:
        stream.write(len(encoded).to_bytes(8, "little"))
        stream.write(encoded)
        for name, shape in shapes.items():
            tensor = produce(name).to(torch.bfloat16).contiguous()
            assert tuple(tensor.shape) == shape, f"{name}: {tuple(tensor.shape)} produced, {shape} announced"
            stream.write(tensor.view(torch.int16).numpy().tobytes())
