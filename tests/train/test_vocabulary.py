"""The draft vocabulary has the most frequent tokens and always the stop ids."""

from collections.abc import Sequence

import numpy as np
import pytest

from each import each
from eyas.errors import UserError
from eyas.train.corpus import vocabulary
from eyas.train.corpus.corpus import Corpus
from eyas.train.corpus.vocabulary import MAX_AUTO_SIZE, auto_size, choose_vocabulary


def corpus_of(ids: Sequence[int], mask: Sequence[int] | None = None) -> Corpus:
    return Corpus(
        ids=np.array(ids, dtype=np.int32),
        mask=np.array(mask if mask is not None else [1] * len(ids), dtype=np.bool_),
        offsets=np.array([0, len(ids)]),
    )


@each(
    ("what", "ids", "mask", "size", "always", "expected", "covered"),
    [
        ("the most frequent, ascending", [7, 7, 7, 3, 3, 9], None, 2, [], [3, 7], 5 / 6),
        ("only answers count", [1, 1, 1, 4], [0, 0, 0, 1], 1, [], [4], 1.0),
        ("equally frequent ones by id", [8, 6, 4, 2], None, 2, [], [2, 4], 1 / 2),
        ("stop ids are always included", [7, 7, 7, 3, 3], None, 2, [9], [7, 9], 3 / 5),
        ("unseen ones fill up from the lowest", [7, 7, 1], None, 5, [9], [0, 1, 2, 7, 9], 1.0),
        ("the whole vocabulary", [7, 1], None, None, [], list(range(10)), 1.0),
        ("the whole vocabulary by its size", [7, 1], None, 10, [], list(range(10)), 1.0),
    ],
)
def test_the_most_frequent_tokens_are_chosen(
    what: str,
    ids: list[int],
    mask: list[int] | None,
    size: int | None,
    always: list[int],
    expected: list[int],
    covered: float,
) -> None:
    chosen, coverage = choose_vocabulary(corpus_of(ids, mask), size, 10, always=always)
    assert chosen.tolist() == expected, what
    assert chosen.dtype == np.int64
    assert coverage == pytest.approx(covered), what


@each(("size", "named"), [(11, "11 .* 10"), (0, "0"), (1, "2 stop ids")])
def test_an_impossible_size_is_refused(size: int, named: str) -> None:
    with pytest.raises(UserError, match=named):
        choose_vocabulary(corpus_of([7, 1]), size, 10, always=[2, 3])


def test_tokens_of_another_vocabulary_and_a_corpus_without_answers_are_refused() -> None:
    with pytest.raises(UserError, match=r"token id 12 .* 9"):
        choose_vocabulary(corpus_of([12]), None, 10)
    with pytest.raises(UserError, match="no answers"):
        choose_vocabulary(corpus_of([1], [0]), 1, 10)


def zipf(types: int, tokens: int, seed: int = 0) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """Tokens with a Zipf distribution, like the words of a language."""
    share = 1 / np.arange(1, types + 1) ** 1.3
    return np.random.default_rng(seed).choice(types, tokens, p=share / share.sum())


@each("tokens", [20_000, 200_000])
def test_the_automatic_size_covers_new_text(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabulary, "AUTO_COVERAGE", 0.9)
    types = 60_000
    seen, new = zipf(types, tokens), zipf(types, 200_000, seed=1)
    counts = np.bincount(seen, minlength=types)
    size = auto_size(counts)
    chosen, _ = choose_vocabulary(corpus_of(seen.tolist()), size, types)
    covered = float(np.isin(new, chosen).mean())
    assert size % 256 == 0
    assert size < MAX_AUTO_SIZE
    assert 0.89 < covered < 0.93  # rounded up


def test_few_data_need_the_largest_vocabulary() -> None:
    assert auto_size(np.bincount(zipf(200_000, 500), minlength=200_000)) == MAX_AUTO_SIZE
    plain = np.zeros(200_000, dtype=np.int64)
    plain[1000:1300] = 100
    assert auto_size(plain) == 512
    assert auto_size(plain, stop_ids=300) == 768


def test_auto_keeps_small_vocabularies_whole() -> None:
    chosen, coverage = choose_vocabulary(corpus_of([7, 1]), "auto", MAX_AUTO_SIZE, always=[2])
    assert (len(chosen), coverage) == (MAX_AUTO_SIZE, 1.0)
    spoken = [*range(50_000, 50_100)] * 50
    chosen, coverage = choose_vocabulary(corpus_of(spoken), "auto", 100_000, always=[99_999])
    assert (len(chosen), coverage) == (256, 1.0)
    assert 99_999 in chosen
