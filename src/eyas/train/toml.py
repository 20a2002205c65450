"""Recipes as TOML text: values set from the command line, and tables printed.

TOML has no null, so a value that is not set is written "none".
"""

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

from eyas.errors import UserError

NONE = "none"


def parse_override(text: str) -> tuple[tuple[str, ...], Any]:
    """Read `table.key=value`: a TOML value, or a bare word as text."""
    path, equals, written = (part.strip() for part in text.partition("="))
    keys = tuple(key.strip() for key in path.split("."))
    if not equals or not written or not all(keys):
        raise UserError(f"--set {text!r} is not of the form table.key=value; write train.lr=1e-3, say")
    if "\n" in written or "\r" in written:
        raise UserError(f"--set {text!r} spans several lines; give one value on one line")
    try:
        value = tomllib.loads(f"value = {written}")["value"]
    except tomllib.TOMLDecodeError as error:
        if written[0] in "[{\"'":
            raise UserError(f"--set {text!r}: the value is not TOML ({error}); mend or quote it") from error
        value = written
    # A date is a name of something here, as in output.folder=2025-03-01.
    return keys, value if isinstance(value, bool | int | float | str | list | dict) else written


def apply_override(tables: dict[str, Any], keys: Sequence[str], value: object) -> None:
    """Put a value into nested tables, making tables on the way."""
    for depth, key in enumerate(keys[:-1], start=1):
        tables = tables.setdefault(key, {})
        if not isinstance(tables, dict):
            raise UserError(
                f"--set {'.'.join(keys)}: {'.'.join(keys[:depth])} is a value and not a table; name the value itself"
            )
    tables[keys[-1]] = value


def to_text(tables: Mapping[str, Any], name: str = "") -> str:
    """Print nested dicts as TOML, every value."""
    lines = [f"{_key(key)} = {_literal(value)}" for key, value in tables.items() if not isinstance(value, dict)]
    blocks = ["\n".join([f"[{name}]", *lines] if name else lines) + "\n"] if lines or (name and not tables) else []
    blocks += [
        to_text(value, f"{name}.{_key(key)}" if name else _key(key))
        for key, value in tables.items()
        if isinstance(value, dict)
    ]
    return "\n".join(block for block in blocks if block)


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _literal(name)


def _literal(value: Any) -> str:
    if value is None:
        return f'"{NONE}"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list):
        return f"[{', '.join(_literal(item) for item in value)}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_key(key)} = {_literal(item)}' for key, item in value.items())}}}"
    return repr(value)
