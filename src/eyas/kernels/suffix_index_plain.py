"""`suffix_index.c` in Python, for machines without a C compiler: same results, about a hundred times slower."""

from array import array
from collections.abc import Sequence

SIZES = (16, 8, 4, 2)
LEVELS = len(SIZES)
MOST_LOOKS = 64
"""The most links of a chain to follow."""
MOST_MATCHES = 16
"""The most occurrences that vote."""
_WORD = 2**64 - 1


class PlainSuffixIndex:
    """Hash chains over the n-grams of a ring of tokens."""

    def __init__(self, capacity: int, longest: int) -> None:
        self.length = 0
        self._capacity, self._mask, self._longest = capacity, capacity - 1, longest
        self._tokens = array("i", bytes(4 * capacity))
        self._links, self._heads = ([array("i", bytes(4 * capacity)) for _ in SIZES] for _ in range(2))

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._tokens[self.length & self._mask] = token
            self.length += 1
            place = self.length & self._mask
            for size, links, heads in zip(SIZES, self._links, self._heads, strict=True):
                links[place] = 0
                if self.length < size or size > self._capacity:
                    continue
                key = _hash(self._tokens, self.length - 1, self._mask, size)
                if key >= 0:
                    links[place] = heads[key & self._mask]
                    heads[key & self._mask] = self.length

    def propose(
        self, context: Sequence[int], ahead: int, since: int, most: int
    ) -> tuple[int, list[int], list[int], list[int]]:
        first = max(self.length - self._capacity, since, 0)
        matches = self._matches(context, ahead, first)
        tokens, votes, voters = list[int](), list[int](), list[int]()
        ends = [end for _, end in matches]
        while matches and len(tokens) < most:
            said = []
            for end in ends:
                position = end + len(tokens)
                behind = position - self.length
                if behind < 0:
                    said.append(self._tokens[position & self._mask])
                else:
                    said.append(context[len(context) - ahead + behind] if behind < ahead else tokens[behind - ahead])
            living = [token for token in said if token >= 0]
            if not living:
                break
            best = max(living, key=living.count)  # of equals the first
            tokens.append(best)
            votes.append(living.count(best))
            voters.append(len(living))
            ends = [end for end, token in zip(ends, said, strict=True) if token == best]
        return matches[0][0] if matches else 0, tokens, votes, voters

    def _matches(self, context: Sequence[int], ahead: int, first: int) -> list[tuple[int, int]]:
        """Lengths and ends of matches of one level: longest first, of equals newest first."""
        for size, links, heads in zip(SIZES, self._links, self._heads, strict=True):
            if len(context) < size or size > self._capacity:
                continue
            key = _hash(context, len(context) - 1, _WORD, size)
            if key < 0:
                continue
            found: list[tuple[int, int]] = []
            end, before = heads[key & self._mask], self.length + 1
            for _ in range(MOST_LOOKS):
                if end <= first or end >= before or len(found) == MOST_MATCHES:
                    break
                before = end
                # The end of a text does not match itself, unless something is known to follow it.
                if self._tokens[end & self._mask] >= 0 if end < self.length else ahead > 0:
                    length = self._match_length(end, first, context)
                    if length >= size:
                        found.append((length, end))
                end = links[end & self._mask]
            if found:
                return sorted(found, key=lambda match: -match[0])
        return []

    def _match_length(self, end: int, first: int, context: Sequence[int]) -> int:
        most, same = min(end - first, len(context), self._longest), 0
        while same < most and self._tokens[(end - 1 - same) & self._mask] == context[-1 - same]:
            same += 1
        return same


def _hash(tokens: Sequence[int], last: int, mask: int, size: int) -> int:
    mixed = 0
    for back in range(size):
        token = tokens[(last - back) & mask]
        if token < 0:
            return -1
        mixed = (mixed + token + 1) * 0x9E3779B97F4A7C15 & _WORD
        mixed ^= mixed >> 29
    return mixed >> 1
