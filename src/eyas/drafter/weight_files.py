"""Reads a drafter's weights: safetensors, or the pytorch_model.bin that EAGLE's authors publish.

Opening a pickle can run code. That file is read by torch's restricted reader (`weights_only`) only, which builds
tensors and plain containers and refuses everything else. eyas never writes a pickle.
"""

import json
import pickle
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from eyas.drafter.layouts import Layout
from eyas.errors import UserError

PICKLE = "pytorch_model.bin"
"""The only pickle that is read, and only without safetensors."""
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def weight_files(folder: Path) -> list[Path]:
    """Return the files to read."""
    files = sorted(folder.glob("*.safetensors"))
    if files:
        _check_index(folder, files)
        return files
    pickles = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
    if PICKLE in pickles:
        return [folder / PICKLE]
    if pickles:
        raise UserError(
            f"{folder} holds {pickles[0]}, a pickle, which can run code when opened; eyas reads safetensors, or one "
            f"{PICKLE}: load it with torch.load(weights_only=True) where you trust it, and save with safetensors"
        )
    raise UserError(f"{folder} has no *.safetensors; a drafter's folder holds config.json and its weights")


def read_tensors(folder: Path, layout: Layout) -> dict[str, Tensor]:
    """Read all tensors of a folder, under canonical names."""
    tensors: dict[str, Tensor] = {}
    for file in weight_files(folder):
        for name, tensor in _pickled(file) if file.name == PICKLE else _safe(file):
            canonical = layout.canonical_name(name)
            if canonical in tensors and not torch.equal(tensors[canonical], tensor):
                raise UserError(f"{name} in {file} stands twice with different values; keep one")
            tensors[canonical] = tensor
    return tensors


def _safe(file: Path) -> Iterator[tuple[str, Tensor]]:
    try:
        with safe_open(file, framework="pt") as stored:
            for name in stored.keys():  # noqa: SIM118 (not a dict)
                yield name, stored.get_tensor(name)
    except SafetensorError as error:
        raise UserError(
            f"{file} is damaged or cut off ({file.stat().st_size} bytes: {error}); fetch or export it again"
        ) from error
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}; check the file and its permissions") from error


def _pickled(file: Path) -> Iterator[tuple[str, Tensor]]:
    try:
        found = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise UserError(
            f"{file} is damaged or holds more than tensors, and opening that could run code; fetch it again, or save "
            "its tensors with safetensors where you trust it"
        ) from error
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}; check the file and its permissions") from error
    except (RuntimeError, EOFError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{file} is damaged or cut off ({file.stat().st_size} bytes); fetch or export it again"
        ) from error
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise UserError(f"{file} holds a {type(found).__name__} and no tensors by name; export the drafter again")
    for name, tensor in found.items():
        if not isinstance(tensor, Tensor):
            raise UserError(
                f"{name} in {file} is a {type(tensor).__name__} and no tensor; save the weights alone, by their names"
            )
        yield name, tensor


def _check_index(folder: Path, files: list[Path]) -> None:
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return
    try:
        wanted = {str(name) for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{index} is not a safetensors index ({error!r}); fetch or export it again") from error
    missing = wanted - {file.name for file in files}
    if missing:
        raise UserError(f"{folder} lacks {', '.join(sorted(missing))}, which its index names; fetch it again")
