"""Packing loses nothing and crosses no border; what does not fit is cut at turns or dropped, and counted."""

import random
from collections import Counter

import pytest

from each import each
from eyas.data.chat_encoder import Encoded
from eyas.data.conversations import Conversation
from eyas.errors import UserError
from eyas.train.corpus import packing
from eyas.train.corpus.packing import FitCounts, fit, pack


class OneTokenPerWord:
    """Stands in for the encoder: a word is a token, an assistant's words are trained on."""

    def encode(self, conversation: Conversation) -> tuple[Encoded, ...]:
        words = [
            (hash(word) % 1000, message["role"] == "assistant")
            for message in conversation.messages
            for word in message["content"].split()
        ]
        return (Encoded(ids=tuple(i for i, _ in words), mask=tuple(on for _, on in words)),)


class OneRowPerAnswer:
    """Stands in for a template that rewrites earlier turns."""

    def encode(self, conversation: Conversation) -> tuple[Encoded, ...]:
        sizes = [len(message["content"].split()) for message in conversation.messages]
        return tuple(
            Encoded(ids=(1,) * sum(sizes[: i + 1]), mask=(False,) * sum(sizes[:i]) + (True,) * sizes[i])
            for i in range(1, len(sizes), 2)
        )


def conversation(*lengths: int) -> Conversation:
    """User and assistant in turn, with so many words each."""
    messages = [
        {"role": "user" if i % 2 == 0 else "assistant", "content": " ".join(["w"] * n)} for i, n in enumerate(lengths)
    ]
    return Conversation(messages=tuple(messages), where="f:1")


def fitted(max_length: int, *conversations: Conversation) -> tuple[list[int], FitCounts]:
    counts = FitCounts()
    fitting = fit(conversations, OneTokenPerWord(), max_length=max_length, counts=counts)
    return [len(row.ids) for rows in fitting for row in rows], counts


def test_what_fits_is_kept_whole() -> None:
    assert fitted(10, conversation(3, 4), conversation(5, 5)) == ([7, 10], FitCounts(kept=2))


def test_a_long_conversation_loses_whole_turns_from_its_end() -> None:
    assert fitted(12, conversation(3, 4, 2, 3, 9, 9)) == ([12], FitCounts(kept=1, cut=1))
    assert fitted(11, conversation(3, 4, 2, 3, 9, 9)) == ([7], FitCounts(kept=1, cut=1))


def test_rows_of_a_conversation_are_kept_or_dropped_each() -> None:
    counts = FitCounts()
    (rows,) = fit([conversation(3, 4, 2, 3, 9, 9)], OneRowPerAnswer(), max_length=12, counts=counts)
    assert [len(row.ids) for row in rows] == [7, 12]
    assert counts == FitCounts(kept=1, cut=1)


def test_a_conversation_whose_first_answer_does_not_fit_is_dropped() -> None:
    assert fitted(6, conversation(3, 4, 1, 1)) == ([], FitCounts(too_long=1))


def test_a_conversation_without_an_answer_is_dropped() -> None:
    assert fitted(6, conversation(3)) == ([], FitCounts(unanswered=1))


def random_sizes(count: int, longest: int, seed: int = 0) -> list[int]:
    chance = random.Random(seed)
    return [chance.randint(1, longest) for _ in range(count)]


@each("open_packs", [1, 4, 64])
def test_every_document_is_in_exactly_one_pack_and_no_pack_is_too_full(
    open_packs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "OPEN_PACKS", open_packs)
    sizes = random_sizes(300, 50)
    packs = list(pack(sizes, length=64))
    assert sorted(document for p in packs for document in p) == list(range(300))
    assert all(0 < sum(sizes[document] for document in p) <= 64 for p in packs)


def test_a_document_goes_where_it_leaves_least_room() -> None:
    assert list(pack([6, 8, 2, 4, 1], length=10)) == [(0, 3), (1, 2), (4,)]


def test_more_open_packs_waste_less(monkeypatch: pytest.MonkeyPatch) -> None:
    def packed(open_packs: int) -> int:
        monkeypatch.setattr(packing, "OPEN_PACKS", open_packs)
        return len(list(pack(sizes, length=64)))

    sizes = random_sizes(500, 20)
    few, many = (packed(n) for n in (1, 64))
    assert many < few
    assert sum(sizes) / (64 * many) > 0.95


def test_packing_is_deterministic() -> None:
    assert list(pack(random_sizes(50, 20), length=32)) == list(pack(random_sizes(50, 20), length=32))


def test_a_document_beyond_the_pack_is_refused() -> None:
    with pytest.raises(UserError, match="40 tokens does not fit a pack of 32"):
        list(pack([40], length=32))


def test_a_pack_of_nothing_is_refused() -> None:
    with pytest.raises(UserError, match="2 tokens"):
        list(pack([], length=2))


def test_counts_of_several_readers_add_up() -> None:
    counts = FitCounts(kept=1, cut=1, augmented=Counter(no_system=1))
    counts += FitCounts(kept=2, too_long=3, unanswered=4, augmented=Counter(no_system=1, no_bos=2))
    assert counts == FitCounts(kept=3, cut=1, too_long=3, unanswered=4, augmented=Counter(no_system=2, no_bos=2))
