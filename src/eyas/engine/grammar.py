"""Grammar-constrained answers: masks of tokens that may come next.

A `Grammar` is immutable and may serve many requests; a `GrammarMatcher` follows one request through it. Its masks
depend only on the tokens passed in. So drafts, rejections, preemption and batching do not change the result: each token
is drawn from the target's distribution with forbidden tokens removed (`runner/slot_sampling.py`).

Shapes: V target vocabulary.
"""

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # requests refer to grammars, and request.py must not import torch
    from torch import Tensor


class GrammarMatcher(Protocol):
    """Follows one request through its grammar."""

    @property
    def failure(self) -> str | None:
        """Why the grammar can no longer be followed, if so. The request must end then."""
        ...

    def mask(self, tokens: Sequence[int], drafts: Sequence[int]) -> "Tensor | None":
        """Mask [V] of tokens that may follow all tokens of the request and the drafts behind them.

        Includes stop tokens where the grammar may end, and only those where it must end. None behind a stop token or a
        forbidden one, which are never reached. Between calls tokens may be appended, never changed.
        """
        ...


class Grammar(Protocol):
    """A constraint on answers."""

    @property
    def vocab_size(self) -> int:
        """Vocabulary size of the target that it was compiled for."""
        ...

    def matcher(self, *, prompt_length: int, stop_ids: Collection[int]) -> GrammarMatcher:
        """Make a matcher for a request with this prompt length and these stop tokens."""
        ...
