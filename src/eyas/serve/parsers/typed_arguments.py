"""Arguments that a model writes as bare text, as JSON: the tool's schema says which of them are strings."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from eyas.serve.parsers.base import BLANK
from eyas.serve.parsers.formats import DEFINITIONS, parameters_of
from eyas.serve.protocol.completions import Tool

STRING = frozenset({"string"})
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)
_KINDS = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


class ArgumentTypes:
    """The types that the schema of each function allows its parameters."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._parameters = {tool.function.name: parameters_of(tool) for tool in tools}

    def of(self, function: str, parameter: str) -> frozenset[str]:
        """The types of a parameter; a string if nothing is known."""
        schema = self._parameters.get(function, {})
        properties = schema.get("properties")
        known = properties.get(parameter) if isinstance(properties, dict) else None
        return types_of(known, schema)


def types_of(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """The JSON types that a schema allows; a string if it does not say. References start at the root."""
    types: set[str] = set()
    seen: set[str] = set()
    waiting = [schema]
    while waiting:
        one = waiting.pop()
        if not isinstance(one, dict):
            continue
        given = one.get("type")
        types.update(kind for kind in (given if isinstance(given, list) else [given]) if isinstance(kind, str))
        values = [
            *(one["enum"] if isinstance(one.get("enum"), list) else ()),
            *([one["const"]] if "const" in one else ()),
        ]
        types.update(_KINDS.get(type(value), "null") for value in values)
        for choices in ("anyOf", "oneOf", "allOf"):
            waiting += one[choices] if isinstance(one.get(choices), list) else []
        reference = one.get("$ref")
        if isinstance(reference, str) and reference not in seen:
            seen.add(reference)
            waiting.append(resolved(reference, root))
    return frozenset(types) or STRING


def resolved(reference: str, root: Mapping[str, Any]) -> Any:
    """What a reference into the root's definitions names; None for any other."""
    path = reference.split("/")
    if len(path) != 3 or path[0] != "#" or path[1] not in DEFINITIONS:
        return None
    definitions = root.get(path[1])
    return definitions.get(path[2]) if isinstance(definitions, dict) else None


def to_json(text: str, types: frozenset[str]) -> str:
    """A value as JSON: of the first of the types that the text can be, else a string."""
    value = text.strip(BLANK)
    word = value.lower()
    if "null" in types and (word == "null" or (word == "none" and "string" not in types)):
        return "null"
    if types & {"integer", "number"} and _NUMBER.fullmatch(value):
        return value
    if "boolean" in types:
        if word in ("true", "false"):
            return word
        if value in ("1", "0"):
            return "true" if value == "1" else "false"
    if types & {"object", "array"} and _is_json(value, types):
        return value
    return json.dumps(text, ensure_ascii=False)


def _is_json(text: str, types: frozenset[str]) -> bool:
    """Whether the text is an object or a list, as allowed."""
    if not (text.startswith("{") and "object" in types) and not (text.startswith("[") and "array" in types):
        return False
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


class ArgumentWriter:
    """Writes the arguments of one call as JSON, parameter by parameter. Strings are written as they come."""

    def __init__(self, function: str, types: ArgumentTypes, *, newlines: bool) -> None:
        self._function, self._types = function, types
        self._newlines = newlines
        """Whether a value stands on lines of its own, so that a newline before and after is not part of it."""
        self._names: set[str] = set()
        self._kinds: frozenset[str] | None = None
        """The types of the value that is being written; None if it is dropped."""
        self._value: list[str] = []
        self._at_start, self._held = True, ""

    def open(self, name: str) -> str:
        """Begin a parameter. One that was there already is dropped."""
        self._value, self._at_start, self._held = [], True, ""
        if name in self._names:
            self._kinds = None
            return ""
        self._kinds = self._types.of(self._function, name)
        text = f"{', ' if self._names else '{'}{json.dumps(name, ensure_ascii=False)}: "
        self._names.add(name)
        return text + ('"' if self._kinds == STRING else "")

    def add(self, text: str) -> str:
        """Go on with its value."""
        if self._kinds is None or not text:
            return ""
        if self._newlines and self._at_start:
            text = text.removeprefix("\n")
        self._at_start = False
        if self._kinds != STRING:
            self._value.append(text)
            return ""
        text, self._held = self._held + text, ""
        if self._newlines and text.endswith("\n"):
            text, self._held = text[:-1], "\n"
        return json.dumps(text, ensure_ascii=False)[1:-1]

    def close(self) -> str:
        """End its value."""
        if self._kinds is None:
            return ""
        value = "".join(self._value)
        return (
            '"'
            if self._kinds == STRING
            else to_json(value.removesuffix("\n") if self._newlines else value, self._kinds)
        )

    def end(self) -> str:
        """End the arguments."""
        return "}" if self._names else "{}"
