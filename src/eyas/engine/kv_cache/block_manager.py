"""Who owns which block of the caches, and which blocks hold what a later request may want.

A block is room for `block_size` tokens in the target's cache and in the drafter's alike. It is used (someone refers to
it) or free, and a free block is blank or idle: an idle one still holds a prefix that a request may take up again, until
room is short and the least recently used go.

A block is found by its whole content: its tokens, all tokens before them, and the one token behind, because the
drafter's last slot was computed from that token. Equal contents have one `_Prefix` object between them, which stands
for everything before the next block; so a lookup compares real tokens, block by block, and never trusts a hash.
Before the first block stands the request's cache salt: requests with different salts never find each other's blocks.

A block is found by the target's part alone. The drafter's may be missing: `drafted` says how far it has read, and it is
filled in later, for all who share the block.

Invariants: free + used == blocks; the target's part of a block that can be found is never written again.
"""

from bisect import bisect_left, insort
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from weakref import WeakValueDictionary

from eyas.errors import UserError

MOST_EVICTED_AT_ONCE = 64


@dataclass(eq=False, slots=True, weakref_slot=True)
class _Prefix:
    """All tokens up to the end of a full block, and one more. Lives as long as a block or a longer prefix needs it."""

    before: "_Prefix | str | None"
    """Of a first block, the cache salt."""
    tokens: tuple[int, ...]
    successor: int
    block: int | None = None
    """Where it can be found; other blocks may hold the same."""
    drafted: bool = False
    """Whether the drafter's part of that block is filled too."""


