"""Where the end of a text occurred before, and what came next: found in microseconds, however long the text is.

Taking tokens in takes about half a microsecond each; a long prompt is taken in portions.

A ring of tokens, and for n-grams of 16, 8, 4 and 2 tokens chains of the places where each ended, by hash, newest first.
A question takes the longest n-gram that is found, follows its chain for at most 64 links, measures how much more of the
text before matches, and lets up to 16 occurrences vote on each token that follows; those that were outvoted vote no
more. Memory is fixed when an index is made: 36 bytes for each token that it can hold.

    extend     takes tokens; the oldest fall out of the ring
    end_text   nothing matches or goes on across the end of a text
    propose    a continuation, with the votes for each token

`suffix_index.c` is compiled at first use; where that cannot be, `suffix_index_plain.py` gives the same answers. It was
preferred to a suffix tree or automaton because tokens leave it as easily as they come, and its memory has one size.

Invariant: what is proposed is a function of the tokens taken so far, not of how they came in portions.
"""

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from eyas.kernels.native import load_native
from eyas.kernels.suffix_index_plain import LEVELS, PlainSuffixIndex

SOURCE = Path(__file__).with_name("suffix_index.c")
MOST_POSITIONS = 2**31 - 2
"""Tokens that an index takes in its life; then it begins anew."""
FEWEST = 32
"""Tokens that the smallest index holds."""
PORTION, PLAIN_PORTION = 4096, 256
"""Tokens that a few milliseconds are enough for, compiled or not."""
END_OF_TEXT = array("i", [-1])


class Continuation(NamedTuple):
    """What came next where the end of a text occurred before."""

    match: int
    """Tokens before it that the likest occurrence has in common with the text."""
    tokens: tuple[int, ...]
    votes: tuple[int, ...]
    """Occurrences that went on with each token, of `voters` that had gone on with all before it."""
    voters: tuple[int, ...]


class HoldsText(Protocol):
    """What finds the end of a text."""

    @property
    def length(self) -> int:
        """Tokens taken so far, ends of texts included."""

    def extend(self, tokens: "array[int]") -> None:
        """Take tokens of 32 bits."""

    def propose(
        self, context: "array[int]", ahead: int, since: int, most: int
    ) -> tuple[int, list[int], list[int], list[int]]:
        """The longest match, and up to so many tokens with their votes and voters."""


class _Index(ctypes.Structure):
    """`struct index`."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("capacity", "length", "longest")),
        *((name, ctypes.c_void_p) for name in ("tokens", "links", "heads")),
    )


class NativeSuffixIndex:
    """The compiled index."""

    def __init__(self, library: ctypes.PyDLL, capacity: int, longest: int) -> None:
        self._extend, self._propose = library.suffix_extend, library.suffix_propose
        self._tokens = np.zeros(capacity, dtype=np.int32)
        self._links, self._heads = (np.zeros((LEVELS, capacity), dtype=np.int32) for _ in range(2))
        arrays = (self._tokens, self._links, self._heads)
        self._index = _Index(capacity, 0, longest, *(numbers.ctypes.data for numbers in arrays))
        self._at = ctypes.addressof(self._index)
        self._match = ctypes.c_int64()
        self._match_at = ctypes.addressof(self._match)
        self._made = array("i")

    @property
    def length(self) -> int:
        """Tokens taken so far."""
        return int(self._index.length)

    def extend(self, tokens: "array[int]") -> None:
        """Take tokens."""
        self._extend(self._at, tokens.buffer_info()[0], len(tokens))

    def propose(
        self, context: "array[int]", ahead: int, since: int, most: int
    ) -> tuple[int, list[int], list[int], list[int]]:
        """The longest match, and up to so many tokens with their votes and voters."""
        if len(self._made) < 3 * most:
            self._made = array("i", bytes(4 * 3 * most))
        out, (at, _), (source, count) = self._made, self._made.buffer_info(), context.buffer_info()
        votes, voters = at + 4 * most, at + 8 * most
        made = self._propose(self._at, source, count, ahead, since, most, at, votes, voters, self._match_at)
        return (
            self._match.value,
            out[:made].tolist(),
            out[most : most + made].tolist(),
            out[2 * most : 2 * most + made].tolist(),
        )


@cache
def load_library() -> tuple[ctypes.PyDLL | None, str]:
    """The compiled code and who compiled it, or None and the reason why there is none.

    Its calls keep the interpreter's lock: where tokens come in portions they are shorter than the wait for it would be.
    """
    loaded, why = load_native(SOURCE)
    library = None if loaded is None else ctypes.PyDLL(loaded._name, handle=loaded._handle)
    if library is not None:
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        library.suffix_extend.argtypes, library.suffix_extend.restype = [pointer, pointer, number], None
        library.suffix_propose.argtypes = [pointer, pointer, *[number] * 4, *[pointer] * 4]
        library.suffix_propose.restype = number
    return library, why


def new_index(capacity: int, longest: int) -> HoldsText:
    """Room for so many tokens, a power of two; matches count up to `longest`."""
    library, _ = load_library()
    return PlainSuffixIndex(capacity, longest) if library is None else NativeSuffixIndex(library, capacity, longest)


@dataclass(frozen=True, kw_only=True)
class SuffixLimits:
    """How far an index looks."""

    longest_match: int = 64
    """Tokens of a text that are compared with an earlier occurrence; more are not told apart."""

    def __post_init__(self) -> None:
        assert self.longest_match >= 2


class SuffixIndex:
    """The texts of one request, or of one caller."""

    def __init__(self, tokens: int, limits: SuffixLimits | None = None) -> None:
        """Room for so many tokens, or a few more."""
        self._limits = limits or SuffixLimits()
        self.capacity = 1 << (max(tokens, FEWEST) - 1).bit_length()
        self._index = new_index(self.capacity, self._limits.longest_match)

    def __len__(self) -> int:
        """Tokens taken so far, ends of texts included; the oldest may have fallen out since."""
        return self._index.length

    @property
    def portion(self) -> int:
        """Tokens to take at once at most, where others wait meanwhile."""
        return PORTION if isinstance(self._index, NativeSuffixIndex) else PLAIN_PORTION

    @property
    def bytes(self) -> int:
        """Memory that it can take; what no token has reached is not taken by the system yet."""
        return self.capacity * 4 * (1 + 2 * LEVELS)

    def extend(self, tokens: Sequence[int]) -> None:
        """Take tokens that follow what is there."""
        if len(self) + len(tokens) > MOST_POSITIONS:
            self._index = new_index(self.capacity, self._limits.longest_match)
        self._index.extend(array("i", tokens))

    def end_text(self) -> None:
        """What comes next is another text."""
        self._index.extend(END_OF_TEXT)

    def propose(self, context: Sequence[int], most: int, *, ahead: int = 0, since: int = 0) -> Continuation | None:
        """Up to so many tokens behind the context, by how texts from position `since` on went on; None: no match.

        Where the context ends with the text of the index itself, its end is not its own match, and a loop goes on as
        long as is asked for. Its last `ahead` tokens then are not in the index yet.
        """
        assert 0 <= ahead <= len(context)
        if most <= 0:
            return None
        context = context[-(self._limits.longest_match + ahead) :]
        match, tokens, votes, voters = self._index.propose(array("i", context), ahead, since, most)
        return Continuation(match, tuple(tokens), tuple(votes), tuple(voters)) if tokens else None
