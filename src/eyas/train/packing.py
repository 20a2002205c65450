"""Fitting conversations into sequences of a fixed length: cut at turns, then packed side by side.

Padding is wasted work, so several conversations share a sequence; `document` says which is which, and nothing may be
seen across that border. A conversation that is too long loses whole turns from its end, never half an answer: an
answer cut in the middle would teach the drafter that answers stop there.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from eyas.errors import UserError
from eyas.train.conversations import Conversation
from eyas.train.data import ChatEncoder, Encoded


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


@dataclass(frozen=True, kw_only=True)
class Pack:
    """Conversations side by side, `length` tokens in all, the rest padding."""

    documents: tuple[Encoded, ...]
    length: int

    @property
    def used(self) -> int:
        """Tokens that are not padding."""
        return sum(len(document.ids) for document in self.documents)


def fit(
    conversations: Iterable[Conversation], encoder: ChatEncoder, *, max_length: int, counts: FitCounts
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
    """The conversation up to the answer before the last."""
    answers = [i for i, message in enumerate(conversation.messages) if message["role"] == "assistant"]
    end = answers[-2] + 1 if len(answers) > 1 else 0
    return replace(conversation, messages=conversation.messages[:end])


def pack(documents: Iterable[Encoded], *, length: int, open_packs: int = 64) -> Iterator[Pack]:
    """Put each document where it leaves least room among the packs still open; deterministic, one pass.

    More open packs waste less padding and mix documents from further apart.
    """
    if length < 3:
        raise UserError(f"a pack of {length} tokens holds nothing to predict; use 3 or more")
    waiting: list[list[Encoded]] = []
    room: list[int] = []
    for document in documents:
        size = len(document.ids)
        if size > length:
            raise UserError(f"a document of {size} tokens does not fit a pack of {length}; fit it first")
        fitting = [i for i in range(len(waiting)) if room[i] >= size]
        if fitting:
            best = min(fitting, key=lambda i: room[i])
        else:
            if len(waiting) == open_packs:
                fullest = min(range(len(waiting)), key=lambda i: room[i])
                yield Pack(documents=tuple(waiting.pop(fullest)), length=length)
                room.pop(fullest)
            waiting.append([])
            room.append(length)
            best = len(waiting) - 1
        waiting[best].append(document)
        room[best] -= size
    for rest in waiting:
        yield Pack(documents=tuple(rest), length=length)
