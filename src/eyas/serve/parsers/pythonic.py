"""Calls as a list in Python: `[f(a=1), g(b="x")]`, as Llama 3.2, Llama 4 and ToolACE write them.

The list must come first in the answer. A call is emitted once it is complete: before that it might be text. Values are
literals, read with `ast` one by one, so that parameters may be called as Python's keywords are.
"""

import ast
import json
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from eyas.serve.parsers.base import BLANK, MAX_BLANKS, MAX_NAME, ToolParser, is_name, whole_characters
from eyas.serve.parsers.formats import ToolCallFormat, json_rule, literal
from eyas.serve.parsers.parameter_grammar import properties_of
from eyas.serve.protocol.completions import Tool

MAX_CALL = 2**16
"""Characters of one call: `ast` takes a third of a second for the worst of this size."""
MAX_DEPTH = 64
"""How deep values may nest."""
CONSTANTS = {"true": True, "false": False, "null": None}
"""JSON's words, beside Python's own."""
_SIGNS = re.compile(r"""["'()\[\]{},=]""")
_STRING_SIGNS = re.compile(r"""["'\\]""")
_PAIRS = {")": "(", "]": "[", "}": "{"}
_KEY = re.compile(r"[^\W\d]\w*")


class PythonicParser(ToolParser):
    """Parses one answer."""

    def __init__(self, *, max_calls: int | None) -> None:
        super().__init__(max_calls=max_calls)
        self._raw: list[str] = []
        """Text since the last call, to be shown if it turns out to be no call."""
        self._raw_size = 0
        self._open: list[str] = []
        """Brackets that are open within the call, its own first."""
        self._quote, self._escaped = "", False
        self._piece: list[str] = []
        """The name, a key or a value that is being read."""
        self._name = ""
        self._key: str | None = None
        self._arguments_read: dict[str, Any] = {}

    def _start(self) -> bool:
        before = self._at
        more = self._skip(BLANK)
        self._blanks += self._text[before : self._at]
        if more and self._text[self._at] == "[" and len(self._blanks) <= MAX_BLANKS:
            self._raw, self._blanks = [self._blanks, "["], ""
            self._at += 1
            self._begin_call()
        elif more or len(self._blanks) > MAX_BLANKS:
            self._state = self._pass_rest
        return more

    def _begin_call(self) -> None:
        self._open, self._piece, self._raw_size = [], [], 0
        self._key, self._arguments_read = None, {}
        self._state = self._in_call

    def _in_call(self) -> bool:
        """The name, and all up to the bracket that closes the call."""
        if self._at >= len(self._text):
            return False
        if self._raw_size > MAX_CALL:
            return self._no_call()
        if self._quote:
            return self._in_string()
        found = _SIGNS.search(self._text, self._at)
        if found is None:
            self._keep(self._text[self._at :])
            return False
        sign = found.group()
        if sign in "\"'":
            return self._begin_string(found.start(), sign)
        self._keep(self._text[self._at : found.start()])
        if self._raw_size > MAX_CALL:
            return self._no_call()
        return self._structure(sign)

    def _begin_string(self, at: int, sign: str) -> bool:
        if not self._open:
            return self._no_call()
        if len(self._text) < at + 3 and not self._last:
            self._keep(self._text[self._at : at])
            rest = self._text[at:]
            if rest == sign or rest == sign * 2:
                return False  # two more characters decide whether three quotes open it
        if self._text.startswith(sign * 3, at):
            self._quote = sign * 3
        else:
            self._quote = sign
        self._keep(self._text[self._at : at + len(self._quote)])
        return True

    def _in_string(self) -> bool:
        if self._escaped:
            self._escaped = False
            self._keep(self._text[self._at])
            return True
        found = _STRING_SIGNS.search(self._text, self._at)
        if found is None:
            self._keep(self._text[self._at :])
            return False
        if found.group() == "\\":
            self._escaped = True
            self._keep(self._text[self._at : found.end()])
        elif self._text.startswith(self._quote, found.start()):
            self._keep(self._text[self._at : found.start() + len(self._quote)])
            self._quote = ""
        elif not self._last and self._quote.startswith(self._text[found.start() :]):
            self._keep(self._text[self._at : found.start()])
            return False
        else:
            self._keep(self._text[self._at : found.end()])
        return True

    def _structure(self, sign: str) -> bool:
        """A sign outside strings."""
        if not self._open:  # in front of the call's own bracket
            name = "".join(self._piece).strip(BLANK)
            if sign == "]" and self.calls and not name:  # behind a comma
                self._at += 1
                self._raw, self._state = [], self._pass_rest
                return True
            if sign != "(" or not is_name(name):
                return self._no_call()
            self._name, self._piece = name, []
            self._open.append(sign)
            self._skip_sign()
            return True
        own = len(self._open) == 1
        if own and sign == "=" and self._key is None:
            self._key, self._piece = "".join(self._piece).strip(BLANK), []
            self._skip_sign()
            return True
        if own and sign in ",)":
            if not self._end_value(last=sign == ")"):
                return self._no_call()
            self._skip_sign()
            if sign == ")":
                self._state = self._behind_call_end
            return True
        if sign in "([{":
            self._open.append(sign)
        elif sign in _PAIRS and self._open.pop() != _PAIRS[sign]:
            return self._no_call()
        if not self._open or len(self._open) > MAX_DEPTH:
            return self._no_call()
        self._keep(sign)
        return True

    def _end_value(self, *, last: bool) -> bool:
        """Take the value of a parameter; False if it is none."""
        text = "".join(self._piece).strip(BLANK)
        self._piece = []
        if self._key is None:
            return not text and last  # no parameters at all, or a comma behind the last
        key, self._key = self._key, None
        if not _KEY.fullmatch(key) or len(key) > MAX_NAME:
            return False
        try:
            self._arguments_read[key] = _literal_value(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return False
        return True

    def _behind_call_end(self) -> bool:
        """A call is complete: it is one if another or the end of the list follows."""
        before = self._at
        more = self._skip(BLANK)
        self._raw.append(self._text[before : self._at])
        if not more:
            return False
        sign = self._text[self._at]
        if sign not in ",]":
            return self._no_call()
        try:
            arguments = json.dumps(self._arguments_read, ensure_ascii=False, allow_nan=False)
        except (ValueError, RecursionError):
            return self._no_call()
        self._at += 1
        self._start_call(self._name)
        self._add_arguments(whole_characters(arguments))
        self._raw = [sign]
        self._begin_call()
        if sign == "]":
            self._raw, self._state = [], self._pass_rest
        return True

    def _no_call(self) -> bool:
        """All that is not in a call is text, from here on too."""
        self._emit_text("".join(self._raw))
        self._raw, self._quote, self._state = [], "", self._pass_rest
        return True

    def _keep(self, text: str) -> None:
        self._piece.append(text)
        self._raw.append(text)
        self._raw_size += len(text)
        self._at += len(text)

    def _skip_sign(self) -> None:
        """Go past a sign that belongs to no value."""
        self._raw.append(self._text[self._at])
        self._raw_size += 1
        self._at += 1

    def _finish(self) -> None:
        if self._state in (self._in_call, self._behind_call_end):
            self._emit_text("".join(self._raw))
        super()._finish()


def _literal_value(text: str) -> Any:
    """The value of a literal in Python or JSON. Raises what `ast` raises, or ValueError."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # unknown escapes in strings
        return _value_of(ast.parse(text, mode="eval").body)


def _value_of(node: ast.expr) -> Any:
    """The value of a syntax tree; it is no deeper than `MAX_DEPTH` allows."""
    match node:
        case ast.Constant(value=str() | bool() | int() | float() | None as value):
            return value
        case ast.Name(id=word) if word in CONSTANTS:
            return CONSTANTS[word]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value_of(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {_key_of(key): _value_of(value) for key, value in zip(keys, values, strict=True)}
    raise ValueError("no literal")


def _key_of(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise ValueError("no string as key")


class PythonicFormat(ToolCallFormat):
    """See the module. Templates do not tell it apart: it must be named."""

    name = "pythonic"
    markers = ()

    def new_parser(self, tools: Sequence[Tool], *, max_calls: int | None) -> PythonicParser:
        """See `ToolCallFormat`."""
        return PythonicParser(max_calls=max_calls)

    def lark_grammar(self, tools: Sequence[Tool], *, parallel: bool, special_tokens: Mapping[str, int]) -> str:
        """See `ToolCallFormat`. Values are JSON, whose words the parser knows too."""
        more = '(", " call)*' if parallel else ""
        rules = [f'start: "[" call {more} "]"', "call: " + " | ".join(f"f{number}" for number in range(len(tools)))]
        for number, tool in enumerate(tools):
            rules += _function_rules(tool, f"f{number}")
        return "\n".join(rules)


def _function_rules(tool: Tool, rule: str) -> list[str]:
    """A call with its parameters in the schema's order, set apart by commas; those not required may be missing."""
    properties = properties_of(tool)
    rules = [f"{rule}: {literal(f'{tool.function.name}(', {})} {rule}s0 {literal(')', {})}"]
    for at, (key, schema, required) in enumerate(properties):
        # s: no parameter has come yet; r: one has.
        rules.append(f"{rule}s{at}: {rule}p{at} {rule}r{at + 1}" + ("" if required else f" | {rule}s{at + 1}"))
        rules.append(f'{rule}r{at}: ", " {rule}p{at} {rule}r{at + 1}' + ("" if required else f" | {rule}r{at + 1}"))
        rules += [f"{rule}p{at}: {literal(f'{key}=', {})} {rule}v{at}", f"{rule}v{at}: {json_rule(schema)}"]
    end = len(properties)
    return [*rules, f'{rule}s{end}: ""', f'{rule}r{end}: ""']
