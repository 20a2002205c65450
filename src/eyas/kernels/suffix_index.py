"""Finds in microseconds where the end of a text occurred before, and what followed.

The index is a ring of tokens, and for n-grams of 16, 8, 4 and 2 tokens hash chains of the places where each ended,
newest first. A query takes the longest n-gram that is found, follows its chain for at most 64 links, measures how much
more of the preceding text matches, and lets up to 16 occurrences vote on each following token; occurrences that were
outvoted stop voting. Adding a token takes about half a microsecond; long prompts are added in portions. Memory is fixed
when an index is made: 36 bytes for each token that it can hold.

    extend     adds tokens; the oldest fall out of the ring
    end_text   marks the end of a text, which no match crosses
    propose    returns a continuation, with the votes for each token

`suffix_index.c` is compiled at first use; without a compiler `suffix_index_plain.py` gives the same results. A suffix
tree or automaton was rejected, as tokens must leave the index as easily as they enter it, and its memory must be fixed.

Invariant: a proposal is a function of the tokens added so far, not of their portions.
"""

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from eyas.kernels.native import load_native
from eyas.kernels.suffix_index_plain import LEVELS, PlainSuffixIndex

SOURCE = Path(__file__).with_name("suffix_index.c")
MOST_POSITIONS = 2**31 - 2
"""The most tokens that an index takes before it starts over."""
FEWEST = 32
"""The capacity of the smallest index."""
PORTION, PLAIN_PORTION = 4096, 256
"""Tokens that take a few milliseconds, compiled or not."""
END_OF_TEXT = array("i", [-1])


class Continuation(NamedTuple):
    """What followed where the end of a text occurred before."""

    match: int
    """Tokens that the best occurrence has in common with the end of the text."""
    tokens: tuple[int, ...]
    votes: tuple[int, ...]
    """Occurrences that continued with each token, of `voters` that continued with all before it."""
    voters: tuple[int, ...]


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
        return int(self._index.length)

    def extend(self, tokens: "array[int]") -> None:
        self._extend(self._at, tokens.buffer_info()[0], len(tokens))

    def propose(
        self, context: "array[int]", ahead: int, since: int, most: int
    ) -> tuple[int, list[int], list[int], list[int]]:
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
    """The compiled code and its compiler, or None and the reason why there is none.

    Calls keep the interpreter's lock: with portions they are shorter than waiting for it would be.
    """
    loaded, why = load_native(SOURCE)
    library = None if loaded is None else ctypes.PyDLL(loaded._name, handle=loaded._handle)
    if library is not None:
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        library.suffix_extend.argtypes, library.suffix_extend.restype = [pointer, pointer, number], None
        library.suffix_propose.argtypes = [pointer, pointer, *[number] * 4, *[pointer] * 4]
        library.suffix_propose.restype = number
    return library, why


def new_index(capacity: int, longest: int) -> "NativeSuffixIndex | PlainSuffixIndex":
    """An index for `capacity` tokens, a power of two; matches are at most `longest` tokens."""
    library, _ = load_library()
    return PlainSuffixIndex(capacity, longest) if library is None else NativeSuffixIndex(library, capacity, longest)


@dataclass(frozen=True, kw_only=True)
class SuffixLimits:
    """Limits of an index."""

    longest_match: int = 64
    """Most tokens that are compared with an earlier occurrence."""

    def __post_init__(self) -> None:
        assert self.longest_match >= 2


class SuffixIndex:
    """The texts of one request, or of one caller."""

    def __init__(self, tokens: int, limits: SuffixLimits | None = None) -> None:
        """Create an index for at least this many tokens."""
        self._limits = limits or SuffixLimits()
        self.capacity = 1 << (max(tokens, FEWEST) - 1).bit_length()
        self._index = new_index(self.capacity, self._limits.longest_match)

    def __len__(self) -> int:
        """Tokens added so far, ends of texts included; the oldest may have been dropped."""
        return self._index.length

    @property
    def portion(self) -> int:
        """Most tokens to add at once while others wait."""
        return PORTION if isinstance(self._index, NativeSuffixIndex) else PLAIN_PORTION

    @property
    def bytes(self) -> int:
        """The most memory that it can take; untouched pages are not allocated yet."""
        return self.capacity * 4 * (1 + 2 * LEVELS)

    def extend(self, tokens: Sequence[int]) -> None:
        if len(self) + len(tokens) > MOST_POSITIONS:
            self._index = new_index(self.capacity, self._limits.longest_match)
        self._index.extend(array("i", tokens))

    def end_text(self) -> None:
        self._index.extend(END_OF_TEXT)

    def propose(self, context: Sequence[int], most: int, *, ahead: int = 0, since: int = 0) -> Continuation | None:
        """Up to `most` tokens after the context, from texts at position `since` or later; None if nothing matches.

        If the context is the end of the index's own text, that end is not a match for itself, and a loop continues as
        long as asked for. Its last `ahead` tokens are not in the index yet.
        """
        assert 0 <= ahead <= len(context)
        if most <= 0:
            return None
        context = context[-(self._limits.longest_match + ahead) :]
        match, tokens, votes, voters = self._index.propose(array("i", context), ahead, since, most)
        return Continuation(match, tuple(tokens), tuple(votes), tuple(voters)) if tokens else None
