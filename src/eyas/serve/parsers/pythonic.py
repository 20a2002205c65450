"""Tool calls as a list in Python: `[f(a=1), g(b="x")]`, as Llama 3.2, Llama 4 and ToolACE write them.

The list must come first in the answer. A call is emitted once it is complete: before that it might be text. Values are
literals, read with `ast` one by one, so that parameters may have the names of Python's keywords.
"""

import ast
import json
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from eyas.serve.parsers.arguments import properties_of
from eyas.serve.parsers.base import BLANK, MAX_NAME, AnswerParser, Steps, is_name, whole_characters
from eyas.serve.parsers.formats import ToolCallFormat, json_rule, literal
from eyas.serve.protocol.completions import Tool

MAX_CALL = 2**16
"""Characters of one call: `ast` takes a third of a second for the worst of this size."""
MAX_DEPTH = 64
"""How deep values may nest."""
CONSTANTS = {"true": True, "false": False, "null": None}
"""JSON's constants, beside Python's own."""
_SIGNS = re.compile(r"""["'()\[\]{},=]""")
_STRING_SIGNS = re.compile(r"""["'\\]""")
_PAIRS = {")": "(", "]": "[", "}": "{"}
_KEY = re.compile(r"[^\W\d]\w*")


class PythonicParser(AnswerParser):
    """Parses one answer."""

    def __init__(self, *, max_calls: int | None) -> None:
        super().__init__(max_calls=max_calls)
        self._raw: list[str] = []
        """Text since the last call, to be shown if it turns out to be no call."""
        self._size = 0
        """Characters of the call that is being read."""
        self._piece: list[str] = []
        """The name, a key or a value that is being read."""

    def _parse(self) -> Steps[None]:
        if (yield from self._begins_with("[")):
            self._raw, self._blanks = [self._blanks], ""
            self._skip_sign()
            while (yield from self._one_call()):
                pass
            self._emit_text("".join(self._raw))
        yield from self._pass_rest()

    def _one_call(self) -> Steps[bool]:
        """Emit a call, and return whether another follows. If it is no call, its text is left in `_raw`."""
        self._size = 0
        name = yield from self._function_name()
        arguments = (yield from self._keyword_arguments()) if name else None
        if arguments is None:
            return False
        # It is a call if another or the end of the list follows.
        if not (yield from self._skip(BLANK, self._raw.append)) or self._text[self._at] not in ",]":
            return False
        try:
            text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        except (ValueError, RecursionError):
            return False
        self._start_call(name)
        self._add_arguments(whole_characters(text))
        self._raw = []
        if self._text[self._at] == "]":
            self._at += 1
            return False
        self._skip_sign()
        return True

    def _function_name(self) -> Steps[str]:
        """The name in front of the call's bracket; "" if there is no call."""
        self._piece = []
        sign = yield from self._next_sign()
        name = "".join(self._piece).strip(BLANK)
        if sign == "]" and self.calls and not name:  # behind a comma
            self._at += 1
            self._raw = []
            return ""
        if sign != "(" or not is_name(name):
            return ""
        self._skip_sign()
        return name

    def _keyword_arguments(self) -> Steps[dict[str, Any] | None]:
        """The arguments, up to and including the bracket that closes the call; None if this is no call."""
        key: str | None = None
        arguments: dict[str, Any] = {}
        brackets: list[str] = []
        self._piece = []
        while sign := (yield from self._next_sign()):
            if sign in "\"'":
                yield from self._string(sign)
            elif not brackets and sign == "=" and key is None:
                key = "".join(self._piece).strip(BLANK)
                self._skip_sign()
            elif not brackets and sign in ",)":
                text = "".join(self._piece).strip(BLANK)
                if key is not None:
                    try:
                        arguments[_parameter_name(key)] = _literal_value(text)
                    except (ValueError, SyntaxError, MemoryError, RecursionError):
                        return None
                elif text or sign == ",":  # no parameters at all, or a comma behind the last
                    return None
                self._skip_sign()
                key = None
                if sign == ")":
                    return arguments
            else:
                if sign in "([{":
                    brackets.append(sign)
                elif sign in _PAIRS and (not brackets or brackets.pop() != _PAIRS[sign]):
                    return None
                if len(brackets) >= MAX_DEPTH:
                    return None
                self._keep(len(sign))
        return None

    def _next_sign(self) -> Steps[str]:
        """Read up to the next sign, which is returned; "" if the answer ends or the call is too long."""
        while self._size <= MAX_CALL:
            found = _SIGNS.search(self._text, self._at)
            self._keep((found.start() if found is not None else len(self._text)) - self._at)
            if found is not None:
                return found.group() if self._size <= MAX_CALL else ""
            if self._last:
                break
            yield
        return ""

    def _string(self, sign: str) -> Steps[None]:
        """Keep a string. Two more characters decide whether three quotes open it."""
        while not self._last and len(self._text) - self._at < 3 and self._text[self._at :] in (sign, sign * 2):
            yield
        quote = sign * 3 if self._text.startswith(sign * 3, self._at) else sign
        self._keep(len(quote))
        while self._size <= MAX_CALL and (yield from self._more()):
            found = _STRING_SIGNS.search(self._text, self._at)
            self._keep((found.start() if found is not None else len(self._text)) - self._at)
            if found is None:
                continue
            if found.group() == "\\":
                self._keep(1)
                if (yield from self._more()):
                    self._keep(1)
            elif (yield from self._take(quote)):
                self._unread(quote)
                self._keep(len(quote))
                return
            else:
                self._keep(1)

    def _keep(self, count: int) -> None:
        """Read characters of a name, a key or a value."""
        self._piece.append(self._text[self._at : self._at + count])
        self._raw.append(self._piece[-1])
        self._size += count
        self._at += count

    def _skip_sign(self) -> None:
        """Read a sign between two pieces."""
        self._keep(1)
        self._piece = []


