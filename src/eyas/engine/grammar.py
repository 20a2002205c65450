"""Answers that keep to a grammar: which tokens may come next, as a function of the request's own tokens.

A `Grammar` never changes and may serve many requests; a `GrammarMatcher` is one request's way through it. What a walk
says depends on the tokens it is asked about and on nothing else, so drafts, their rejection, preemption and the company
of other requests cannot show: the token of a position is still a function of the target's distribution there, with what
the grammar forbids taken out (`runner/slot_sampling.py`).

Shapes: V target vocabulary.
"""

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # requests hold a grammar, and bookkeeping must not import torch
    from torch import Tensor


class GrammarMatcher(Protocol):
    """One request's way through its grammar."""

    @property
    def failure(self) -> str | None:
        """Why the grammar can be followed no further, if so. The request must end then."""
        ...

    def mask(self, tokens: Sequence[int], drafts: Sequence[int]) -> "Tensor | None":
        """Which tokens may follow [V], given all tokens of the request and drafts behind them.

        Where the grammar is satisfied, stop tokens are among them; where it is complete, they alone. None behind a
        stop token and behind what the grammar forbids: nobody gets there. Tokens may be added between two calls,
        never changed.
        """
        ...


class Grammar(Protocol):
    """What an answer may say."""

    @property
    def vocab_size(self) -> int:
        """Of the target whose tokens it speaks of."""
        ...

    def matcher(self, *, prompt_length: int, stop_ids: Collection[int]) -> GrammarMatcher:
        """A way through it for a request whose answer begins behind so many tokens and ends with one of these."""
        ...
