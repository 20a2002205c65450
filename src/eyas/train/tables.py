"""Frozen dataclasses as TOML tables: reading, checking types, overriding from the command line, printing.

TOML has no null, so an optional value that is not set is written "none". Invariant: what `to_toml` prints reads back as
what was printed, and a key or value that a table does not know is refused with the nearest one it does know.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from eyas.errors import UserError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    T = TypeVar("T", bound=DataclassInstance)

NONE = "none"


def build(kind: type[T], table: object, where: str, *, belongs: Callable[[str], Collection[str]] = lambda key: ()) -> T:
    """Read a dataclass from a table; `belongs` says in which tables a misplaced key is known."""
    if not isinstance(table, Mapping):
        raise UserError(f"{where} is {table!r}; it must be a table: write [{where}] and its keys below")
    hints = get_type_hints(kind)
    for key in table:
        if key not in hints:
            raise unknown_key(key, f"[{where}]", hints, belongs(key))
    missing = [
        field.name
        for field in fields(kind)
        if field.name not in table and field.default is MISSING and field.default_factory is MISSING
    ]
    if missing:
        raise UserError(f"the recipe does not say {where}.{missing[0]}; add {missing[0]} to [{where}]")
    return kind(**{key: read_value(value, hints[key], f"{where}.{key}") for key, value in table.items()})


def read_value(value: object, hint: Any, where: str) -> Any:
    """A TOML value as the type the field has; what does not fit is left for `check_types` to refuse."""
    if is_dataclass(hint):
        return build(hint, value, where) if not isinstance(value, hint) else value  # type: ignore[arg-type]
    options = _options(hint)
    if value == NONE and NoneType in options:
        return None
    if isinstance(value, list):
        return tuple(read_value(item, float if float in _items(options) else object, where) for item in value)
    if float in options and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    return value


def check_types(instance: DataclassInstance, where: str) -> None:
    """Refuse a field whose value is not of its type."""
    hints = get_type_hints(type(instance))
    for field in fields(instance):
        value = getattr(instance, field.name)
        if not _fits(value, hints[field.name]):
            raise UserError(f"{where}.{field.name} is {_shown(value)}; it must be {_described(hints[field.name])}")


def unknown_key(key: str, where: str, known: Collection[str], elsewhere: Collection[str] = ()) -> UserError:
    """The error for a key that its table does not know."""
    near = difflib.get_close_matches(key, known, n=1)
    if elsewhere:
        hint = f"it belongs in {' or '.join(f'[{table}]' for table in elsewhere)}"
    elif near:
        hint = f"did you mean {near[0]!r}?"
    else:
        hint = f"known are {', '.join(known) or 'none'}"
    return UserError(f"{where} has no key {key!r}; {hint}")


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


def plain(value: Any) -> Any:
    """Dataclasses as dicts and tuples as lists: what JSON and TOML know."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, tuple | list) else value


def to_text(tables: Mapping[str, Any], name: str = "") -> str:
    """Print nested dicts as TOML, every value."""
    lines = [f"{key} = {_literal(value)}" for key, value in tables.items() if not isinstance(value, dict)]
    blocks = ["\n".join([f"[{name}]", *lines] if name else lines) + "\n"] if lines or (name and not tables) else []
    blocks += [
        to_text(value, f"{name}.{key}" if name else key) for key, value in tables.items() if isinstance(value, dict)
    ]
    return "\n".join(block for block in blocks if block)


def _literal(value: Any) -> str:
    if value is None:
        return f'"{NONE}"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list):
        return f"[{', '.join(_literal(item) for item in value)}]"
    return repr(value)


def _options(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _items(options: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(item for option in options if get_origin(option) is tuple for item in get_args(option))


def _fits(value: object, hint: Any) -> bool:
    if len(_options(hint)) > 1:
        return any(_fits(value, option) for option in _options(hint))
    if get_origin(hint) is tuple:
        items = get_args(hint)
        if not isinstance(value, tuple) or (items[-1] is not Ellipsis and len(value) != len(items)):
            return False
        return all(_fits(item, items[0]) for item in value)
    if get_origin(hint) is not None:
        return isinstance(value, get_origin(hint))
    if hint in (int, float) and isinstance(value, bool):
        return False
    return isinstance(value, int | float) if hint is float else isinstance(value, hint)


_ONE = {bool: "true or false", int: "a whole number", float: "a number", str: "text", NoneType: f'"{NONE}"'}
_MANY = {int: "whole numbers", float: "numbers", str: "texts"}


def _described(hint: Any) -> str:
    if len(_options(hint)) > 1:
        return " or ".join(_described(option) for option in _options(hint))
    if get_origin(hint) is tuple:
        items = get_args(hint)
        count = "" if items[-1] is Ellipsis else f"{len(items)} "
        return f"a list of {count}{_MANY[items[0]]}"
    return _ONE.get(hint, "a table")


def _shown(value: object) -> str:
    return repr(list(value)) if isinstance(value, tuple) else repr(value)
