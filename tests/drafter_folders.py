"""Reads and edits drafters on disk."""

import json
from pathlib import Path
from typing import Any


def config_of(folder: str | Path) -> dict[str, Any]:
    raw: dict[str, Any] = json.loads((Path(folder) / "config.json").read_text())
    return raw


def edit(folder: str | Path, *, drop: tuple[str, ...] = (), **changes: Any) -> Path:
    """Drop and change keys of config.json."""
    raw = {key: value for key, value in config_of(folder).items() if key not in drop}
    (Path(folder) / "config.json").write_text(json.dumps({**raw, **changes}))
    return Path(folder)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
