"""Conversations are encoded once per input."""

from pathlib import Path

import numpy as np
import pytest

from eyas.errors import UserError
from eyas.train.corpus.corpus import Corpus
from eyas.train.corpus.encoding import FitCounts
from eyas.train.run_data import load_or_encode


class Encoder:
    """Counts its calls."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self) -> tuple[Corpus, FitCounts]:
        self.asked += 1
        corpus = Corpus(
            ids=np.arange(5, dtype=np.int32),
            mask=np.array([0, 1, 1, 0, 1], dtype=bool),
            offsets=np.array([0, 3, 5]),
            conversation=np.array([7, 7]),
        )
        return corpus, FitCounts(kept=2, cut=1)


def test_an_encoded_corpus_is_read_back_unchanged(tmp_path: Path) -> None:
    file, place, encode = tmp_path / "a.jsonl", tmp_path / "out" / "train.safetensors", Encoder()
    file.write_text("one")
    first, counts = load_or_encode(place, [file], {"seed": 0}, encode)
    again, counted = load_or_encode(place, [file], {"seed": 0}, encode)
    assert encode.asked == 1
    assert counts == counted == FitCounts(kept=2, cut=1).as_json()
    for name in ("ids", "mask", "offsets", "conversation"):
        assert np.array_equal(getattr(first, name), getattr(again, name))
        assert getattr(first, name).dtype == getattr(again, name).dtype


def test_other_contents_other_settings_or_a_damaged_file_are_encoded_again(tmp_path: Path) -> None:
    file, place, encode = tmp_path / "a.jsonl", tmp_path / "train.safetensors", Encoder()
    file.write_text("one")
    load_or_encode(place, [file], {"seed": 0}, encode)
    load_or_encode(place, [file], {"seed": 1}, encode)
    file.write_text("two")
    load_or_encode(place, [file], {"seed": 1}, encode)
    place.write_bytes(place.read_bytes()[:40])
    load_or_encode(place, [file], {"seed": 1}, encode)
    assert encode.asked == 4


def test_a_missing_file_of_conversations_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read .*none\.jsonl"):
        load_or_encode(tmp_path / "x.safetensors", [tmp_path / "none.jsonl"], {}, Encoder())


def test_counts_are_read_back_unchanged(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("one")
    corpus, counts = Encoder()()
    counts.augmented["no_bos"] = 3
    counts.bad.add(UserError("a.jsonl:1: oh"), "odd")
    for _ in range(2):
        _, counted = load_or_encode(tmp_path / "x.safetensors", [tmp_path / "a.jsonl"], {}, lambda: (corpus, counts))
        assert counted["augmented"] == {"no_bos": 3}
        assert counted["bad"]["by_reason"] == {"odd": 1}
        assert counted["bad"]["examples"] == {"odd": ["a.jsonl:1: oh"]}
