"""Compiles the text of a grammar to llguidance's matcher, without torch, so that a process for checking stays small.

The result depends on the tokenizer, the kind and the text alone: a grammar that one process has compiled compiles in
another too, at the same cost.

JSON comes on one line, with a blank at most behind commas and colons: where any white space is allowed, a small model
may write nothing but white space. A schema may change that with llguidance's own `x-guidance`.

The library is imported at first use: most servers never need it, and it takes 2 MiB.
"""

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from eyas.errors import UserError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

GrammarKind = Literal["json", "regex", "grammar", "choice", "lark"]
"""A JSON schema, a regular expression, Lark or GBNF, a JSON list of choices, Lark only."""
MOST_CHARACTERS = 2**17
"""The length limit of a schema, a pattern or a grammar."""
ON_ONE_LINE: Any = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
PARSER_LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 400_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 20_000,
    "max_lexer_states": 64_000,
    "max_grammar_size": 200_000,
}
"""Bounds of one grammar's work, below llguidance's defaults (docs/measurements.md): the first for compiling, the next
two for one token mask, the states for as long as the grammar lives, as all its requests share one lexer."""


@dataclass(frozen=True, kw_only=True)
class TokenizerData:
    """A tokenizer as llguidance reads it; it can be sent to another process."""

    text: str
    """`tokenizer.json`, without padding and truncation."""
    n_vocab: int
    eos_token: int

    def read(self) -> "LLTokenizer":
        """Build the library's tokenizer. Takes about a second, and holds the interpreter's lock for that long."""
        from llguidance import LLTokenizer

        return LLTokenizer(self.text, n_vocab=self.n_vocab, eos_token=self.eos_token)


def compile_matcher(tokenizer: "LLTokenizer", kind: GrammarKind, text: str) -> "LLMatcher":
    """Compile a matcher and its first token mask, which is the slowest and shows whether any text is possible."""
    from llguidance import LLMatcher
    from llguidance._lib import LLParserLimits

    if len(text) > MOST_CHARACTERS:
        raise UserError(f"it has {len(text):,} characters, above the {MOST_CHARACTERS:,} allowed; shorten it")
    try:
        translated = _translate(kind, text)
    except UserError:
        raise
    except RecursionError:
        raise UserError("it is nested too deeply; flatten it") from None
    except Exception as error:  # its translators raise errors of any type, all of them about the text
        raise UserError(first_line(str(error))) from error
    matcher = LLMatcher(
        tokenizer, translated, log_level=0, limits=LLParserLimits(verbose_errors=False, **PARSER_LIMITS)
    )
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        raise UserError(why_stopped(matcher))
    return matcher


def _translate(kind: GrammarKind, text: str) -> str:
    from llguidance import LLMatcher, grammar_from

    if kind == "json":
        return LLMatcher.grammar_from_json_schema(text, defaults=ON_ONE_LINE)
    if kind == "regex":
        return LLMatcher.grammar_from_regex(text)
    if kind == "grammar":
        return grammar_from("grammar", text)
    if kind == "choice":
        choices = json.loads(text)
        if not choices:
            raise UserError("there are 0 choices, so nothing could come; give 1 or more")
        # One terminal: alternatives of a rule are parser items, of which one position has few thousand at most.
        return LLMatcher.grammar_from_lark("start: CHOICE\nCHOICE: " + " | ".join(json.dumps(one) for one in choices))
    return LLMatcher.grammar_from_lark(text)


def why_stopped(matcher: "LLMatcher") -> str:
    """The reason of a matcher's error, in a few words."""
    reason = first_line(matcher.get_error())
    if not reason or reason.startswith("NoExtension"):
        return "no text satisfies it"
    if reason.startswith("panic"):  # a failed assertion about sizes, in the library's own terms
        return "it is too large for llguidance; simplify it"
    return reason


def first_line(words: str) -> str:
    """The first line of an error, without the excerpt of the text."""
    lines = [line.strip() for line in words.splitlines() if line.strip()]
    told = [line for line in lines if line.startswith("error:")] or lines[:1]
    return " ".join(told).removeprefix("error:").strip().rstrip(".")
