"""Reads single tensors of a safetensors checkpoint by name, from a folder or from the hub.

Of a hub id only the files with those tensors are fetched, according to the index. Names differ between checkpoints of
an architecture by their prefix (`model.`, `language_model.model.`), so a module that is not found by its full name is
found by the end of it, if that is unambiguous.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from eyas.errors import UserError
from eyas.quantization.weight_format import WeightScheme

INDEX, ONLY_FILE = "model.safetensors.index.json", "model.safetensors"
_OTHER_TOWERS = ("vision", "visual", "audio", "speech", "mtp", "draft")


class StoredTensors:
    """The tensors of one checkpoint."""

    def __init__(self, place: str, hub: Mapping[str, Any], source: str, files: ExitStack) -> None:
        self._folder = Path(place) if Path(place).is_dir() else None
        self._place, self._hub, self._source, self._files = place, hub, source, files
        self._opened: dict[str, Any] = {}
        self._file_of = self._read_names()
        self.modules: dict[str, dict[str, str]] = {}
        """The names of each module's tensors, by their names in the module."""
        for name in self._file_of:
            owner, _, attribute = name.rpartition(".")
            self.modules.setdefault(owner, {})[attribute] = name

    @classmethod
    @contextmanager
    def open(cls, place: str, hub: Mapping[str, Any], source: str) -> Iterator["StoredTensors"]:
        """Open a folder or hub id; `source` is the user's name for it."""
        try:
            with ExitStack() as files:
                yield cls(place, hub, source, files)
        except SafetensorError as error:
            raise UserError(f"the weights of {source} are damaged ({error}); fetch them again") from error

    def find(self, owner: str) -> str | None:
        """The file's name of the module `owner`; None if there is none, or several candidates."""
        if owner in self.modules:
            return owner
        ours = owner.split(".")
        shared: dict[int, list[str]] = {}
        for theirs in self.modules:
            if any(word in theirs for word in _OTHER_TOWERS):
                continue
            same = _shared_end(ours, theirs.split("."))
            if same:
                shared.setdefault(same, []).append(theirs)
        best = shared[max(shared)] if shared else []
        return best[0] if len(best) == 1 else None

    def owner_of(self, owner: str, what: str) -> str:
        """`find`, for modules that must exist."""
        found = self.find(owner)
        if found is None:
            raise UserError(f"{what} ({owner}) is not in its weights by that name; use a checkpoint in safetensors")
        return found

    def matrix(self, owner: str, scheme: WeightScheme | None) -> Tensor:
        """The weight of a module, dequantised if need be."""
        attributes = self.modules.get(owner, {})
        if scheme is not None and scheme.owns(attributes):
            return scheme.read(
                {attribute: self.tensor(name) for attribute, name in attributes.items()}, owner
            ).dequantised()
        weight = self.tensor(f"{owner}.weight")
        if not weight.is_floating_point() or weight.itemsize < 2:
            raise UserError(
                f"{owner}.weight of {self._source} is {str(weight.dtype).removeprefix('torch.')} and has no scales "
                "that are understood here; use another checkpoint"
            )
        return weight

    def tensor(self, name: str) -> Tensor:
        """Read a tensor by its exact name, fetching its file if need be."""
        found = self._read(name, fetch=True)
        if found is None:
            raise UserError(f"{self._source} has no tensor {name}; use a complete checkpoint in safetensors")
        return found

    def tensor_or_none(self, name: str) -> Tensor | None:
        """Read a tensor by its exact name, if it exists and need not be fetched."""
        return self._read(name, fetch=False)

    def _read(self, name: str, *, fetch: bool) -> Tensor | None:
        file = self._file_of.get(name)
        if file is None:
            return None
        if file not in self._opened:
            path = self._path(file, fetch=fetch)
            if path is None:
                return None
            self._opened[file] = self._files.enter_context(safe_open(path, framework="pt"))
        found: Tensor = self._opened[file].get_tensor(name)
        return found

    def _path(self, file: str, *, fetch: bool) -> Path | None:
        if self._folder is not None:
            path = self._folder / file
            if not path.is_file():
                raise UserError(f"{self._source} has no file {file}; use a complete checkpoint in safetensors")
            return path
        if fetch:
            return Path(hf_hub_download(self._place, file, **self._hub))
        known = try_to_load_from_cache(self._place, file, revision=self._hub.get("revision"))
        return Path(known) if isinstance(known, str) else None

    def _read_names(self) -> dict[str, str]:
        """The file of each tensor."""
        try:
            index = self._index()
            if index is not None:
                return {str(name): str(file) for name, file in json.loads(index.read_text())["weight_map"].items()}
        except (ValueError, LookupError, AttributeError) as error:
            raise UserError(f"{INDEX} of {self._source} cannot be read ({error}); fetch it again") from error
        path = self._path(ONLY_FILE, fetch=True)
        assert path is not None
        self._opened[ONLY_FILE] = self._files.enter_context(safe_open(path, framework="pt"))
        return dict.fromkeys(self._opened[ONLY_FILE].keys(), ONLY_FILE)

    def _index(self) -> Path | None:
        if self._folder is not None:
            return self._folder / INDEX if (self._folder / INDEX).is_file() else None
        try:
            return Path(hf_hub_download(self._place, INDEX, **self._hub))
        except EntryNotFoundError:
            return None


def _shared_end(ours: list[str], theirs: list[str]) -> int:
    """The number of last words that two names share."""
    same = 0
    for a, b in zip(reversed(ours), reversed(theirs), strict=False):
        if a != b:
            break
        same += 1
    return same
