"""Grammars by llguidance: JSON schemas, regular expressions, Lark and GBNF grammars, choices.

The library parses the text of tokens, so it must know the target's tokenizer; reading that takes about a second and is
done once. Its matcher can be copied and rolled back, which is all that a `GrammarMatcher` needs. Work on one grammar is
bounded by the library's own limits (`compile.PARSER_LIMITS`).

Copies of a matcher share one lexer, whose states are never freed, so unrelated requests fill it together. A request
that meets the limit continues with a fresh lexer, and fails only if that one is too small as well; then the grammar is
`exhausted`.

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
"""Processor time of compiling within which a grammar may be compiled again while a batch waits."""
LEXER_ERROR = "lexer error"


def tokenizer_data(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> TokenizerData:
    """A target's tokenizer for llguidance."""
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
        """JSON by a schema, or by the text of one."""
        return self.compile("json", schema if isinstance(schema, str) else json.dumps(schema))

    def regex(self, pattern: str) -> "LlGuidanceGrammar":
        return self.compile("regex", pattern)

    def grammar(self, text: str) -> "LlGuidanceGrammar":
        """A context-free grammar in Lark's syntax or llama.cpp's GBNF."""
        return self.compile("grammar", text)

    def lark(self, text: str) -> "LlGuidanceGrammar":
        """A grammar in Lark's syntax, with llguidance's `%json` and names of special tokens."""
        return self.compile("lark", text)

    def choice(self, choices: Sequence[str]) -> "LlGuidanceGrammar":
        return self.compile("choice", json.dumps(list(choices)))

    def compile(self, kind: GrammarKind, text: str) -> "LlGuidanceGrammar":
        compile_ = partial(compile_matcher, self._tokenizer, kind, text)
        grammar = LlGuidanceGrammar(compile_, self._tokenizer, self.vocab_size, kind, text)
        trial = grammar.matcher(prompt_length=0, stop_ids=[self._tokenizer.eos_token])
        trial.mask([], [])
        if trial.failure is not None:
            raise UserError(trial.failure)
        return grammar


class LlGuidanceGrammar:
    """A `Grammar`."""

    def __init__(
        self,
        compile_: Callable[[], "LLMatcher"],
        tokenizer: "LLTokenizer",
        vocab_size: int,
        kind: GrammarKind,
        text: str,
    ) -> None:
        self.kind, self.text = kind, text
        """The source, for an engine that compiles it again."""
        self.exhausted = False
        """Whether the lexer has reached a limit: a cache should compile this grammar anew."""
        self.vocab_size = vocab_size
        self._tokenizer, self._compile = tokenizer, compile_
        self._lock = threading.Lock()
        self._renewals = 0
        started = time.thread_time()
        self._matcher = compile_()
        self._quick = time.thread_time() - started <= RENEW_SECONDS

    def matcher(self, *, prompt_length: int, stop_ids: Collection[int]) -> "LlGuidanceMatcher":
        known = [token for token in stop_ids if 0 <= token < self.vocab_size]  # others can never come
        return LlGuidanceMatcher(self, self._tokenizer.eos_token, prompt_length, known)

    def copy(self) -> "tuple[LLMatcher, int]":
        """A matcher at the beginning, and how often the lexer was renewed before."""
        with self._lock:
            return self._matcher.deep_copy(), self._renewals

    def renew(self, renewals: int) -> bool:
        """Replace the lexer that came with this many renewals, unless that was done. False if compiling takes long."""
        with self._lock:
            if self._renewals == renewals:
                if not self._quick:
                    return False
                self._matcher, self._renewals = self._compile(), renewals + 1
            return True


class LlGuidanceMatcher:
    """A `GrammarMatcher`: it has consumed all known tokens and some drafts, and can roll back.

    It never consumes a stop token: it says whether the answer may end here, and the request has its own stop tokens.
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
        """Tokens that the matcher has consumed for good, the prompt included."""
        self._ahead: list[int] = []
        """Drafts that it has consumed behind them."""
        self._masks: dict[tuple[int, ...], Tensor | None] = {}
        """Masks by drafts, since the newest token: drafting asks first, verification again."""

    def mask(self, tokens: Sequence[int], drafts: Sequence[int]) -> Tensor | None:
        mask_V = self._mask_behind(tokens, drafts)
        if self.failure is None or not self.failure.startswith(LEXER_ERROR):
            return mask_V
        # Other requests may have filled the lexer: try a fresh one, once.
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
        """Move the matcher behind these drafts, as far as the grammar allows. Whether it allows all."""
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
