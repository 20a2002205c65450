"""Text is returned only when it can no longer change."""

import random
from collections.abc import Sequence

import pytest

from each import each
from eyas.engine.detokenizer import TextStream
from eyas.target.model import Target

WORDS = [b"Hello", b" world", b"\xe2\x82", b"\xac", b" STOP", b"ST", b"OP", b"\xf0\x9f", b"\xa6", b"\x85", b".", b"a"]


def decode(tokens: Sequence[int]) -> str:
    return b"".join(WORDS[token] for token in tokens).decode("utf-8", errors="replace")


def run(tokens: Sequence[int], stops: Sequence[str] = ()) -> tuple[list[str], TextStream]:
    stream = TextStream(decode, stops)
    pieces = []
    for token in tokens:
        pieces.append(stream.push(token))
        if stream.stopped:
            break
    return [*pieces, stream.finish()], stream


@each(
    ("tokens", "pieces"),
    [
        ([0, 1, 10], ["Hello", " world", ".", ""]),
        ([0, 2, 3, 7, 8, 9, 10], ["Hello", "", "€", "", "", "🦅", ".", ""]),  # unfinished characters are held back
        ([0, 2], ["Hello", "", ""]),  # an answer that ends within a character
    ],
)
def test_pieces_joined_are_the_whole_text(tokens: list[int], pieces: list[str]) -> None:
    assert run(tokens)[0] == pieces


def test_a_stop_string_is_not_shown_and_what_only_began_like_one_is() -> None:
    pieces, stream = run([0, 5, 6, 1], ["STOP"])
    assert "".join(pieces) == "Hello"
    assert stream.stopped
    pieces, stream = run([0, 5, 11, 5], ["STOP"])
    assert pieces == ["Hello", "", "STa", "", "ST"]
    assert not stream.stopped


@each("seed", range(50))
def test_pieces_equal_the_text_cut_at_the_earliest_stop_string(seed: int) -> None:
    source = random.Random(seed)
    tokens = [source.randrange(len(WORDS)) for _ in range(40)]
    stops = source.sample(["STOP", "world", "aa", ".S", "€", "OPa"], 2)
    pieces, stream = run(tokens, stops)
    text = "".join(pieces)
    whole = decode(tokens)
    if stream.stopped:
        assert text == whole[: min(at for stop in stops if (at := whole.find(stop)) >= 0)]
    else:
        assert text == whole.rstrip("\ufffd")


def test_the_fast_path_after_one_token_gives_the_same_text() -> None:
    chance, met = random.Random(3), 0

    class LongWay(TextStream):
        @property
        def _last(self) -> int | None:
            return None

        @_last.setter
        def _last(self, token: int | None) -> None:
            nonlocal met
            met += token is not None

    for _ in range(300):
        stops = chance.choice([(), ("STOP",), ("a.", "world")])
        short, long = TextStream(decode, stops), LongWay(decode, stops)
        for _ in range(chance.randrange(1, 30)):
            token = chance.randrange(len(WORDS))
            assert short.push(token) == long.push(token)
            assert short.stopped == long.stopped
            if short.stopped:
                break
        assert short.finish() == long.finish()
    assert met > 300, "the fast path is the usual one"


@pytest.mark.default
def test_short_sequences_are_decoded_like_all_others(default_target: Target) -> None:
    decode, chance = default_target.decoder(), random.Random(2)
    assert decode is not default_target.decode, "the fast path is used"
    for _ in range(2000):
        ids = tuple(chance.randrange(default_target.facts.vocab_size) for _ in range(chance.choice([1, 2, 5])))
        for skip in (True, False):
            assert decode(ids, skip) == default_target.decode(ids, skip)
