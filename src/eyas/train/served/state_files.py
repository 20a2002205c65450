"""Files by which servers hand states over: read once, checked, deleted; nothing is left behind.

Every file that a trainer asks for begins with the trainer's own prefix, so that one that starts again finds what its
predecessor left. A file whose request was given up may still appear later; it is remembered and removed.

Shapes: T tokens, A captured layers, D hidden size.
"""

import itertools
import json
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

FILE_SECONDS = 60.0
"""How long a file may take to appear behind its answer: shared disks are slow to tell."""
_SUFFIXES = (".safetensors", ".error", ".part")


class BadFileError(Exception):
    """A file that did not come, or is not what was asked for."""


@dataclass(frozen=True, kw_only=True)
class StateFiles:
    """One trainer's files in the folder that it shares with servers."""

    folder: Path
    prefix: str
    """Of this process among all that ever share the folder; the same when it starts again."""
    captured: tuple[int, ...]
    """Layers whose states a file must hold."""
    hidden_size: int
    seconds: float = field(default_factory=lambda: FILE_SECONDS)
    _life: str = field(default_factory=lambda: uuid.uuid4().hex[:8])
    _numbers: "itertools.count[int]" = field(default_factory=itertools.count)
    _abandoned: set[str] = field(default_factory=set)
    _guard: threading.Lock = field(default_factory=threading.Lock)

    def new_name(self) -> str:
        """A name that was never given before."""
        return f"{self.prefix}-{self._life}-{next(self._numbers)}"

    def sweep(self) -> int:
        """Remove everything of this prefix; how many bytes that were."""
        freed = 0
        for path in self.folder.glob(f"{self.prefix}-*"):
            if path.suffix in _SUFFIXES:
                try:
                    freed += path.stat().st_size
                    path.unlink()
                except FileNotFoundError:  # a server sweeps, too
                    continue
        return freed

    def bytes_there(self) -> int:
        """What the files of this prefix take now."""
        total = 0
        for path in self.folder.glob(f"{self.prefix}-*"):
            try:
                total += path.stat().st_size
            except FileNotFoundError:
                continue
        return total

    def abandon(self, name: str) -> None:
        """Nobody will read it; it may not even be there yet."""
        with self._guard:
            self._abandoned.add(name)
        self._remove_abandoned()

    def take(self, name: str, ids: Sequence[int], given_up: Callable[[], bool] = lambda: False) -> Tensor:
        """States [T, A, D] of a document with these tokens; the file is gone then, good or bad."""
        path = self._appeared(name, given_up)
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                layers = json.loads(metadata.get("layer_ids", "null"))
                if layers != list(self.captured):
                    raise BadFileError(f"it has states of the layers {layers}, and {list(self.captured)} are needed")
                theirs = file.get_tensor("token_ids").tolist()
                states_TAD: Tensor = file.get_tensor("hidden_states").clone()
        except (OSError, SafetensorError, ValueError) as error:
            raise BadFileError(f"{path.name} cannot be read ({error})") from error
        finally:
            path.unlink(missing_ok=True)
            self._remove_abandoned()
        if theirs != list(ids):
            raise BadFileError(f"it is of {len(theirs)} other tokens than the {len(ids)} that were sent")
        if tuple(states_TAD.shape) != (len(ids), len(self.captured), self.hidden_size):
            expected = (len(ids), len(self.captured), self.hidden_size)
            raise BadFileError(f"its states have the shape {tuple(states_TAD.shape)}, not {expected}")
        if not bool(states_TAD.isfinite().all()):
            raise BadFileError("its states are not finite")
        return states_TAD

    def _appeared(self, name: str, given_up: Callable[[], bool]) -> Path:
        path, error = self.folder / f"{name}.safetensors", self.folder / f"{name}.error"
        deadline, pause = time.monotonic() + self.seconds, 0.001
        while not path.exists():
            if error.exists():
                reason = error.read_text(errors="replace")
                error.unlink(missing_ok=True)
                raise BadFileError(f"the server could not write it: {reason}")
            if time.monotonic() > deadline or given_up():
                raise BadFileError(
                    f"{path} did not appear within {self.seconds:g} s of its answer; features.states_folder must be "
                    "the folder that the server writes to, on this machine or on a shared disk"
                )
            time.sleep(pause)
            pause = min(0.1, 2 * pause)
        return path

    def _remove_abandoned(self) -> None:
        with self._guard:
            names = list(self._abandoned)
        for name in names:
            for suffix in (".safetensors", ".error"):
                path = self.folder / f"{name}{suffix}"
                if path.exists():
                    path.unlink(missing_ok=True)
                    with self._guard:
                        self._abandoned.discard(name)
