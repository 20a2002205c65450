"""All documents in memory, and the order in which training meets them.

Five bytes a token: a hundred million tokens take half a gigabyte, so they stay in memory. `encoding.py` makes a corpus
from files. Padding is wasted work, so several documents share a pack, and attention does not cross their borders.
Invariant: the packs of an epoch follow from the corpus, the seed and the epoch alone, so that a resumed run sees what
an uninterrupted one would have seen.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import ArrayLike, NDArray

from eyas.errors import UserError
from eyas.train.recipe import MIN_JOIN_LENGTH

Pack = tuple[tuple[int, ...], ...]
"""Documents of a pack, each a run of corpus documents: one, or several that are joined and see each other."""
OPEN_PACKS = 64
"""Packs filled at the same time. More waste less padding and mix documents from further apart."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Corpus:
    """Documents end to end."""

    ids: NDArray[np.int32]
    mask: NDArray[np.bool_]
    offsets: NDArray[np.int64]
    """First token of each document, and the end of the last one."""
    conversation: NDArray[np.int64] | None = None
    """Conversation of each document, since a template that rewrites turns makes several documents of one conversation.
    None: each document is a conversation of its own."""

    def __post_init__(self) -> None:
        assert self.ids.shape == self.mask.shape == (self.offsets[-1],)
        assert self.conversation is None or self.conversation.shape == (len(self),)
        assert self.offsets[0] == 0
        assert (np.diff(self.offsets) > 0).all()

    @classmethod
    def build(
        cls, ids: ArrayLike, mask: ArrayLike, lengths: ArrayLike, conversation: ArrayLike | None = None
    ) -> "Corpus":
        """Corpus of documents end to end, with these numbers of tokens."""
        return cls(
            ids=np.asarray(ids, dtype=np.int32),
            mask=np.asarray(mask, dtype=np.bool_),
            offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            conversation=None if conversation is None else np.asarray(conversation, dtype=np.int64),
        )

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.offsets)

    @property
    def positions(self) -> NDArray[np.int64]:
        return np.arange(self.tokens) - np.repeat(self.offsets[:-1], self.lengths)

    @property
    def tokens(self) -> int:
        return len(self.ids)

    @property
    def owners(self) -> NDArray[np.int64]:
        return np.arange(len(self)) if self.conversation is None else self.conversation

    @property
    def conversations(self) -> int:
        return len(np.unique(self.owners))

    @property
    def trainable(self) -> int:
        """Number of tokens that are trained on."""
        return int(self.mask.sum())

    @property
    def longest(self) -> int:
        return int(self.lengths.max(initial=0))

    def take(self, indices: Sequence[int] | NDArray[np.int64]) -> "Corpus":
        """Corpus of these documents, in this order."""
        chosen = np.asarray(indices, dtype=np.int64)
        lengths = self.lengths[chosen]
        places = _runs(self.offsets[chosen], lengths)
        conversation = None if self.conversation is None else self.conversation[chosen]
        return Corpus.build(self.ids[places], self.mask[places], lengths, conversation)


def concatenate(corpora: Sequence[Corpus]) -> Corpus:
    """Concatenate corpora; conversations of different corpora stay different."""
    first, conversations = 0, []
    for corpus in corpora:
        own = corpus.owners
        conversations.append(first + own)
        first += int(own.max(initial=-1)) + 1
    return Corpus.build(
        np.concatenate([corpus.ids for corpus in corpora]),
        np.concatenate([corpus.mask for corpus in corpora]),
        np.concatenate([corpus.lengths for corpus in corpora]),
        np.concatenate(conversations),
    )


