"""Fitting conversations into sequences of a fixed length: cut at turns, then packed side by side.

Padding is wasted work, so several conversations share a sequence, and nothing may be seen across the borders between
them. A conversation that is too long loses whole turns from its end, never half an answer: an answer cut in the middle
would teach the drafter that answers stop there.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Protocol

from eyas.data.chat_encoder import Encoded
from eyas.data.conversations import Conversation
from eyas.errors import UserError

OPEN_PACKS = 64
"""More of them waste less padding and mix documents from further apart."""


class Encoder(Protocol):
    """Turns a conversation into ids and a mask."""

    def encode(self, conversation: Conversation) -> Encoded:
        """Ids and mask of one conversation."""


@dataclass
class FitCounts:
    """What became of the conversations."""

    kept: int = 0
    cut: int = 0
    """Kept without some of their last turns."""
    too_long: int = 0
    """Dropped: not even the first answer fits."""
    unanswered: int = 0
    """Dropped: nothing to train on."""
    augmented: Counter[str] = field(default_factory=Counter)
    """Kept in another rendering than the template's own, by what was done; see `augment`."""

    def __iadd__(self, other: "FitCounts") -> "FitCounts":
        self.kept += other.kept
        self.cut += other.cut
        self.too_long += other.too_long
        self.unanswered += other.unanswered
        self.augmented += other.augmented
        return self


def fit(
    conversations: Iterable[Conversation], encoder: Encoder, *, max_length: int, counts: FitCounts
) -> Iterator[Encoded]:
    """Encode conversations, shortening or dropping those beyond `max_length` tokens, and count what was done."""
    for conversation in conversations:
        encoded = encoder.encode(conversation)
        if not encoded.trainable:
            counts.unanswered += 1
            continue
        shortened = False
        while encoded.trainable and len(encoded.ids) > max_length:
            shortened = True
            conversation = _without_last_answer(conversation)
            if not conversation.answered:
                break
            encoded = encoder.encode(conversation)
        if len(encoded.ids) > max_length or not encoded.trainable:
            counts.too_long += 1
            continue
        counts.kept += 1
        counts.cut += shortened
        yield encoded


def _without_last_answer(conversation: Conversation) -> Conversation:
    """The conversation up to the answer before the last, which was finished, or nothing would have followed."""
    answers = [i for i, message in enumerate(conversation.messages) if message["role"] == "assistant"]
    end = answers[-2] + 1 if len(answers) > 1 else 0
    return replace(conversation, messages=conversation.messages[:end], finished=True)


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
