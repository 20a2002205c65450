"""Arguments that a model writes one by one as bare text: their types by the tool's schema, as JSON, and as grammars."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from eyas.serve.api_error import ApiError
from eyas.serve.parsers.base import BLANK
from eyas.serve.parsers.formats import DEFINITIONS, free_text, json_rule, literal, parameters_of
from eyas.serve.protocol.completions import Tool

STRING = frozenset({"string"})
NOT_BY_PARAMETER = ("$ref", "anyOf", "oneOf", "allOf", "not", "if", "patternProperties", "dependentSchemas")
"""Keywords that the root of a schema may not have if its arguments are written one by one."""
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
        return types_of(properties.get(parameter) if isinstance(properties, dict) else None, schema)


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
        values = [one["const"]] if "const" in one else []
        values += one["enum"] if isinstance(one.get("enum"), list) else []
        types.update(_KINDS.get(type(value), "null") for value in values)
        for choices in ("anyOf", "oneOf", "allOf"):
            waiting += one[choices] if isinstance(one.get(choices), list) else []
        reference = one.get("$ref")
        if isinstance(reference, str) and reference not in seen:
            seen.add(reference)
            waiting.append(_resolved(reference, root))
    return frozenset(types) or STRING


def _resolved(reference: str, root: Mapping[str, Any]) -> Any:
    """The schema that a reference into the root's definitions names; None for any other reference."""
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
        """Begin a parameter. A second one of the same name is dropped."""
        self._value, self._at_start, self._held = [], True, ""
        if name in self._names:
            self._kinds = None
            return ""
        self._kinds = self._types.of(self._function, name)
        text = f"{', ' if self._names else '{'}{json.dumps(name, ensure_ascii=False)}: "
        self._names.add(name)
        return text + ('"' if self._kinds == STRING else "")

    def add(self, text: str) -> str:
        """Continue its value."""
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
        if self._kinds == STRING:
            return '"'
        value = "".join(self._value)
        return to_json(value.removesuffix("\n") if self._newlines else value, self._kinds)

    def end(self) -> str:
        """End the arguments."""
        return "}" if self._names else "{}"


def properties_of(tool: Tool) -> list[tuple[str, dict[str, Any], bool]]:
    """Name, schema and whether it is required, of each parameter of a function."""
    root = parameters_of(tool)
    found = next((key for key in NOT_BY_PARAMETER if key in root), None)
    if found is not None:
        raise ApiError(
            400,
            f"the parameters of {tool.function.name!r} use {found} at their root, and this model writes arguments "
            "one by one; list them under properties, or use tool_choice auto",
            field="tools",
            code="unsupported_parameter",
        )
    shared = {key: root[key] for key in DEFINITIONS if key in root}
    given = root.get("properties")
    properties = given if isinstance(given, dict) else {}
    required = [key for key in root.get("required") or () if isinstance(key, str)]
    schemas = dict(properties) | {key: {} for key in required if key not in properties}
    return [
        (key, shared | (schema if isinstance(schema, dict) else {}), key in required) for key, schema in schemas.items()
    ]


def parameter_rules(
    tool: Tool,
    number: int,
    around_all: tuple[str, str],
    around_each: tuple[str, str],
    special_tokens: Mapping[str, int],
) -> str:
    """The rules of a function's arguments: the right side of a Lark rule, then the rules that it needs.

    In the texts around all arguments and around each, {} stands for the name. Each parameter comes at most once, in the
    order of the schema; required ones always come. JSON values satisfy their schema. Strings written as bare text keep
    to `enum` and `const`; other limits on them are not enforced.
    """
    parts, rules = [literal(around_all[0].format(tool.function.name), special_tokens)], []
    for at, (key, schema, required) in enumerate(properties_of(tool)):
        rule = f"f{number}p{at}"
        parts.append(rule if required else f"{rule}?")
        value, more = _value(schema, f"{rule}v", around_each[1], special_tokens)
        rules += [f"{rule}: {literal(around_each[0].format(key), special_tokens)} {value}", *more]
    return "\n".join([" ".join([*parts, literal(around_all[1], special_tokens)]), *rules])


def _value(schema: dict[str, Any], rule: str, behind: str, special_tokens: Mapping[str, int]) -> tuple[str, list[str]]:
    """A value and the text behind it, and the rules that they need."""
    end = literal(behind, special_tokens)
    if "string" not in types_of(schema, schema):
        return f"{rule} {end}", [f"{rule}: {json_rule(schema)}"]
    named = _resolved(schema["$ref"], schema) if isinstance(schema.get("$ref"), str) else schema
    words = _allowed_words(named if isinstance(named, dict) else {})
    if words is not None:
        return f"({' | '.join(literal(word, {}) for word in words)}) {end}", []
    return rule, free_text(rule, behind, special_tokens)


def _allowed_words(schema: dict[str, Any]) -> list[str] | None:
    """The only strings that are allowed, if there is a list of them."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return values if isinstance(values, list) and values and all(isinstance(value, str) for value in values) else None