class BlockManager:
    """Blocks by number, each with a count of those who refer to it."""

    def __init__(self, blocks: int, block_size: int, *, prefix_cache: bool = True) -> None:
        if blocks < 1 or block_size < 1:
            raise UserError(f"{blocks} blocks of {block_size} tokens hold nothing; use 1 or more of each")
        self.blocks, self.block_size, self.prefix_cache = blocks, block_size, prefix_cache
        self.lookups = 0
        """Blocks that requests asked the prefix cache for."""
        self.hits = 0
        """Blocks it had."""
        self._references = [0] * blocks
        self._blank = _Runs(blocks)
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._content: list[_Prefix | None] = [None] * blocks
        # The names of contents, not the contents: a prefix that no block holds any more is gone from here by itself.
        self._prefixes: WeakValueDictionary[tuple[_Prefix | str | None, tuple[int, ...], int], _Prefix] = (
            WeakValueDictionary()
        )
        # Evicting a few blocks ahead gives runs of neighbours instead of single blocks from the tail of an old request.
        self._evicted_at_once = max(1, min(MOST_EVICTED_AT_ONCE, blocks // 16))

    @property
    def free(self) -> int:
        """Blocks that can be allocated, idle ones included."""
        return len(self._blank) + len(self._idle)

    @property
    def used(self) -> int:
        """Blocks that someone refers to."""
        return self.blocks - self.free

    @property
    def cached(self) -> int:
        """Free blocks that can still be found by their content."""
        return len(self._idle)

    def blocks_for(self, tokens: int) -> int:
        """How many blocks hold so many tokens."""
        return -(-tokens // self.block_size)

    def allocate(self, count: int, *, after: int | None = None, room: int = 0) -> list[int] | None:
        """So many blocks with one reference each, or None and no change.

        Neighbours in ascending order where possible, from the one behind block `after` on. `room` says how many blocks
        the owner may come to want in all, these included: as much is left free behind them, if it can be.
        """
        if count > self.free:
            return None
        if count > len(self._blank):
            for _ in range(min(len(self._idle), max(count - len(self._blank), self._evicted_at_once))):
                self._clear(self._idle.popitem(last=False)[0])
        blocks = self._blank.take(count, after=after, room=room)
        for block in blocks:
            self._references[block] = 1
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Give up one reference to each. Of what becomes idle, the end of a request is evicted before its beginning."""
        for block in reversed(blocks):
            assert self._references[block] > 0, f"block {block} is released but free"
            self._references[block] -= 1
            if self._references[block] == 0:
                prefix = self._content[block]
                if prefix is not None and prefix.block == block:
                    self._idle[block] = None
                else:
                    self._clear(block)

    def match(self, tokens: Sequence[int], *, total: int = 0, cache_salt: str | None = None) -> list[int] | None:
        """The longest beginning of `tokens` cached under this salt, as blocks that the caller now refers to.

        Never all of the tokens, so that one is left to compute. None and no change, if the caller could not get `total`
        blocks together with these.
        """
        found: list[int] = []
        before: _Prefix | str | None = cache_salt
        if self.prefix_cache:
            for start in range(0, len(tokens) - self.block_size, self.block_size):
                end = start + self.block_size
                prefix = self._prefixes.get((before, tuple(tokens[start:end]), tokens[end]))
                if prefix is None or prefix.block is None:
                    break
                found.append(prefix.block)
                before = prefix
        idle = [block for block in found if self._references[block] == 0]
        if total - len(found) > self.free - len(idle):
            return None
        for block in idle:
            del self._idle[block]
        for block in found:
            self._references[block] += 1
        self.lookups += (len(tokens) - 1) // self.block_size
        self.hits += len(found)
        return found

    def drafted(self, blocks: Sequence[int]) -> int:
        """How many of a request's first blocks the drafter has read to their ends."""
        for count, block in enumerate(blocks):
            prefix = self._content[block]
            if prefix is None or prefix.block != block or not prefix.drafted:
                return count
        return len(blocks)

    def register(
        self,
        block: int,
        *,
        after: int | None,
        tokens: Sequence[int],
        successor: int,
        drafted: bool,
        cache_salt: str | None = None,
    ) -> None:
        """Let a full block be found: its content follows that of block `after` and comes before token `successor`.

        A first block follows the cache salt; those behind it inherit it.

        Of blocks with equal content the first is found, unless a later one has the drafter's part and the first does
        not. Registering again tells that the drafter has read the block.
        """
        if not self.prefix_cache:
            return
        assert self._references[block] > 0, f"block {block} is registered but free"
        assert len(tokens) == self.block_size, "only full blocks are registered"
        before = cache_salt if after is None else self._content[after]
        if before is None and after is not None:
            return  # what came before was forgotten, so nobody could get here
        key = (before, tuple(tokens), successor)
        prefix = self._prefixes.get(key)
        if prefix is None:
            prefix = self._prefixes[key] = _Prefix(*key)
        assert self._content[block] in (None, prefix), f"block {block} was registered with other content"
        self._content[block] = prefix
        better = drafted and not prefix.drafted
        if prefix.block is None or better:
            worse, prefix.block, prefix.drafted = prefix.block, block, drafted
            if worse is not None and self._references[worse] == 0:
                del self._idle[worse]
                self._clear(worse)

    def forget(self) -> None:
        """Let nothing be found again, not even what is used now."""
        for block in range(self.blocks):
            prefix = self._content[block]
            if prefix is not None:
                prefix.block, prefix.drafted, self._content[block] = None, False, None
        while self._idle:
            self._clear(self._idle.popitem()[0])

    def forget_drafts(self) -> None:
        """Let no drafter's part be found again: another drafter could not read it."""
        for prefix in self._content:
            if prefix is not None:
                prefix.drafted = False

    def check(self, owners: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError unless the pool agrees with itself and with the block lists of all owners."""
        counted: Counter[int] = Counter()
        for owner in owners:
            assert len(set(owner)) == len(owner), f"an owner has a block twice: {list(owner)}"
            counted.update(owner)
        for block, references in enumerate(self._references):
            assert references == counted[block], (
                f"block {block} has {counted[block]} owners and {references} references"
            )
        assert set(counted) <= set(range(self.blocks)), "an owner has a block that does not exist"
        blank = self._blank.check()
        assert blank.isdisjoint(self._idle), "a block is blank and idle"
        unused = {block for block, references in enumerate(self._references) if references == 0}
        assert blank | set(self._idle) == unused, "free blocks are not those without references"
        assert self.free + self.used == self.blocks
        for block, prefix in enumerate(self._content):
            if prefix is None:
                assert block not in self._idle, f"block {block} is idle without content"
                continue
            assert block not in blank, f"block {block} is blank but has content"
            assert block not in self._idle or prefix.block == block, f"block {block} is idle but cannot be found"
            assert prefix.block is None or self._content[prefix.block] is prefix, f"block {prefix.block} holds another"
            assert self._prefixes.get((prefix.before, prefix.tokens, prefix.successor)) is prefix, "content named twice"
        for prefix in self._prefixes.values():
            assert prefix.block is not None or not prefix.drafted, "content is drafted in no block"
            assert prefix.block is None or self._content[prefix.block] is prefix, f"block {prefix.block} holds another"

    def _clear(self, block: int) -> None:
        """Make a block blank that nobody refers to."""
        prefix = self._content[block]
        if prefix is not None and prefix.block == block:
            prefix.block, prefix.drafted = None, False
        self._content[block] = None
        self._blank.add(block)


class _Runs:
    """Blank blocks as runs of neighbours, each as long as can be."""

    def __init__(self, blocks: int) -> None:
        self._last: dict[int, int] = {}  # of the run that begins with a block
        self._first: dict[int, int] = {}  # of the run that ends with a block
        self._by_length: list[tuple[int, int]] = []  # length and first block, shortest first
        self._count = 0
        self._insert(0, blocks - 1)

    def __len__(self) -> int:
        return self._count

    def add(self, block: int) -> None:
        """A block became blank: join it with its neighbours."""
        first, last = self._first.get(block - 1, block), self._last.get(block + 1, block)
        if first < block:
            self._remove(first)
        if block < last:
            self._remove(block + 1)
        self._insert(first, last)

    def take(self, count: int, *, after: int | None, room: int) -> list[int]:
        """So many blocks: behind `after`, then from the longest runs."""
        taken: list[int] = []
        if after is not None and after + 1 in self._last:
            length = self._last[after + 1] - after
            taken += self._cut(after + 1, 0, min(count, length))
        while len(taken) < count:
            length, first = self._by_length[-1]
            wanted = min(length, count - len(taken))
            slack = length - max(wanted, room - len(taken))
            # With room for all that may follow, stay clear of what grows towards the run; otherwise share it evenly.
            taken += self._cut(first, slack if slack >= 0 else (length - wanted) // 2, wanted)
        return taken

    def check(self) -> set[int]:
        """All blank blocks, once the indexes were found to agree."""
        assert self._by_length == sorted((last - first + 1, first) for first, last in self._last.items())
        assert self._first == {last: first for first, last in self._last.items()}
        runs = sorted(self._last.items())
        assert all(last + 1 < first for (_, last), (first, _) in pairwise(runs)), f"runs touch: {runs}"
        blocks = {block for first, last in runs for block in range(first, last + 1)}
        assert len(blocks) == self._count
        return blocks

    def _cut(self, first: int, skipped: int, count: int) -> range:
        """Take `count` blocks out of the run that begins with `first`, leaving so many before them."""
        last = self._remove(first)
        start, end = first + skipped, first + skipped + count
        if first < start:
            self._insert(first, start - 1)
        if end <= last:
            self._insert(end, last)
        return range(start, end)

    def _insert(self, first: int, last: int) -> None:
        self._last[first], self._first[last] = last, first
        insort(self._by_length, (last - first + 1, first))
        self._count += last - first + 1

    def _remove(self, first: int) -> int:
        last = self._last.pop(first)
        del self._first[last]
        del self._by_length[bisect_left(self._by_length, (last - first + 1, first))]
        self._count -= last - first + 1
        return last
