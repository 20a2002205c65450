"""Copies the weights of one drafter over those of another, with all tensors that were derived from them.

A runner holds more than the drafter's parameters: packed and quantised panels, joined projections, target ids of the
draft vocabulary. They are not listed here, where one would be forgotten. Two runners that were prepared alike are
walked in parallel: if they have equal classes and values everywhere, they differ in tensors only, which are copied. An
object of an unknown class ends the walk, and nothing is copied.

Invariant: everything that can fail does so before the first write.
"""

import ctypes
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from eyas.drafter.config import DrafterConfig, HasLayers
from eyas.drafter.model import Drafter
from eyas.errors import UserError
from eyas.kernels.llama.cpu import Layers
from eyas.kernels.llama.rotary_table import RotaryTable

_VALUES = (type(None), bool, int, float, str, frozenset, set, torch.dtype, torch.device, torch.Size, Enum)
_WITHOUT_WEIGHTS = (DrafterConfig, RotaryTable, Layers, ctypes.Structure, ctypes.Array)
"""Classes without weights of their own. The configuration is compared as a whole."""
_IGNORED = frozenset({"recorded_acceptance", "training"})
"""Attributes that do not change the computation."""


class UnlikeError(Exception):
    """Two drafters differ in more than their weights."""


@dataclass(frozen=True, eq=False)
class WeightPair:
    """A tensor and its replacement."""

    name: str
    old: Tensor
    new: Tensor


def require_alike(old: Drafter, new: Drafter, target: HasLayers) -> None:
    """Refuse drafters that differ in configuration; the dtype on disk does not matter."""
    for name, value in vars(_plainly(old.config)).items():
        if value != (other := getattr(_plainly(new.config), name)):
            raise UnlikeError(f"its {name} is {other}, not {value}")
    if old.config.layers_read(target) != (read := new.config.layers_read(target)):
        raise UnlikeError(f"it reads the target's layers {', '.join(map(str, read))}")
    for what in ("shares_embedding", "shares_head", "quantization"):
        if getattr(old, what) != getattr(new, what):
            raise UnlikeError(f"its {what} is {getattr(new, what)}, not {getattr(old, what)}")


def _plainly(config: DrafterConfig) -> DrafterConfig:
    return replace(config, dtype="float32", aux_layer_ids=None)


def shared_places(drafter: Drafter) -> frozenset[int]:
    """Return addresses of the target's tensors, which must not be written."""
    parts = [
        drafter.embed_tokens if drafter.shares_embedding else None,
        drafter.lm_head if drafter.shares_head else None,
    ]
    return frozenset(pair.old.data_ptr() for pair in paired(parts, parts))


def paired(old: object, new: object, name: str = "") -> list[WeightPair]:
    """Return all tensors of two objects in pairs; raises if the objects differ otherwise."""
    return list(_walk(old, new, name, set()))


def _walk(old: object, new: object, name: str, met: set[int]) -> Iterator[WeightPair]:
    if isinstance(old, Tensor) and isinstance(new, Tensor):
        if (old.dtype, old.device) != (new.dtype, new.device):
            raise UnlikeError(f"{name} is {new.dtype} on {new.device}, not {old.dtype} on {old.device}")
        if old.shape != new.shape:
            raise UserError(
                f"the drafter's {name} is {list(new.shape)}, and with its config.json it must be {list(old.shape)}; "
                "use a checkpoint whose weights are those that its config.json describes"
            )
        yield WeightPair(name, old, new)
        return
    if type(old) is not type(new):
        raise UnlikeError(f"{name} is {type(new).__name__}, not {type(old).__name__}")
    if isinstance(old, _VALUES):
        if old != new:
            raise UnlikeError(f"{name} is {new}, not {old}")
    elif isinstance(old, ctypes.CDLL):
        if old._name != getattr(new, "_name", None):
            raise UnlikeError(f"{name} was compiled otherwise")
    elif not isinstance(old, _WITHOUT_WEIGHTS) and id(old) not in met:
        met.add(id(old))
        ours, theirs = _parts(old, name), _parts(new, name)
        if ours.keys() != theirs.keys():
            raise UnlikeError(f"{name} has other parts: {', '.join(sorted(map(str, ours.keys() ^ theirs.keys())))}")
        for part, value in ours.items():
            yield from _walk(value, theirs[part], f"{name}.{part}" if name else str(part), met)


def _parts(thing: Any, name: str) -> Mapping[Any, object]:
    if isinstance(thing, Mapping):
        return thing
    if isinstance(thing, list | tuple):
        return dict(enumerate(thing))
    if isinstance(thing, nn.Module):
        held = {**vars(thing)}
        # Under their names in checkpoints.
        inside = [held.pop(kind) for kind in ("_parameters", "_buffers", "_modules")]
        return {part: value for one in (held, *inside) for part, value in one.items() if part not in _IGNORED}
    if type(thing).__module__.startswith("eyas.") and hasattr(thing, "__dict__"):
        return dict(vars(thing))
    raise UnlikeError(f"{name} is {type(thing).__name__}, of which it is not known what it holds")


@torch.inference_mode()
def copy_weights(pairs: Collection[WeightPair], spared: Collection[int]) -> int:
    """Overwrite the old tensors, except at `spared` addresses, and return the bytes written.

    Nothing may be reading them. A shared tensor is written once.
    """
    devices = {pair.old.device for pair in pairs if pair.old.is_cuda}
    written = dict[tuple[object, ...], int]()
    for pair in pairs:
        place = pair.old.data_ptr(), pair.old.shape, pair.old.stride()
        if pair.old.data_ptr() in spared or pair.old.data_ptr() == pair.new.data_ptr() or place in written:
            continue
        pair.old.copy_(pair.new)
        written[place] = pair.old.nbytes
    for device in devices:
        torch.cuda.synchronize(device)  # the engine steps on other streams
    return sum(written.values())
