"""Packs of a corpus lose nothing and cross no border; long conversations are cut at turns or dropped, and counted."""

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest

from each import each
from eyas.data.chat_encoder import Encoded
from eyas.errors import UserError
from eyas.train.corpus import corpus as corpus_module
from eyas.train.corpus.corpus import Corpus, concatenate, pack, pack_arrays, packs, split
from eyas.train.corpus.encoding import FitCounts, fit


def corpus_of(lengths: Iterable[int]) -> Corpus:
    """Documents of these lengths, whose tokens count up from 1 through all of them."""
    offsets = np.cumsum([0, *lengths])
    ids = np.arange(1, offsets[-1] + 1, dtype=np.int32)
    return Corpus(ids=ids, mask=ids % 2 == 0, offsets=offsets)


def random_corpus(documents: int, longest: int = 1000) -> Corpus:
    return corpus_of(np.random.default_rng(0).integers(2, longest, size=documents, endpoint=True).tolist())


def test_a_split_divides_the_documents() -> None:
    corpus = random_corpus(50)
    rest, held = split(corpus, 0.1, seed=3)
    assert (len(rest), len(held)) == (45, 5)
    assert np.array_equal(np.sort(np.concatenate([rest.ids, held.ids])), corpus.ids)
    again = split(corpus, 0.1, seed=3)[1]
    assert np.array_equal(again.ids, held.ids)
    assert not np.array_equal(split(corpus, 0.1, seed=4)[1].ids, held.ids)


def test_a_split_keeps_the_documents_of_a_conversation_together() -> None:
    corpus = replace(corpus_of([2] * 40), conversation=np.arange(40) // 4)
    rest, held = split(corpus, 0.3, seed=3)
    assert (rest.conversations, held.conversations, len(held)) == (7, 3, 12)
    assert rest.conversation is not None
    assert held.conversation is not None
    assert not set(rest.conversation.tolist()) & set(held.conversation.tolist())


def test_conversations_of_two_corpora_stay_apart() -> None:
    one, other = replace(corpus_of([2, 3, 4]), conversation=np.array([0, 0, 1])), corpus_of([5, 6])
    both = concatenate([one, other])
    assert both.conversation is not None
    assert both.conversation.tolist() == [0, 0, 1, 2, 3]
    assert both.conversations == 4


@each("share", [0.001, 0.999])
def test_both_sides_of_a_split_have_a_document(share: float) -> None:
    assert {len(side) for side in split(random_corpus(3), share, seed=0)} == {1, 2}


@each(("documents", "share"), [(1, 0.5), (10, 0.0), (10, 1.0), (10, -0.1)])
def test_a_split_that_cannot_be_made_is_refused(documents: int, share: float) -> None:
    with pytest.raises(UserError, match="held"):
        split(random_corpus(documents), share, seed=0)


@each("join_share", [0.0, 0.25, 1.0])
def test_packs_hold_every_document_exactly_once(join_share: float) -> None:
    corpus = random_corpus(400)
    made = packs(corpus, length=4096, seed=0, epoch=0, join_share=join_share, join_length=4096)
    members = sorted(index for pack in made for document in pack for index in document)
    assert members == list(range(400))
    assert all(sum(corpus.lengths[i] for document in pack for i in document) <= 4096 for pack in made)


def test_packs_follow_from_seed_and_epoch() -> None:
    corpus = random_corpus(100)

    def made(seed: int, epoch: int) -> list[corpus_module.Pack]:
        return packs(corpus, length=4096, seed=seed, epoch=epoch, join_share=0.2, join_length=3000)

    assert made(0, 1) == made(0, 1)
    assert made(0, 1) != made(0, 2)
    assert made(0, 1) != made(1, 1)


def test_packs_are_full() -> None:
    corpus = random_corpus(2000)
    assert corpus.tokens / (4096 * len(packs(corpus, length=4096, seed=0, epoch=0))) > 0.97


@each("share", [0.1, 0.25, 0.5])
def test_joined_documents_are_long_enough_and_make_up_their_share(share: float) -> None:
    corpus = random_corpus(2000)
    made = packs(corpus, length=8192, seed=0, epoch=0, join_share=share, join_length=8192)
    joined = [document for pack in made for document in pack if len(document) > 1]
    sizes = np.array([sum(corpus.lengths[i] for i in document) for document in joined])
    assert sizes.min() >= 2048
    assert sizes.max() <= 8192
    assert sizes.max() > 7500
    assert 4500 < sizes.mean() < 6000
    assert abs(sizes.sum() / corpus.tokens - share) < 0.01


@each(
    ("share", "length", "named"),
    [
        (1.5, 4096, "join_share"),
        (-0.1, 4096, "join_share"),
        (0.5, 100, "100"),
        (1, 9, "9"),
        (0.1, 8192, "8192 is not between 2048 and the pack's 4096"),
    ],
)
def test_joining_that_cannot_be_done_is_refused(share: float, length: int, named: str) -> None:
    with pytest.raises(UserError, match=named):
        packs(random_corpus(5), length=4096, seed=0, epoch=0, join_share=share, join_length=length)


def test_a_document_longer_than_joined_ones_may_be_stays_alone() -> None:
    corpus = corpus_of([3000] * 5 + [400] * 20)
    made = packs(corpus, length=4096, seed=0, epoch=0, join_share=1.0, join_length=2048)
    documents = [document for pack in made for document in pack]
    assert all(len(document) == 1 for document in documents if document[0] < 5)
    assert any(len(document) == 5 for document in documents)


def test_arrays_of_a_pack_restart_at_every_document_and_end_in_padding() -> None:
    corpus = corpus_of([3, 2, 4])
    made = pack_arrays(corpus, ((2,), (0, 1)), 11)
    assert made.ids.tolist() == [6, 7, 8, 9, 1, 2, 3, 4, 5, 0, 0]
    assert made.mask.tolist() == [i > 0 and i % 2 == 0 for i in made.ids.tolist()]
    assert made.position.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 4, 0, 1]
    assert made.starts.tolist() == [0, 4, 9, 11]
    assert (made.ids.dtype, made.mask.dtype, made.position.dtype) == (np.int64, np.bool_, np.int64)


