"""Grammars by llguidance: JSON schemas, regular expressions, Lark and GBNF grammars, choices.

The library parses the text of tokens, so it must know the target's tokenizer; reading that takes about a second and is
done once. Its matcher can be copied and rolled back, which is all that a `GrammarMatcher` needs. Work on one grammar is
bounded by the library's own fuel (`compile.PARSER_LIMITS`).

Copies of a matcher share one lexer, whose states stay, so requests that have nothing to do with each other bring it to
its limit together. A request that meets the limit goes on with a fresh lexer, and ends only if that does not hold it
either; the grammar is `exhausted` then.

Shapes: V target vocabulary.
"""

import json
import threading
import time
from collections.abc import Callable, Collection, Sequence
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from eyas.errors import UserError
from eyas.grammar.compile import GrammarKind, TokenizerData, compile_matcher, why_stopped

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

RENEW_SECONDS = 0.05
"""Of processor time: a grammar that compiles within may be compiled again while a batch waits."""
LEXER_ERROR = "lexer error"


def tokenizer_data(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> TokenizerData:
    """What llguidance must know of a target's tokenizer."""
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise UserError(
            f"grammars need a tokenizer of the tokenizers library, not a {type(tokenizer).__name__}; "
            "leave structured output out or convert the tokenizer"
        )
    backend = copy(tokenizer.backend_tokenizer)
    backend.no_padding()
    backend.no_truncation()
    n_vocab = max(vocab_size, len(tokenizer))
    return TokenizerData(text=backend.to_str(), n_vocab=n_vocab, eos_token=tokenizer.eos_token_id)


class LlGuidance:
    """Makes grammars for one target. Threads may share it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._tokenizer = tokenizer_data(tokenizer, vocab_size).read()

    def json_schema(self, schema: dict[str, Any] | str) -> "LlGuidanceGrammar":
        """JSON that a schema, or the text of one, allows."""
        return self.compile("json", schema if isinstance(schema, str) else json.dumps(schema))

    def regex(self, pattern: str) -> "LlGuidanceGrammar":
        """Text that a regular expression matches as a whole."""
        return self.compile("regex", pattern)

    def grammar(self, text: str) -> "LlGuidanceGrammar":
        """Text that a context-free grammar derives, in Lark's syntax or llama.cpp's GBNF."""
        return self.compile("grammar", text)

    def lark(self, text: str) -> "LlGuidanceGrammar":
        """Text that a grammar in Lark's syntax derives, with llguidance's `%json` and names of special tokens."""
        return self.compile("lark", text)

    def choice(self, choices: Sequence[str]) -> "LlGuidanceGrammar":
        """One of these texts."""
        return self.compile("choice", json.dumps(list(choices)))

    def compile(self, kind: GrammarKind, text: str) -> "LlGuidanceGrammar":
        """The grammar of a text."""
        compile_ = partial(compile_matcher, self._tokenizer, kind, text)
        grammar = LlGuidanceGrammar(compile_, self._tokenizer, self.vocab_size, kind, text)
        trial = grammar.matcher(prompt_length=0, stop_ids=[self._tokenizer.eos_token])
        trial.mask([], [])
        if trial.failure is not None:
            raise UserError(trial.failure)
        return grammar


class LlGuidanceGrammar:
    """A `Grammar`; see there."""

    def __init__(
        self,
        compile_: Callable[[], "LLMatcher"],
        tokenizer: "LLTokenizer",
        vocab_size: int,
        kind: GrammarKind,
        text: str,
    ) -> None:
        self.kind, self.text = kind, text
        """What it was compiled from, for an engine that compiles it again."""
        self.exhausted = False
        """Whether the lexer has come to a limit: whoever keeps this grammar should compile it anew."""
        self.vocab_size = vocab_size
        self._tokenizer, self._compile = tokenizer, compile_
        self._lock = threading.Lock()
        self._renewals = 0
        started = time.thread_time()
        self._matcher = compile_()
        self._quick = time.thread_time() - started <= RENEW_SECONDS

    def matcher(self, *, prompt_length: int, stop_ids: Collection[int]) -> "LlGuidanceMatcher":
        """See `Grammar`."""
        known = [token for token in stop_ids if 0 <= token < self.vocab_size]  # others can never come
        return LlGuidanceMatcher(self, self._tokenizer.eos_token, prompt_length, known)

    def copy(self) -> "tuple[LLMatcher, int]":
        """A matcher at the beginning, and how often the lexer was renewed before."""
        with self._lock:
            return self._matcher.deep_copy(), self._renewals

    def renew(self, renewals: int) -> bool:
        """Put a fresh lexer in the place of the one after so many renewals, unless somebody has or it takes long."""
        with self._lock:
            if self._renewals == renewals:
                if not self._quick:
                    return False
                self._matcher, self._renewals = self._compile(), renewals + 1
            return True


class LlGuidanceMatcher:
    """A `GrammarMatcher`; see there. The matcher stands behind all tokens it was told of and some drafts, and can go
    back.

    It is never shown the end: whether the answer may end is asked of the matcher, which token ends it is the
    request's own affair.
    """

    def __init__(self, grammar: LlGuidanceGrammar, end: int, prompt_length: int, stop_ids: list[int]) -> None:
        self._grammar, self._end, self._stop_ids = grammar, end, stop_ids
        self._prompt_length = prompt_length
        self._renewed = False
        self._begin()

    def _begin(self) -> None:
        self.failure: str | None = None
        self._matcher, self._renewals = self._grammar.copy()
        self._known = self._prompt_length
        """Tokens that the matcher has taken for good, the prompt included."""
        self._ahead: list[int] = []
        """Drafts that it has taken behind them."""
        self._masks: dict[tuple[int, ...], Tensor | None] = {}
        """Behind drafts, since a token came last: drafting asks first, verification again."""

    def mask(self, tokens: Sequence[int], drafts: Sequence[int]) -> Tensor | None:
        """See `GrammarMatcher`."""
        mask_V = self._mask_behind(tokens, drafts)
        if self.failure is None or not self.failure.startswith(LEXER_ERROR):
            return mask_V
        # Other requests may have filled the lexer: a fresh one tells, once.
        if not self._renewed and self._grammar.renew(self._renewals):
            self._renewed = True
            self._begin()
            mask_V = self._mask_behind(tokens, drafts)
        self._grammar.exhausted = self._grammar.exhausted or self.failure is not None
        return mask_V

    def _mask_behind(self, tokens: Sequence[int], drafts: Sequence[int]) -> Tensor | None:
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
            self.failure = why_stopped(self._matcher)
        del ahead[same:]
        rest = list(path[same:])
        rest = rest[: rest.index(self._end)] if self._end in rest else rest
        if rest:
            ahead += rest[: self._matcher.try_consume_tokens(rest)]
        return len(ahead) == len(path)

    def _mask(self) -> Tensor | None:
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            self.failure = why_stopped(self._matcher)
            return None
        mask_V = torch.from_numpy(np.unpackbits(bits, count=self._grammar.vocab_size, bitorder="little")).bool()
        mask_V[self._end] = False
        if self._matcher.is_accepting():
            mask_V[self._stop_ids] = True
        if not mask_V.any():
            self.failure = why_stopped(self._matcher)
            return None
        return mask_V