def _parameter_name(text: str) -> str:
    if not _KEY.fullmatch(text) or len(text) > MAX_NAME:
        raise ValueError("no name of a parameter")
    return text


def _literal_value(text: str) -> Any:
    """The value of a literal in Python or JSON. Raises what `ast` raises, or ValueError."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # unknown escapes in strings
        return _value_of(ast.parse(text, mode="eval").body)


def _value_of(node: ast.expr) -> Any:
    """The value of a syntax tree, which is no deeper than `MAX_DEPTH`."""
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
    """Calls as a list in Python. No template shows it: the operator must name it."""

    name = "pythonic"

    def new_parser(self, tools: Sequence[Tool], *, max_calls: int | None) -> PythonicParser:
        return PythonicParser(max_calls=max_calls)

    def lark_grammar(self, tools: Sequence[Tool], *, parallel: bool, special_tokens: Mapping[str, int]) -> str:
        """Values are JSON, whose constants the parser knows too."""
        more = '(", " call)*' if parallel else ""
        rules = [f'start: "[" call {more} "]"', "call: " + " | ".join(f"f{number}" for number in range(len(tools)))]
        for number, tool in enumerate(tools):
            rules += _function_rules(tool, f"f{number}")
        return "\n".join(rules)


def _function_rules(tool: Tool, rule: str) -> list[str]:
    """A call with its parameters in the schema's order, separated by commas; optional ones may be missing."""
    properties = properties_of(tool)
    rules = [f"{rule}: {literal(f'{tool.function.name}(', {})} {rule}s0 {literal(')', {})}"]
    for at, (key, schema, required) in enumerate(properties):
        # s: no parameter has come yet; r: one has.
        rules.append(f"{rule}s{at}: {rule}p{at} {rule}r{at + 1}" + ("" if required else f" | {rule}s{at + 1}"))
        rules.append(f'{rule}r{at}: ", " {rule}p{at} {rule}r{at + 1}' + ("" if required else f" | {rule}r{at + 1}"))
        rules += [f"{rule}p{at}: {literal(f'{key}=', {})} {rule}v{at}", f"{rule}v{at}: {json_rule(schema)}"]
    end = len(properties)
    return [*rules, f'{rule}s{end}: ""', f'{rule}r{end}: ""']
