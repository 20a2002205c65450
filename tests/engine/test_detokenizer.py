"""Text leaves the stream only when it cannot change any more."""

import random
from collections.abc import Sequence

from each import each
from eyas.engine.detokenizer import TextStream

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


def test_pieces_joined_are_the_whole_text() -> None:
    assert run([0, 1, 10])[0] == ["Hello", " world", ".", ""]


def test_an_unfinished_character_is_held_back() -> None:
    assert run([0, 2, 3, 7, 8, 9, 10])[0] == ["Hello", "", "€", "", "", "🦅", ".", ""]


def test_an_answer_may_end_in_the_middle_of_a_character() -> None:
    assert run([0, 2])[0] == ["Hello", "", ""]


def test_a_stop_string_is_never_shown_even_across_tokens() -> None:
    pieces, stream = run([0, 5, 6, 1], ["STOP"])
    assert "".join(pieces) == "Hello"
    assert stream.stopped


def test_a_beginning_of_a_stop_string_that_is_none_is_shown_after_all() -> None:
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


def test_the_short_way_behind_one_token_says_what_the_long_one_says() -> None:
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
    assert met > 300, "the short way is the usual one"
