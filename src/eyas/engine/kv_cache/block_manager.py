"""Ownership of KV cache blocks, and the prefix cache.

A block has room for `block_size` tokens in the target's and in the drafter's cache. It is used (referenced by requests)
or free. A free block is blank or idle: an idle block still holds a cached prefix that a request may reuse, until the
least recently used are evicted.

A block is found by its whole content: its tokens, all tokens before them, and the next token, because the drafter's
last slot was computed from that. Blocks with equal content share one `_Prefix` object, which stands for all tokens up
to their end. So a lookup compares tokens block by block and never relies on hashes. The first block's predecessor is
the request's cache salt, so requests with different salts never share blocks.

Lookups need the target's entries only. The drafter's may be missing: `drafted` counts the blocks it has read, and the
rest is filled in later, for all requests that share the block.

Invariants: free + used == blocks; the target's entries of a cached block are never written again.
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
    """All tokens up to the end of a full block, and the next one. Lives as long as a block or a longer prefix."""

    before: "_Prefix | str | None"
    """The prefix up to the block's start; for a first block, the cache salt."""
    tokens: tuple[int, ...]
    successor: int
    block: int | None = None
    """The block that lookups return; others may hold equal content."""
    drafted: bool = False
    """Whether that block has the drafter's entries too."""


class BlockManager:
    """Allocates blocks with reference counts, and caches prefixes."""

    def __init__(self, blocks: int, block_size: int, *, prefix_cache: bool = True) -> None:
        if blocks < 1 or block_size < 1:
            raise UserError(f"{blocks} blocks of {block_size} tokens hold nothing; use 1 or more of each")
        self.blocks, self.block_size, self.prefix_cache = blocks, block_size, prefix_cache
        self.lookups = 0
        """Number of blocks looked up in the prefix cache."""
        self.hits = 0
        """Number of blocks found."""
        self._references = [0] * blocks
        self._blank = _Runs(blocks)
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._content: list[_Prefix | None] = [None] * blocks
        # Weak: a prefix without any block disappears from here by itself.
        self._prefixes: WeakValueDictionary[tuple[_Prefix | str | None, tuple[int, ...], int], _Prefix] = (
            WeakValueDictionary()
        )
        # Evicting a few blocks ahead yields runs of adjacent blocks instead of single ones from an old request's end.
        self._evicted_at_once = max(1, min(MOST_EVICTED_AT_ONCE, blocks // 16))

    @property
    def free(self) -> int:
        """Number of blocks that can be allocated, idle ones included."""
        return len(self._blank) + len(self._idle)

    @property
    def used(self) -> int:
        return self.blocks - self.free

    @property
    def cached(self) -> int:
        """Number of free blocks that still hold a cached prefix."""
        return len(self._idle)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def allocate(self, count: int, *, after: int | None = None, room: int = 0) -> list[int] | None:
        """Allocate `count` blocks with one reference each; None and no change if there are too few.

        Blocks are adjacent and ascending where possible, starting behind block `after`. `room` is how many blocks the
        owner may need in total, these included; that many are left free behind them if possible.
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
        """Drop one reference to each block. Of blocks that become idle, the last ones are evicted first."""
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
        """Find the longest cached prefix of `tokens` under this salt and take a reference to its blocks.

        At least one token is left to compute. None and no change if fewer than `total` blocks, these included, would be
        available to the caller.
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
        """Number of leading blocks that the drafter has read completely."""
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
        """Enter a full block in the prefix cache, behind block `after` (None: behind the salt), before `successor`.

        Of blocks with equal content the first is kept, unless only a later one has the drafter's entries. Registering
        a block again records that the drafter has read it.
        """
        if not self.prefix_cache:
            return
        assert self._references[block] > 0, f"block {block} is registered but free"
        assert len(tokens) == self.block_size, "only full blocks are registered"
        before = cache_salt if after is None else self._content[after]
        if before is None and after is not None:
            return  # the predecessor was forgotten, so lookups could not reach this block
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
        """Drop all cached prefixes, of used blocks too."""
        for block in range(self.blocks):
            prefix = self._content[block]
            if prefix is not None:
                prefix.block, prefix.drafted, self._content[block] = None, False, None
        while self._idle:
            self._clear(self._idle.popitem()[0])

    def forget_drafts(self) -> None:
        """Forget which blocks have drafter entries, because the drafter has changed."""
        for prefix in self._content:
            if prefix is not None:
                prefix.drafted = False

    def check(self, owners: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError unless the pool is consistent with itself and with the block lists of all owners."""
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
        prefix = self._content[block]
        if prefix is not None and prefix.block == block:
            prefix.block, prefix.drafted = None, False
        self._content[block] = None
        self._blank.add(block)


class _Runs:
    """Blank blocks as maximal runs of adjacent blocks."""

    def __init__(self, blocks: int) -> None:
        self._last: dict[int, int] = {}  # first block of a run: its last block
        self._first: dict[int, int] = {}  # last block of a run: its first block
        self._by_length: list[tuple[int, int]] = []  # (length, first block), sorted
        self._count = 0
        self._insert(0, blocks - 1)

    def __len__(self) -> int:
        return self._count

    def add(self, block: int) -> None:
        """Add a blank block and join it with its neighbours."""
        first, last = self._first.get(block - 1, block), self._last.get(block + 1, block)
        if first < block:
            self._remove(first)
        if block < last:
            self._remove(block + 1)
        self._insert(first, last)

    def take(self, count: int, *, after: int | None, room: int) -> list[int]:
        """Take blocks behind `after`, then from the longest runs."""
        taken: list[int] = []
        if after is not None and after + 1 in self._last:
            length = self._last[after + 1] - after
            taken += self._cut(after + 1, 0, min(count, length))
        while len(taken) < count:
            length, first = self._by_length[-1]
            wanted = min(length, count - len(taken))
            slack = length - max(wanted, room - len(taken))
            # If the room fits, stay away from the owner that grows towards this run; otherwise take the middle.
            taken += self._cut(first, slack if slack >= 0 else (length - wanted) // 2, wanted)
        return taken

    def check(self) -> set[int]:
        """Assert that the indexes agree; returns all blank blocks."""
        assert self._by_length == sorted((last - first + 1, first) for first, last in self._last.items())
        assert self._first == {last: first for first, last in self._last.items()}
        runs = sorted(self._last.items())
        assert all(last + 1 < first for (_, last), (first, _) in pairwise(runs)), f"runs touch: {runs}"
        blocks = {block for first, last in runs for block in range(first, last + 1)}
        assert len(blocks) == self._count
        return blocks

    def _cut(self, first: int, skipped: int, count: int) -> range:
        """Take `count` blocks out of the run that begins with `first`, behind the first `skipped` ones."""
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
