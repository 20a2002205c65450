"""Sizes of grammars: what is too large is refused by name before anything compiles, and what is honest passes."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from each import each
from eyas.errors import UserError
from eyas.grammar.compile import MOST_CHARACTERS
from eyas.serve.grammar.bounds import MAX_CHOICES, MAX_DEPTH, check_bounds

INTEGERS = {"type": "array", "items": {"type": "integer"}}


def nested(depth: int) -> str:
    return '{"type": "array", "items": ' * depth + "{}" + "}" * depth


TOO_LARGE: list[tuple[Any, str, list[str]]] = [
    ("json", INTEGERS | {"minItems": 10**9}, ["minItems is 1,000,000,000", "10,000", "lower it"]),
    ("json", INTEGERS | {"maxItems": 2_000_000}, ["maxItems is 2,000,000", "10,000", "leave it out"]),
    ("json", INTEGERS | {"maxItems": 1e300}, ["maxItems", "10,000"]),
    ("json", '{"maxItems": 1e999}', ["maxItems is inf"]),
    ("json", '{"maxItems": 3, "maxItems": 70000}', ["maxItems is 70,000"]),  # the last of two counts
    ("json", '{"\\u006daxItems": 70000}', ["maxItems is 70,000"]),
    ("json", {"$defs": {"a": INTEGERS | {"maxItems": 10**6}}, "$ref": "#/$defs/a"}, ["maxItems is 1,000,000"]),
    ("json", {"definitions": {"a": {"minLength": 10**9}}}, ["minLength is 1,000,000,000", "1,000,000"]),
    ("json", {"properties": {"a": {"anyOf": [{"maxLength": 10**9}]}}}, ["maxLength is 1,000,000,000"]),
    ("json", {"additionalProperties": {"minProperties": 10**9}}, ["minProperties", "1,000"]),
    ("json", {"allOf": [{"maxProperties": 10**9}]}, ["maxProperties", "1,000"]),
    ("json", {"prefixItems": [INTEGERS | {"maxItems": 10_000}] * 5}, ["add up to 50,000", "40,000"]),
    ("json", {"properties": {f"p{number}": {} for number in range(1001)}}, ["properties has 1,001", "1,000"]),
    (
        "json",
        {"patternProperties": {f"^{number}x*$": {} for number in range(101)}},
        ["patternProperties", "101", "100"],
    ),
    ("json", {"patternProperties": {"^a{200000}$": {}}}, ["{200000}"]),
    ("json", {"multipleOf": 999983}, ["multipleOf is 999,983", "20,000"]),
    ("json", {"multipleOf": 0.0999983}, ["multipleOf"]),
    ("json", {"minimum": -(10**50)}, ["minimum", "40 digits"]),
    ("json", {"pattern": "^(a{1000}){1000}$"}, ["{1000}, with those inside it,", "1,000,000 times", "100,000"]),
    ("json", {"enum": list(range(20_001))}, ["20,000 values"]),
    ("json", nested(MAX_DEPTH), [f"{MAX_DEPTH} levels"]),
    ("json", nested(2000), [f"{MAX_DEPTH} levels"]),
    ("json", " " * (MOST_CHARACTERS + 1), ["131,073 characters"]),
    ("regex", "(a{1000}){1000}", ["1,000,000 times"]),
    ("regex", "((a|b{50}){50}(c{2}[)]){30}){50}", ["125,000 times"]),
    ("regex", "a{4294967295}", ["{4294967295} repeats 4,294,967,295 times"]),
    ("regex", "a{2,200000}", ["{2,200000} repeats 200,000"]),
    ("regex", "a{200000,}", ["200,000"]),
    ("choice", [str(number) for number in range(MAX_CHOICES + 1)], ["5,001 choices", "5,000"]),
    ("lark", 'start: "a"{1000000}', ["{1000000", "1,000,000 times"]),
    ("lark", 'start: "a"~2..2000000', ["2,000,000 times"]),
    ("lark", "start: /(a{1000}){1000}/", ["1,000,000 times"]),
    ("lark", 'start: "x" %json {"type": "array", "maxItems": 2000000} | "y"', ["maxItems is 2,000,000"]),
    ("lark", 'start: %json {"a": "}"} b\nb: %json {"minLength": 1e9}', ["minLength"]),
    ("grammar", 'root ::= "a"{5,1000000}', ["1,000,000 times"]),
    ("grammar", "root ::= [a-z]{1000000}", ["1,000,000 times"]),
]


@each(("kind", "grammar", "parts"), TOO_LARGE)
def test_too_large_grammars_are_refused_with_the_limit(kind: Any, grammar: Any, parts: list[str]) -> None:
    with pytest.raises(UserError) as refused:
        check_bounds(kind, grammar if isinstance(grammar, str) else json.dumps(grammar))
    assert all(part in str(refused.value) for part in parts), refused.value


@each(
    ("kind", "grammar"),
    [
        ("json", INTEGERS | {"minItems": 10, "maxItems": 10_000}),
        ("json", {"type": "string", "maxLength": 1_000_000, "pattern": r"^[a-z]{1,1000}(\{99999999\}|[{]9999999})*$"}),
        ("json", {"const": {"maxItems": 10**9, "pattern": "a{99999999}"}}),  # data
        ("json", {"properties": {"maxItems": {"type": "integer", "default": {"minLength": 10**12}}}}),  # a name
        ("json", {"type": "number", "multipleOf": 0.01, "minimum": -1e300, "maximum": 10**18}),
        ("json", {"multipleOf": 1_000_000_000}),
        ("json", nested(MAX_DEPTH - 2)),
        ("json", {"$ref": "#"}),
        ("json", "{"),
        ("json", "[1, true, null]"),
        ("json", '{"minimum": ' + "9" * 5000 + "}"),  # more digits than Python reads: the compiler refuses it
        ("regex", "(a{100}){100}[{]2000000}|" + "x{90000}" * 10),
        ("regex", "))){5}"),
        ("choice", ["a", "b"]),
        ("lark", 'start: "a{9999999}" b // {9999999}\nb: /x/{1,5} "~9999999"'),
        ("lark", "start: %json {"),
        ("lark", "start: %json " + "[" * 3000),
        ("grammar", 'root ::= "yes" | [0-9]{1,100}'),
    ],
)
def test_normal_and_unreadable_grammars_pass(kind: Any, grammar: Any) -> None:
    check_bounds(kind, grammar if isinstance(grammar, str) else json.dumps(grammar))


@each("unit", ["(", "[", "a{1,2}", "\\", "(a|", '"', "/", "%json {", "~1..2 ", "{", "[[:alpha:]"])
@each("kind", ["regex", "lark"])
def test_reading_takes_linear_time(kind: Any, unit: str) -> None:
    started = time.process_time()
    check_bounds(kind, unit * (MOST_CHARACTERS // len(unit)))
    assert time.process_time() - started < 2
