"""Grammars by llguidance: JSON schemas, regular expressions, Lark and GBNF grammars, choices.

The library parses the text of tokens, so it must know the target's tokenizer; reading that takes about a second and is
done once. Its matcher can be copied and rolled back, which is all that a `GrammarMatcher` needs. Work on one grammar is
bounded by the library's own fuel, and texts by `MOST_CHARACTERS`.

JSON comes on one line, with a blank at most behind commas and colons: where any white space may come, a small model may
find nothing but white space to say. A schema may say otherwise by llguidance's own `x-guidance`.

Shapes: V target vocabulary.
"""

import json
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer, grammar_from
from llguidance._lib import LLParserLimits
from llguidance.hf import from_tokenizer
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from eyas.errors import UserError

MOST_CHARACTERS = 2**17
"""Of a schema, a pattern or a grammar."""
ON_ONE_LINE: Any = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}


class LlGuidance:
    """Makes grammars for one target. Threads may share it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            raise UserError(
                f"grammars need a tokenizer of the tokenizers library, not a {type(tokenizer).__name__}; "
                "leave structured output out or convert the tokenizer"
            )
        self.vocab_size = vocab_size
        self._tokenizer = from_tokenizer(tokenizer, n_vocab=max(vocab_size, len(tokenizer)))

    def json_schema(self, schema: dict[str, Any] | str) -> "LlGuidanceGrammar":
        """JSON that a schema, or the text of one, allows."""
        text = schema if isinstance(schema, str) else json.dumps(schema)
        return self._make(text, lambda: LLMatcher.grammar_from_json_schema(text, defaults=ON_ONE_LINE))

    def regex(self, pattern: str) -> "LlGuidanceGrammar":
        """Text that a regular expression matches as a whole."""
        return self._make(pattern, lambda: LLMatcher.grammar_from_regex(pattern))

    def grammar(self, text: str) -> "LlGuidanceGrammar":
        """Text that a context-free grammar derives, in Lark's syntax or llama.cpp's GBNF."""
        return self._make(text, lambda: grammar_from("grammar", text))

    def lark(self, text: str) -> "LlGuidanceGrammar":
        """Text that a grammar in Lark's syntax derives, with llguidance's `%json` and names of special tokens."""
        return self._make(text, lambda: LLMatcher.grammar_from_lark(text))

    def choice(self, choices: Sequence[str]) -> "LlGuidanceGrammar":
        """One of these texts."""
        if not choices:
            raise UserError("there are 0 choices, so nothing could come; give 1 or more")
        text = "start: " + " | ".join(json.dumps(one) for one in choices)
        return self._make(text, lambda: LLMatcher.grammar_from_lark(text))

    def _make(self, text: str, translate: Callable[[], str]) -> "LlGuidanceGrammar":
        if len(text) > MOST_CHARACTERS:
            raise UserError(f"it has {len(text):,} characters, above the {MOST_CHARACTERS:,} allowed; shorten it")
        try:
            translated = translate()
        except Exception as error:  # its translators raise what they like, all of it about the text
            raise UserError(_first_line(str(error))) from error
        limits = LLParserLimits(verbose_errors=False)
        matcher = LLMatcher(self._tokenizer, translated, log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()  # the first is the slowest, and may show that there is nothing to say
        grammar = LlGuidanceGrammar(matcher, self._tokenizer, self.vocab_size)
        trial = grammar.matcher(prompt_length=0, stop_ids=[self._tokenizer.eos_token])
        trial.mask([], [])
        if trial.failure is not None:
            raise UserError(trial.failure)
        return grammar


class LlGuidanceGrammar:
    """A `Grammar`; see there."""

    def __init__(self, matcher: LLMatcher, tokenizer: LLTokenizer, vocab_size: int) -> None:
        self._matcher, self._tokenizer, self.vocab_size = matcher, tokenizer, vocab_size

    def matcher(self, *, prompt_length: int, stop_ids: Collection[int]) -> "LlGuidanceMatcher":
        """See `Grammar`."""
        known = [token for token in stop_ids if 0 <= token < self.vocab_size]  # others can never come
        return LlGuidanceMatcher(
            self._matcher.deep_copy(), self.vocab_size, self._tokenizer.eos_token, prompt_length, known
        )


class LlGuidanceMatcher:
    """A `GrammarMatcher`; see there. The matcher stands behind all tokens it was told of and some drafts, and can go
    back.

    It is never shown the end: whether the answer may end is asked of the matcher, which token ends it is the
    request's own affair.
    """

    def __init__(self, matcher: LLMatcher, vocab_size: int, end: int, prompt_length: int, stop_ids: list[int]) -> None:
        self.failure: str | None = None
        self._matcher, self._size, self._end, self._stop_ids = matcher, vocab_size, end, stop_ids
        self._known = prompt_length
        """Tokens that the matcher has taken for good, the prompt included."""
        self._ahead: list[int] = []
        """Drafts that it has taken behind them."""
        self._masks: dict[tuple[int, ...], Tensor | None] = {}
        """Behind drafts, since a token came last: drafting asks first, verification again."""

    def mask(self, tokens: Sequence[int], drafts: Sequence[int]) -> Tensor | None:
        """See `GrammarMatcher`."""
        if len(tokens) > self._known:
            self._go(tokens[self._known :])
            self._known, self._ahead, self._masks = len(tokens), [], {}
        path = tuple(drafts)
        if path not in self._masks:
            self._masks[path] = self._mask() if self._go(path) and self.failure is None else None
        return self._masks[path]

    def _go(self, path: Sequence[int]) -> bool:
        """Bring the matcher behind these tokens; as far as the grammar allows, if it does not allow all."""
        ahead, same = self._ahead, 0
        while same < min(len(ahead), len(path)) and ahead[same] == path[same]:
            same += 1
        if same < len(ahead) and not self._matcher.rollback(len(ahead) - same):
            self._fail()
        del ahead[same:]
        rest = list(path[same:])
        rest = rest[: rest.index(self._end)] if self._end in rest else rest
        if rest:
            ahead += rest[: self._matcher.try_consume_tokens(rest)]
        return len(ahead) == len(path)

    def _mask(self) -> Tensor | None:
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            self._fail()
            return None
        mask_V = torch.from_numpy(np.unpackbits(bits, count=self._size, bitorder="little")).bool()
        mask_V[self._end] = False
        if self._matcher.is_accepting():
            mask_V[self._stop_ids] = True
        if not mask_V.any():
            self._fail()
            return None
        return mask_V

    def _fail(self) -> None:
        reason = _first_line(self._matcher.get_error())
        self.failure = "no text satisfies it" if not reason or reason.startswith("NoExtension") else reason


def _first_line(words: str) -> str:
    """What is wrong, without the picture of where."""
    lines = [line.strip() for line in words.splitlines() if line.strip()]
    told = [line for line in lines if line.startswith("error:")] or lines[:1]
    return " ".join(told).removeprefix("error:").strip().rstrip(".")
