"""Grammars of arguments that are written parameter by parameter.

Each parameter comes at most once, in the order of the schema; required ones always come. JSON values keep to their
schema. Strings written as bare text keep to `enum` and `const`; other limits on them are not enforced.
"""

from collections.abc import Callable, Mapping
from typing import Any

from eyas.serve.api_error import ApiError
from eyas.serve.parsers.formats import DEFINITIONS, free_text, json_rule, literal, parameters_of
from eyas.serve.parsers.typed_arguments import resolved, types_of
from eyas.serve.protocol.completions import Tool

NOT_BY_PARAMETER = ("$ref", "anyOf", "oneOf", "allOf", "not", "if", "patternProperties", "dependentSchemas")
"""What a schema of arguments may not say if they are written parameter by parameter."""


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
    *,
    before_all: str,
    before: Callable[[str], str],
    behind: str,
    behind_all: str,
    special_tokens: Mapping[str, int] | None = None,
) -> str:
    """Arguments between texts: the right side of a Lark rule, and the rules it needs, numbered by the function."""
    special = special_tokens or {}
    parts, rules = [literal(before_all, special)], []
    for at, (key, schema, required) in enumerate(properties_of(tool)):
        rule = f"f{number}p{at}"
        parts.append(rule if required else f"{rule}?")
        value, more = _value(schema, f"{rule}v", behind, special)
        rules += [f"{rule}: {literal(before(key), special)} {value}", *more]
    return "\n".join([" ".join([*parts, literal(behind_all, special)]), *rules])


def _value(schema: dict[str, Any], rule: str, behind: str, special_tokens: Mapping[str, int]) -> tuple[str, list[str]]:
    """A value and the text behind it, and the rules that takes."""
    end = literal(behind, special_tokens)
    if "string" not in types_of(schema, schema):
        return f"{rule} {end}", [f"{rule}: {json_rule(schema)}"]
    named = resolved(schema["$ref"], schema) if isinstance(schema.get("$ref"), str) else schema
    words = _words(named if isinstance(named, dict) else {})
    if words is not None:
        return f"({' | '.join(literal(word, {}) for word in words)}) {end}", []
    return rule, free_text(rule, behind, special_tokens)


def _words(schema: dict[str, Any]) -> list[str] | None:
    """The only strings that are allowed, if there is a list of them."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return values if isinstance(values, list) and values and all(isinstance(value, str) for value in values) else None