def split(corpus: Corpus, share: float, seed: int, *, newest: bool = False, least: int = 0) -> tuple[Corpus, Corpus]:
    """Split off a share of the conversations, random ones or the newest: returns training and held-out corpus.

    At least `least` are held out, or half of all if there are too few. All documents of a conversation stay on one
    side, since they repeat each other's text.
    """
    if not 0 < share < 1:
        raise UserError(f"the held-out share {share} is not between 0 and 1; set data.held_out_share to 0.01, say")
    own = corpus.owners
    conversations, place = np.unique(own, return_inverse=True)
    count = len(conversations)
    if count < 2:
        raise UserError(
            f"{count} conversation cannot be split into training and held-out ones; "
            "give more conversations or a separate file as data.held_out"
        )
    aside = min(max(1, round(share * count), min(least, count // 2)), count - 1)
    held = np.zeros(count, dtype=np.bool_)
    held[np.arange(count - aside, count) if newest else np.random.default_rng(seed).permutation(count)[:aside]] = True
    return corpus.take(np.flatnonzero(~held[place])), corpus.take(np.flatnonzero(held[place]))


@dataclass(frozen=True, kw_only=True)
class Replay:
    """Documents of a corpus that are only mixed in: those from `first` on, as `share` of an epoch's tokens."""

    first: int
    share: float

    def documents(self, corpus: Corpus, chance: np.random.Generator) -> NDArray[np.int64]:
        """All documents before `first`, and drawn ones after it that make up the share, repeated if there are few."""
        tokens = self.share / (1 - self.share) * int(corpus.offsets[self.first])
        lengths, drawn, used = corpus.lengths, list[int](), 0
        while used < tokens:
            for index in (self.first + chance.permutation(len(corpus) - self.first)).tolist():
                if used >= tokens:
                    break
                drawn.append(index)
                used += int(lengths[index])
        return np.concatenate([np.arange(self.first), np.array(drawn, dtype=np.int64)])


def packs(
    corpus: Corpus,
    *,
    length: int,
    seed: int,
    epoch: int,
    join_share: float = 0.0,
    join_length: int = 0,
    replay: Replay | None = None,
) -> list[Pack]:
    """Packs of an epoch, of at most `length` tokens, in an order of its own: every document once, and some of `replay`.

    Documents that make up `join_share` of the tokens are joined into long ones, up to `join_length` tokens, because a
    drafter that never saw long contexts drafts badly in them. Lengths are drawn uniformly from `MIN_JOIN_LENGTH` up.
    """
    chance = np.random.default_rng([seed, epoch])
    order = chance.permutation(len(corpus) if replay is None else replay.documents(corpus, chance)).tolist()
    sizes = corpus.lengths.tolist()
    documents: list[tuple[int, ...]] = []
    if join_share:
        if not 0 < join_share <= 1:
            raise UserError(f"data.join_share is {join_share}; it must be a share from 0 to 1")
        if not MIN_JOIN_LENGTH <= join_length <= length:
            raise UserError(
                f"data.join_length {join_length} is not between {MIN_JOIN_LENGTH} and the pack's {length} tokens; "
                "change it or data.pack_length"
            )
        tokens = sum(sizes[index] for index in order)
        documents, order = _joined(order, sizes, join_share * tokens, join_length, chance)
    documents += [(index,) for index in order]
    documents = [documents[place] for place in chance.permutation(len(documents)).tolist()]
    packed = list(pack((sum(sizes[index] for index in document) for document in documents), length=length))
    return [tuple(documents[place] for place in packed[number]) for number in chance.permutation(len(packed)).tolist()]


def pack(sizes: Iterable[int], *, length: int) -> Iterator[tuple[int, ...]]:
    """Put each document into the open pack where it leaves least room; deterministic, one pass.

    Yields packs of indices into `sizes`.
    """
    if length < 3:
        raise UserError(f"a pack of {length} tokens holds nothing to predict; use 3 or more")
    rooms: list[tuple[int, int]] = []  # room left and number of the pack, tightest first
    waiting: dict[int, list[int]] = {}
    started = 0
    for document, size in enumerate(sizes):
        if size > length:
            raise UserError(f"a document of {size} tokens does not fit a pack of {length}; fit it first")
        place = bisect_left(rooms, (size, 0))
        if place < len(rooms):
            room, number = rooms.pop(place)
        else:
            if len(rooms) == OPEN_PACKS:
                yield tuple(waiting.pop(rooms.pop(0)[1]))
            room, number = length, started
            started += 1
            waiting[number] = []
        waiting[number].append(document)
        insort(rooms, (room - size, number))
    for rest in waiting.values():
        yield tuple(rest)


@dataclass(frozen=True, kw_only=True, eq=False)
class PackArrays:
    """Pack as arrays of one length; padding after the documents counts as a document of its own."""

    ids: NDArray[np.int64]
    mask: NDArray[np.bool_]
    position: NDArray[np.int64]
    """Position of a token within its document."""
    starts: NDArray[np.int64]
    """First token of each document, padding included, and the length."""


def pack_arrays(corpus: Corpus, pack: Pack, length: int | None = None) -> PackArrays:
    """Lay out a pack, padded to `length`; None: not padded."""
    members = np.fromiter(chain.from_iterable(pack), dtype=np.int64)
    lengths = corpus.offsets[members + 1] - corpus.offsets[members]
    used = int(lengths.sum())
    length = used if length is None else length
    if used > length:
        raise UserError(f"a pack of {used} tokens does not fit {length}; make packs of that length")
    places = _runs(corpus.offsets[members], lengths)
    ids, mask = np.zeros(length, dtype=np.int64), np.zeros(length, dtype=np.bool_)
    ids[:used], mask[:used] = corpus.ids[places], corpus.mask[places]
    ends = lengths.cumsum()[np.cumsum([len(document) for document in pack]) - 1]
    tail = [length] if used < length else []
    starts = np.concatenate([[0], ends, tail]).astype(np.int64)
    position = np.arange(length) - np.repeat(starts[:-1], np.diff(starts))
    return PackArrays(ids=ids, mask=mask, position=position, starts=starts)


def _joined(
    order: list[int], sizes: list[int], tokens: float, longest: int, chance: np.random.Generator
) -> tuple[list[tuple[int, ...]], list[int]]:
    """Join documents from the front of `order` until they have `tokens`; return them and the rest of the order."""
    documents, used, place = [], 0, 0
    while used < tokens and place < len(order):
        goal = int(chance.integers(MIN_JOIN_LENGTH, longest, endpoint=True))
        first, size = place, 0
        while place < len(order) and size < goal and (place == first or size + sizes[order[place]] <= longest):
            size += sizes[order[place]]
            place += 1
        documents.append(tuple(order[first:place]))
        used += size
    return documents, order[place:]


def _runs(starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Indices start, start + 1, ... of every run, one run after the other."""
    before = lengths.cumsum() - lengths
    places: NDArray[np.int64] = np.arange(int(lengths.sum())) + np.repeat(starts - before, lengths)
    return places
