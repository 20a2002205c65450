"""Size limits of untrusted grammars, checked before anything is compiled.

llguidance writes out each item of `minItems` and `maxItems`, makes a state for each remainder of `multipleOf`, and
intersects `patternProperties` pair by pair, all before it checks its own limits. Lengths of strings and repetitions of
regular expressions cost little until text comes, so their limits only exclude sizes that no answer could have. The
limits follow measurements (docs/measurements.md).

Costs that these functions do not see, such as products of several keywords, meet the grammar worker's limits of memory
and time. A text that they cannot read is left to the compiler, which says what is wrong with it.
"""

import json
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from eyas.errors import UserError
from eyas.grammar.compile import MOST_CHARACTERS, GrammarKind

MAX_ITEMS = 10_000
MAX_ITEMS_TOGETHER = 40_000
"""The sum over all arrays of a schema."""
MAX_LENGTH = 1_000_000
"""Characters of a string."""
MAX_PROPERTIES = 1_000
"""Properties of one object that may be named, or counted by minProperties and maxProperties."""
MAX_PATTERN_PROPERTIES = 100
MAX_DEPTH = 64
MAX_NODES = 20_000
"""Values in a schema, of any type."""
MAX_DIGITS = 40
"""Digits of a number."""
MAX_MULTIPLE_OF = 20_000
"""The limit without factors of 2 and 5, which need no states."""
MAX_REPETITIONS = 100_000
"""Repetitions of one thing by nested quantifiers."""
MAX_CHOICES = 5_000

_COUNTS = {
    "minItems": MAX_ITEMS,
    "maxItems": MAX_ITEMS,
    "minLength": MAX_LENGTH,
    "maxLength": MAX_LENGTH,
    "minProperties": MAX_PROPERTIES,
    "maxProperties": MAX_PROPERTIES,
}
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_LITERALS = ("const", "enum", "default", "examples")
"""Keywords whose values are data: a `maxItems` in them is an ordinary key."""
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose keys are names, not keywords."""


def check_bounds(kind: GrammarKind, text: str) -> None:
    """Raise a `UserError` that names what is too large, its limit and the fix."""
    if len(text) > MOST_CHARACTERS:
        raise UserError(f"it has {len(text):,} characters, above the {MOST_CHARACTERS:,} allowed; shorten it")
    if kind == "json":
        check_schema(_read_json(text))
    elif kind == "regex":
        check_regex(text)
    elif kind == "choice":
        choices = _read_json(text)
        if isinstance(choices, list) and len(choices) > MAX_CHOICES:
            raise UserError(f"it has {len(choices):,} choices, above the {MAX_CHOICES:,} allowed; give fewer")
    else:
        check_lark(text)


def check_schema(schema: Any) -> None:
    """Check a JSON schema, with `$defs` and everything nested."""
    items = 0
    for keyword, value, depth, nodes in _walk(schema):
        if depth > MAX_DEPTH:
            raise UserError(f"it is nested deeper than the {MAX_DEPTH} levels allowed; flatten it")
        if nodes > MAX_NODES:
            raise UserError(f"it has more than the {MAX_NODES:,} values allowed; split it or shorten its lists")
        if isinstance(value, dict):
            items += max(_count(value, "minItems"), _count(value, "maxItems"))
        _check_keyword(keyword, value)
    if items > MAX_ITEMS_TOGETHER:
        raise UserError(
            f"minItems and maxItems of all arrays add up to {items:,}, above the {MAX_ITEMS_TOGETHER:,} allowed; "
            "lower maxItems, or leave it out for arrays of any length"
        )


def check_regex(pattern: str) -> None:
    """Check how often nested quantifiers of a regular expression repeat a thing."""
    inside, atom = [1], 1  # the most repetitions in each open group, and of the newest part
    for match in _REGEX_PART.finditer(pattern):
        part = match.group()
        if part == "(":
            inside.append(1)
            atom = 1
        elif part == ")":
            atom = inside.pop() if len(inside) > 1 else 1
        elif match.group("least"):
            count = int(match.group("most") or match.group("least"))
            atom *= max(count, 1)
            if atom > MAX_REPETITIONS:
                words = part if atom == count else f"{part}, with those inside it,"
                raise UserError(
                    f"{words} repeats {atom:,} times, above the {MAX_REPETITIONS:,} allowed; lower it, or use * or +"
                )
        else:
            atom = 1
        inside[-1] = max(inside[-1], atom)


def check_lark(text: str) -> None:
    """Check a grammar in Lark's syntax or GBNF, with the schemas and regular expressions in it."""
    position = 0
    while match := _LARK_PART.search(text, position):
        position = match.end()
        if match.group("json"):
            try:
                schema, position = json.JSONDecoder().raw_decode(text, match.end())
            except (ValueError, RecursionError):
                return  # the compiler says what is wrong with it
            check_schema(schema)
        elif match.group("regex"):
            check_regex(match.group("regex"))
        elif match.group("least"):
            count = int(match.group("most") or match.group("most_") or match.group("least"))
            if count > MAX_REPETITIONS:
                raise UserError(
                    f"{match.group()} repeats {count:,} times, above the {MAX_REPETITIONS:,} allowed; lower it, "
                    "or use * or +"
                )


