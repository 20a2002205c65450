"""Finds a target by name: the embedded default, a GGUF file, a folder or a hub id, tried in this order.

The first two are converted to folders in the cache, so that all other code deals with Hugging Face models only.
Invariant: a name that cannot work fails here or inside `explain_failures`, as one line that repeats the name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from eyas.errors import UserError
from eyas.hub import hub_options

DEFAULT_TARGET = "smollm2"

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def locate(source: str, *, cache: Path | None = None) -> str:
    """Return a folder or hub id for `source`; `cache` holds converted targets (default: the user's cache)."""
    if source == DEFAULT_TARGET:
        from eyas.target.default import default_folder

        return str(default_folder(cache or user_cache()))
    if not source.strip():
        raise UserError(f"the name of the target is empty; give a folder, a .gguf file, a hub id or {DEFAULT_TARGET!r}")
    path = Path(source).expanduser()
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise UserError(f"there is no GGUF file {source}; check the path")
        from eyas.target.default import converted_folder

        return str(converted_folder(path, cache or user_cache()))
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UserError(
                f"{source} is not a model: the folder has no config.json; "
                "give a folder in Hugging Face format or a .gguf file"
            )
        return str(path)
    if path.exists():
        raise UserError(f"{source} is a file but not a .gguf file; give a model folder, a .gguf file or a hub id")
    if not _HUB_ID.fullmatch(source):
        raise UserError(
            f"there is no folder {source!r} and it is not a hub id of the form org/name; "
            f"check the path or use {DEFAULT_TARGET!r}"
        )
    return source


def gguf_of(source: str, *, cache: Path | None = None) -> Path | None:
    """Return the GGUF file of a target, or None if it is no GGUF file."""
    if source == DEFAULT_TARGET:
        from eyas.target.default import default_gguf

        return default_gguf(cache or user_cache())
    path = Path(source).expanduser()
    return path if path.suffix.lower() == ".gguf" and path.is_file() else None


def require_on_hub(source: str, revision: str | None = None) -> None:
    """Refuse a hub id that cannot be loaded; other names pass. Imports nothing heavy."""
    if source.count("/") != 1 or source.lower().endswith(".gguf") or not _HUB_ID.fullmatch(source):
        return
    try:
        here = Path(source).exists() or Path(source).parent.is_file()
    except OSError:  # reported when it is loaded
        return
    if not here:
        hub_options(source, revision=revision)


def options_of(source: str, place: str, revision: str | None = None) -> dict[str, Any]:
    """Return the keyword arguments of `from_pretrained` for `place`; a hub id is looked up first (`eyas.hub`)."""
    if not Path(place).is_dir():
        return hub_options(place, revision=revision)
    if revision is not None:
        raise UserError(f"--revision {revision} is for hub ids, and {source} is on this machine; leave it out")
    return {}


@contextmanager
def explain_failures(source: str, place: str) -> Iterator[None]:
    """Turn exceptions of transformers and the hub into one line about `source`."""
    try:
        yield
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        reason = _first_sentence(error)
        if Path(place).is_dir():
            message = f"cannot load the model in {source}: {reason}; check that the folder is complete"
        else:
            message = (
                f"there is no folder {source!r} and the hub gave no model of that id: {reason}; "
                f"check spelling and network, download the model and give its folder, or use {DEFAULT_TARGET!r}"
            )
        raise UserError(message) from error


def _first_sentence(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".") if lines else type(error).__name__


def user_cache() -> Path:
    """Return the default folder of converted models."""
    from platformdirs import user_cache_path

    return user_cache_path("eyas")