def test_a_full_pack_has_no_padding_document_and_a_longer_one_is_refused() -> None:
    assert pack_arrays(corpus_of([3, 2]), ((0,), (1,)), 5).starts.tolist() == [0, 3, 5]
    with pytest.raises(UserError, match="5 tokens does not fit 4"):
        pack_arrays(corpus_of([3, 2]), ((0,), (1,)), 4)


def test_arrays_of_packs_hold_the_tokens_of_their_documents() -> None:
    corpus = random_corpus(60)
    for documents in packs(corpus, length=4096, seed=0, epoch=0, join_share=0.5, join_length=4096):
        made = pack_arrays(corpus, documents, 4096)
        members = [corpus.take([i]) for i in chain.from_iterable(documents)]
        used = sum(len(document.ids) for document in members)
        assert np.array_equal(made.ids[:used], np.concatenate([document.ids for document in members]))
        assert np.array_equal(made.mask[:used], np.concatenate([document.mask for document in members]))
        assert not made.ids[used:].any()
        assert not made.mask[used:].any()
        assert (made.starts[0], made.starts[-1]) == (0, 4096)
        assert np.array_equal(np.flatnonzero(made.position == 0), made.starts[:-1])


def row_of(*lengths: int) -> Encoded:
    """Row of user and assistant turns with these numbers of tokens."""
    mask = tuple(bool(turn % 2) for turn, length in enumerate(lengths) for _ in range(length))
    return Encoded(ids=tuple(range(len(mask))), mask=mask)


LONG = (3, 4, 2, 3, 9, 9)


@each(
    ("what", "rows", "max_length", "left", "counted"),
    [
        ("a row that fits is kept", [row_of(5, 5)], 10, [10], FitCounts(kept=1)),
        ("whole turns are cut from the end", [row_of(*LONG)], 12, [12], FitCounts(kept=1, cut=1)),
        ("never half a turn", [row_of(*LONG)], 11, [7], FitCounts(kept=1, cut=1)),
        ("a row whose first answer is too long", [row_of(3, 4, 1, 1)], 6, [], FitCounts(too_long=1)),
        ("a row without an answer", [row_of(3)], 6, [], FitCounts(unanswered=1)),
        ("each row by itself", [row_of(3, 4), row_of(9, 3), row_of(21, 9)], 12, [7, 12], FitCounts(kept=1, cut=1)),
    ],
)
def test_long_rows_are_cut_at_turns_or_dropped_and_counted(
    what: str, rows: list[Encoded], max_length: int, left: list[int], counted: FitCounts
) -> None:
    counts = FitCounts()
    assert [len(row.ids) for row in fit(rows, max_length=max_length, counts=counts)] == left, what
    assert counts == counted, what


def random_sizes(count: int, longest: int, seed: int = 0) -> list[int]:
    chance = random.Random(seed)
    return [chance.randint(1, longest) for _ in range(count)]


@each("open_packs", [1, 4, 64])
def test_every_document_is_in_exactly_one_pack_and_no_pack_is_too_full(
    open_packs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus_module, "OPEN_PACKS", open_packs)
    sizes = random_sizes(300, 50)
    packs = list(pack(sizes, length=64))
    assert sorted(document for p in packs for document in p) == list(range(300))
    assert all(0 < sum(sizes[document] for document in p) <= 64 for p in packs)


def test_a_document_goes_where_it_leaves_least_room() -> None:
    assert list(pack([6, 8, 2, 4, 1], length=10)) == [(0, 3), (1, 2), (4,)]


def test_more_open_packs_waste_less(monkeypatch: pytest.MonkeyPatch) -> None:
    def packed(open_packs: int) -> int:
        monkeypatch.setattr(corpus_module, "OPEN_PACKS", open_packs)
        return len(list(pack(sizes, length=64)))

    sizes = random_sizes(500, 20)
    few, many = (packed(n) for n in (1, 64))
    assert many < few
    assert sum(sizes) / (64 * many) > 0.95


def test_packing_is_deterministic() -> None:
    assert list(pack(random_sizes(50, 20), length=32)) == list(pack(random_sizes(50, 20), length=32))


def test_a_document_longer_than_the_pack_and_a_pack_too_short_are_refused() -> None:
    with pytest.raises(UserError, match="40 tokens does not fit a pack of 32"):
        list(pack([40], length=32))
    with pytest.raises(UserError, match="2 tokens"):
        list(pack([], length=2))


def test_counts_of_several_readers_add_up() -> None:
    counts = FitCounts(kept=1, cut=1, augmented=Counter(no_system=1))
    counts += FitCounts(kept=2, too_long=3, unanswered=4, augmented=Counter(no_system=1, no_bos=2))
    assert counts == FitCounts(kept=3, cut=1, too_long=3, unanswered=4, augmented=Counter(no_system=2, no_bos=2))