_REGEX_PART = re.compile(
    r"\\.|\[\^?\]?(?:\\.?|\[:\w{1,16}:\]|[^\]\\])*(?:\]|\Z)|\{(?P<least>\d{1,30})(?:,(?P<most>\d{0,30}))?\}|[()]|[*+?]|[^*+?]",
    re.DOTALL,
)
_LARK_PART = re.compile(
    r"(?P<comment>(?:\#|//)[^\n]*)"
    r'|"(?:\\.|[^"\\\n])*"'
    r"|(?P<json>%(?:json|llguidance)\s*(?=\{))"
    r"|/(?P<regex>(?:\\.|[^/\\\n])+)/"
    r"|[{~]\s*(?P<least>\d{1,30})\s*(?:,\s*(?P<most>\d{0,30})|\.\.\s*(?P<most_>\d{1,30}))?"
)


def _read_json(text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise UserError(f"it is nested deeper than the {MAX_DEPTH} levels allowed; flatten it") from None
    except ValueError:
        return None  # the compiler says where


def _walk(schema: Any) -> Iterator[tuple[str, Any, int, int]]:
    """All values: the keyword of each, if any, the value, its depth, and the number of values so far."""
    nodes = 0
    left: list[tuple[str, Any, int, bool]] = [("", schema, 1, True)]
    while left:
        keyword, value, depth, is_schema = left.pop()
        nodes += 1
        yield keyword, value, depth, nodes
        if isinstance(value, dict):
            for key, inner in value.items():
                named = not is_schema or keyword in _NAMED
                left.append(("" if named else key, inner, depth + 1, is_schema and (named or key not in _LITERALS)))
        elif isinstance(value, list):
            left += [("", inner, depth + 1, is_schema) for inner in value]


def _check_keyword(keyword: str, value: Any) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if keyword in _COUNTS and is_number and value > _COUNTS[keyword]:
        fix = "lower it" if keyword.startswith("min") else "lower it, or leave it out if any number will do"
        raise UserError(f"{keyword} is {_shown(value)}, above the {_COUNTS[keyword]:,} allowed; {fix}")
    if keyword in _NUMBERS and is_number and len(str(value)) > MAX_DIGITS:
        raise UserError(f"{keyword} has more than the {MAX_DIGITS} digits allowed; round it")
    if keyword == "multipleOf" and is_number and (step := _without_2_and_5(value)) > MAX_MULTIPLE_OF:
        raise UserError(
            f"multipleOf is {_shown(value)}, which without its factors of 2 and 5 is {step:,}, above the "
            f"{MAX_MULTIPLE_OF:,} allowed; use a rounder number"
        )
    if keyword == "pattern" and isinstance(value, str):
        check_regex(value)
    if keyword in ("properties", "patternProperties") and isinstance(value, dict):
        limit = MAX_PROPERTIES if keyword == "properties" else MAX_PATTERN_PROPERTIES
        if len(value) > limit:
            raise UserError(
                f"{keyword} has {len(value):,} of them, above the {limit:,} allowed in one object; nest or split it"
            )
        if keyword == "patternProperties":
            for pattern in value:
                check_regex(pattern)


def _count(schema: dict[str, Any], keyword: str) -> int:
    value = schema.get(keyword, 0)
    return int(value) if isinstance(value, int | float) and 0 <= value <= MAX_ITEMS else 0


def _without_2_and_5(value: float) -> int:
    """The digits of a number as an integer, without factors of 2 and 5."""
    number = Decimal(str(value))
    if not number.is_finite() or number <= 0:
        return 1
    digits = int("".join(str(digit) for digit in number.as_tuple().digits))
    for factor in (2, 5):
        while digits % factor == 0:
            digits //= factor
    return digits


def _shown(value: float) -> str:
    words = f"{value:,}"
    return words if len(words) <= MAX_DIGITS else f"{words[:MAX_DIGITS]}…"
