"""Recipes as files: read from TOML with overrides of the command line, refused in words, and written back.

`read_recipe` turns the first thing that pydantic refuses into one line that names the key, its value and what is
allowed.
"""

import difflib
import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from eyas.errors import UserError
from eyas.train.recipe import (
    LENGTHS,
    Augmentation,
    DataSettings,
    DrafterOverrides,
    DrafterSettings,
    FeatureSettings,
    OutputSettings,
    Recipe,
    TargetSettings,
    TrainSettings,
)
from eyas.train.toml import NONE, apply_override, parse_override, to_text

_RENAMED = {"checkpoint": "activation_checkpointing"}
_TABLES: Mapping[str, type[BaseModel]] = {
    "target": TargetSettings,
    "data": DataSettings,
    "features": FeatureSettings,
    "drafter": DrafterSettings,
    "train": TrainSettings,
    "output": OutputSettings,
    "data.augment": Augmentation,
}


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe and set `overrides` of the form `train.lr=1e-3` over it."""
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
    ):  # how long a run is, the command line says instead of the file
        tables["train"] = {key: value for key, value in train.items() if key not in LENGTHS}
    named = tuple(tables["drafters"]) if isinstance(tables.get("drafters"), dict) else ()
    for keys, value in parsed:
        if keys[0] == "drafters" and len(keys) > 2 and keys[1] not in named:  # a new one would be a slip of the pen
            if named:
                raise _unknown_key(keys[1], "[drafters] of the recipe", named)
            raise UserError(f"the recipe has no [drafters.{keys[1]}]; add it, or set keys of drafter and train")
        apply_override(tables, keys, value)
    return read_recipe(tables)


def read_recipe(tables: Mapping[str, Any]) -> Recipe:
    """Make a recipe of nested tables."""
    try:
        # A table that is missing is an empty one: the key that it lacks is then named.
        return Recipe.model_validate({"data": {}, "output": {}, **tables})
    except ValidationError as refused:
        errors = refused.errors(include_url=False)
        # A key that nobody knows is often the one that is missing elsewhere.
        raise _refusal(min(errors, key=lambda error: error["type"] != "extra_forbidden")) from refused


def to_toml(recipe: Recipe) -> str:
    """Print every value, such that `load_recipe` gives the same recipe again."""
    return to_text(recipe.resolved())


def _refusal(error: ErrorDetails) -> UserError:
    """What pydantic found, in one line with the key, its value and what is allowed."""
    path = [part for part in error["loc"] if isinstance(part, str)]
    *tables, name = path
    table, value, context = ".".join(tables), error["input"], error.get("ctx", {})
    model = DrafterOverrides if tables[:1] == ["drafters"] else _TABLES.get(table, Recipe)
    key = ".".join(path)
    if (item := error["loc"][-1]) != name and error["type"] != "missing":  # one item of a list is wrong
        key += f"[{item}]"
    match error["type"]:
        case "extra_forbidden":
            return _unknown_key(name, f"[{table}]" if table else "the recipe", model.model_fields, _tables_with(name))
        case "missing" if item == name:
            return UserError(f"the recipe does not say {key}; add {name} to [{table}]")
        case "model_type" | "mapping_type" | "dict_type":
            header = "drafters.NAME" if key == "drafters" else key
            return UserError(f"{key} is {value!r}; it must be a table: write [{header}] and its keys below")
        case "string_pattern_mismatch":
            allowed = "auto, cpu, cuda or cuda:N" if name == "device" else "an address such as http://localhost:8000"
            return UserError(f"{key} is {value!r}; it must be {allowed}")
        case "string_too_short" | "too_short":
            return UserError(f"{key} is empty; give at least one name or path")
        case "literal_error":
            known = re.findall(r"'([^']*)'", context["expected"])
            near = difflib.get_close_matches(str(value), known, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            return UserError(f"{key} is {value!r}; {hint}it must be one of {', '.join(known)}")
        case "value_error":
            return UserError(f"{key} is {value!r}; {context['error']}")
        case kind:
            optional = item == name and NoneType in get_args(model.model_fields[name].annotation)
            unset = f' or "{NONE}"' if optional else ""
            return UserError(f"{key} is {value!r}; it must be {_ALLOWED[kind].format(**context)}{unset}")


_ALLOWED = {
    "bool_type": "true or false",
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "text",
    "string_unicode": "text in UTF-8",
    "tuple_type": "a list",
    "greater_than": "above {gt:.15g}",
    "greater_than_equal": "at least {ge:.15g}",
    "less_than": "below {lt:.15g}",
    "less_than_equal": "at most {le:.15g}",
    # These have one key: train.betas.
    "missing": "a list of 2 numbers",
    "too_long": "a list of 2 numbers",
}


def _unknown_key(key: str, where: str, known: Collection[str], elsewhere: Collection[str] = ()) -> UserError:
    """The error for a key that its table does not know."""
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


def _tables_with(key: str) -> list[str]:
    """The tables that know a key."""
    return [name for name, table in _TABLES.items() if key in table.model_fields]
