"""Recipes as files: read from TOML with overrides of the command line, and written back.

`read_recipe` turns the first error that pydantic finds into one line with the key, its value and what is allowed.
"""

import difflib
import json
import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, get_args

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from eyas.errors import UserError
from eyas.train.recipe import LENGTHS, NONE, Augmentation, DrafterOverrides, Recipe

_RENAMED = {"checkpoint": "activation_checkpointing"}
_PLAIN = {
    "Input should be": "it must be",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
    "a valid tuple": "a list",
}
"""Plainer words for phrases of pydantic's messages."""
_TABLES: dict[str, Any] = {
    **{key: field.annotation for key, field in Recipe.model_fields.items() if key != "drafters"},
    "data.augment": Augmentation,
}


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe and apply `overrides` of the form `train.lr=1e-3`."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read the recipe {path}: {error.strerror}; check the path") from error
    except UnicodeDecodeError as error:
        raise UserError(f"the recipe {path} is not UTF-8 text ({error.reason}); give a TOML file") from error
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"the recipe {path} is not TOML ({error}); mend it") from error
    parsed = [parse_override(override) for override in overrides]
    if isinstance(train := tables.get("train"), dict) and any(
        keys[0] == "train" and keys[-1] in LENGTHS and value != NONE for keys, value in parsed
    ):  # the command line sets the length of the run instead of the file
        tables["train"] = {key: value for key, value in train.items() if key not in LENGTHS}
    named = tuple(tables["drafters"]) if isinstance(tables.get("drafters"), dict) else ()
    for keys, value in parsed:
        if keys[0] == "drafters" and len(keys) > 2 and keys[1] not in named:  # a new one would be a typing error
            if named:
                raise _unknown_key(keys[1], "[drafters] of the recipe", named)
            raise UserError(f"the recipe has no [drafters.{keys[1]}]; add it, or set keys of drafter and train")
        apply_override(tables, keys, value)
    return read_recipe(tables)


def read_recipe(tables: Mapping[str, Any]) -> Recipe:
    """Make a recipe of nested tables."""
    try:
        # A missing table becomes an empty one, so that the error names the missing key.
        return Recipe.model_validate({"data": {}, "output": {}, **tables})
    except ValidationError as refused:
        errors = refused.errors(include_url=False)
        # An unknown key is often the one that is missing elsewhere: it is reported first.
        raise _refusal(min(errors, key=lambda error: error["type"] != "extra_forbidden")) from refused


def to_toml(recipe: Recipe) -> str:
    """Print every value, such that `load_recipe` gives the same recipe again."""
    return _tables_as_toml(recipe.resolved())


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
    # A date can only be a name here, as in output.folder=2025-03-01.
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


def _refusal(error: ErrorDetails) -> UserError:
    """Say in one line what pydantic found: the key, its value and what is allowed."""
    path = [part for part in error["loc"] if isinstance(part, str)]
    *tables, name = path
    table, value = ".".join(tables), error["input"]
    model = DrafterOverrides if tables[:1] == ["drafters"] else _TABLES.get(table, Recipe)
    key = ".".join(path)
    if (item := error["loc"][-1]) != name and error["type"] != "missing":  # one item of a list is wrong
        key += f"[{item}]"
    match error["type"]:
        case "extra_forbidden":
            elsewhere = [other for other, known in _TABLES.items() if name in known.model_fields]
            return _unknown_key(name, f"[{table}]" if table else "the recipe", model.model_fields, elsewhere)
        case "missing" if item == name:
            return UserError(f"the recipe does not say {key}; add {name} to [{table}]")
        case "string_too_short" | "too_short":
            return UserError(f"{key} is empty; give at least one name or path")
        case "model_type" | "mapping_type" | "dict_type":
            allowed = f"it must be a table: write [{'drafters.NAME' if key == 'drafters' else key}] and its keys below"
        case "string_pattern_mismatch":
            example = "auto, cpu, cuda or cuda:N" if name == "device" else "an address such as http://localhost:8000"
            allowed = f"it must be {example}"
        case "missing" | "too_long":  # train.betas alone has a fixed length
            allowed = "it must be a list of 2 numbers"
        case "value_error":
            allowed = str(error["ctx"]["error"])
        case kind:
            allowed = error["msg"]
            for theirs, ours in _PLAIN.items():
                allowed = allowed.replace(theirs, ours)
            names = re.findall(r"'([^']*)'", error["msg"]) if kind == "literal_error" else []
            if near := difflib.get_close_matches(str(value), names, n=1):
                allowed = f"did you mean {near[0]!r}? {allowed}"
            if item == name and NoneType in get_args(model.model_fields[name].annotation):
                allowed += f' or "{NONE}"'
    return UserError(f"{key} is {value!r}; {allowed}")


def _unknown_key(key: str, where: str, known: Collection[str], elsewhere: Collection[str] = ()) -> UserError:
    near = difflib.get_close_matches(key, known, n=1)
    if key in _RENAMED and _RENAMED[key] in known:
        hint = f"it is called {_RENAMED[key]!r} now"
    elif elsewhere:
        hint = f"it belongs in {' or '.join(f'[{table}]' for table in elsewhere)}"
    elif near:
        hint = f"did you mean {near[0]!r}?"
    else:
        hint = f"known are {', '.join(known) or 'none'}"
    return UserError(f"{where} has no key {key!r}; {hint}")


def _tables_as_toml(tables: Mapping[str, Any], name: str = "") -> str:
    lines = [f"{_key(key)} = {_literal(value)}" for key, value in tables.items() if not isinstance(value, dict)]
    blocks = ["\n".join([f"[{name}]", *lines] if name else lines) + "\n"] if lines or (name and not tables) else []
    blocks += [
        _tables_as_toml(value, f"{name}.{_key(key)}" if name else _key(key))
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
