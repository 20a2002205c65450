"""Fitting conversations into sequences of a fixed length: cut at turns, then packed side by side.

Padding is wasted work, so several rows share a sequence, and nothing may be seen across the borders between them. A row
that is too long loses whole answers from its end, never half an answer: an answer cut in the middle would teach the
drafter that answers stop there.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from eyas.data.bad_records import BadRecords
from eyas.data.chat_encoder import Encoded
from eyas.data.conversations import Conversation
from eyas.errors import UserError

OPEN_PACKS = 64
"""More of them waste less padding and mix documents from further apart."""


class Encoder(Protocol):
    """Turns a conversation into rows of ids and masks."""

    def encode(self, conversation: Conversation) -> tuple[Encoded, ...]:
        """The rows of one conversation; none if nobody answers in it."""


@dataclass
class FitCounts:
    """What became of the conversations."""

    kept: int = 0
    cut: int = 0
    """Kept without some of their answers."""
    too_long: int = 0
    """Dropped: none of their answers fits."""
    unanswered: int = 0
    """Dropped: nothing to train on."""
    unwritten: int = 0
    """Answers, of whatever was kept, that are left out: the template does not write what they call."""
    augmented: Counter[str] = field(default_factory=Counter)
    """Kept in another rendering than the template's own, by what was done; see `augment`."""
    bad: BadRecords = field(default_factory=BadRecords)
    """Skipped: what cannot be read or encoded."""

    def as_json(self) -> dict[str, Any]:
        """For a run's record."""
        own = {name: getattr(self, name) for name in ("kept", "cut", "too_long", "unanswered", "unwritten")}
        return {**own, "augmented": dict(self.augmented), "bad": self.bad.as_json()}

    def __iadd__(self, other: "FitCounts") -> "FitCounts":
        self.kept += other.kept
        self.cut += other.cut
        self.too_long += other.too_long
        self.unanswered += other.unanswered
        self.unwritten += other.unwritten
        self.augmented += other.augmented
        self.bad += other.bad
        return self


def fit(
    conversations: Iterable[Conversation], encoder: Encoder, *, max_length: int, counts: FitCounts
) -> Iterator[tuple[Encoded, ...]]:
    """The rows of each conversation, shortened or dropped where they are beyond `max_length` tokens; counted."""
    for conversation in conversations:
        rows = [row for row in encoder.encode(conversation) if row.trainable]
        if not rows:
            counts.unanswered += 1
            continue
        fitting = tuple(short for row in rows if (short := row.shortened(max_length)) is not None)
        if not fitting:
            counts.too_long += 1
            continue
        counts.kept += 1
        counts.cut += sum(row.trainable for row in fitting) < sum(row.trainable for row in rows)
        yield fitting


def pack(sizes: Iterable[int], *, length: int) -> Iterator[tuple[int, ...]]:
    """Put each document where it leaves least room among the packs still open; deterministic, one pass.

    Documents are known by their place in `sizes`.
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
