"""A grammar that applies behind the reasoning of an answer, as in vLLM: reasoning is free, the rest is constrained.

Like in any `Grammar`, the mask is a function of the request's own tokens, so drafts cannot change the answer.

Shapes: V target vocabulary.
"""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from eyas.engine.grammar import Grammar, GrammarMatcher


class AfterReasoningGrammar:
    """A `Grammar`."""

    def __init__(self, grammar: Grammar, *, ends: Sequence[Sequence[int]], start: int | None = None) -> None:
        self._grammar = grammar
        self._ends = tuple(tuple(end) for end in ends)
        """Token sequences, each of which ends the reasoning."""
        self._start = start
        """The token that begins reasoning; None if the prompt has begun it. An answer may begin with another token."""

    @property
    def vocab_size(self) -> int:
        return self._grammar.vocab_size

    def matcher(self, *, prompt_length: int, stop_ids: Collection[int]) -> "AfterReasoningMatcher":
        return AfterReasoningMatcher(
            self._grammar, ends=self._ends, start=self._start, prompt_length=prompt_length, stop_ids=stop_ids
        )


class AfterReasoningMatcher:
    """A `GrammarMatcher`."""

    def __init__(
        self,
        grammar: Grammar,
        *,
        ends: tuple[tuple[int, ...], ...],
        start: int | None,
        prompt_length: int,
        stop_ids: Collection[int],
    ) -> None:
        self._grammar, self._ends, self._start, self._stop_ids = grammar, ends, start, stop_ids
        self._prompt_length = self._scanned = prompt_length
        """The tokens that were searched for the end of reasoning."""
        self._ahead = grammar.matcher(prompt_length=0, stop_ids=stop_ids)
        """The matcher for drafts that end the reasoning or come without any."""
        self._matcher: GrammarMatcher | None = None
        """The matcher once the reasoning has ended."""
        self._anything_V: Tensor | None = None

    @property
    def failure(self) -> str | None:
        return self._ahead.failure or (self._matcher.failure if self._matcher is not None else None)

    def mask(self, tokens: Sequence[int], drafts: Sequence[int]) -> Tensor | None:
        self._look_for_end(tokens)
        if self._matcher is not None:
            return self._matcher.mask(tokens, drafts)
        if self._start is not None and len(tokens) == self._prompt_length:
            if not drafts:
                return self._first_mask()
            if drafts[0] != self._start:
                return self._ahead.mask([], drafts)
        longest = max(map(len, self._ends))
        path = [*tokens[max(self._prompt_length, len(tokens) - longest) :], *drafts]
        known = len(path) - len(drafts)
        for at in range(known + 1, len(path) + 1):
            if self._is_end(path[:at]):
                return self._ahead.mask([], path[at:])
        if any(draft in self._stop_ids for draft in drafts):
            return None
        if self._anything_V is None:
            self._anything_V = torch.ones(self._grammar.vocab_size, dtype=torch.bool)
        return self._anything_V

    def _look_for_end(self, tokens: Sequence[int]) -> None:
        if self._matcher is not None:
            return
        if self._start is not None and len(tokens) > self._prompt_length and tokens[self._prompt_length] != self._start:
            self._matcher = self._grammar.matcher(prompt_length=self._prompt_length, stop_ids=self._stop_ids)
            return
        longest = max(map(len, self._ends))
        while self._scanned < len(tokens):
            self._scanned += 1
            if self._is_end(tokens[max(self._prompt_length, self._scanned - longest) : self._scanned]):
                self._matcher = self._grammar.matcher(prompt_length=self._scanned, stop_ids=self._stop_ids)
                return

    def _is_end(self, path: Sequence[int]) -> bool:
        return any(tuple(path[-len(end) :]) == end for end in self._ends)

    def _first_mask(self) -> Tensor | None:
        """The mask of the first token: the grammar's, or the start of reasoning."""
        mask_V = self._ahead.mask([], [])
        if mask_V is None or self._start is None:
            return mask_V
        mask_V = mask_V.clone()
        mask_V[self._start] = True
        return mask_V
