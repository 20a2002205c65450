"""A continuation is what followed an earlier occurrence of the text's end, and nothing else."""

import random
from array import array
from collections.abc import Sequence

import pytest

from eyas.kernels import suffix_index
from eyas.kernels.suffix_index import Continuation, NativeSuffixIndex, SuffixIndex, SuffixLimits, load_library
from eyas.kernels.suffix_index_plain import MOST_MATCHES, SIZES, PlainSuffixIndex

FORMS = ["native", "plain"]


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both implementations."""
    library, why = load_library()
    if request.param == "plain":
        monkeypatch.setattr(suffix_index, "load_library", lambda: (None, "not wanted here"))
    elif library is None:
        pytest.skip(f"no compiled index here: {why}")
    return str(request.param)


def index_of(*texts: Sequence[int], capacity: int = 4096) -> SuffixIndex:
    made = SuffixIndex(capacity)
    for text in texts[:-1]:
        made.extend(text)
        made.end_text()
    made.extend(texts[-1])
    return made


def by_search(text: Sequence[int], most: int, longest: int = 64) -> Continuation | None:
    """The expected continuation, by searching every place of one text whose chains are short."""
    for size in SIZES:
        if len(text) < size:
            continue
        found = []
        for end in range(len(text) - 1, size - 1, -1):
            same = 0
            while same < min(end, longest) and text[end - 1 - same] == text[-1 - same]:
                same += 1
            if same >= size:
                found.append((same, end))
        if not found:
            continue
        found = sorted(found[:MOST_MATCHES], key=lambda match: -match[0])
        tokens, votes, voters, ends = list[int](), list[int](), list[int](), [end for _, end in found]
        while len(tokens) < most:
            said = [[*text, *tokens][end + len(tokens)] for end in ends]
            best = max(said, key=said.count)
            votes.append(said.count(best))
            voters.append(len(said))
            ends = [end for end, token in zip(ends, said, strict=True) if token == best]
            tokens.append(best)
        return Continuation(found[0][0], tuple(tokens), tuple(votes), tuple(voters))
    return None


def random_text(source: random.Random) -> list[int]:
    """A text of few distinct tokens that quotes itself."""
    text = [source.randrange(6) for _ in range(4)]
    for _ in range(source.randrange(1, 12)):
        if source.random() < 0.5:
            start = source.randrange(len(text))
            text += text[start : start + source.randrange(1, 30)]
        else:
            text += [source.randrange(40) for _ in range(source.randrange(1, 9))]
    return text


def test_the_continuation_of_the_longest_match_is_proposed(form: str) -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 9, 2, 3, 8, 1, 2, 3]
    assert index_of(text).propose(text, 4) == Continuation(3, (4, 5, 6, 7), (1, 1, 1, 1), (2, 1, 1, 1))


def test_the_more_frequent_token_is_proposed_with_its_votes(form: str) -> None:
    text = [3, 1, 2, 7, 4, 1, 2, 8, 5, 1, 2, 7, 6, 1, 2]
    found = index_of(text).propose(text, 1)
    assert found == Continuation(2, (7,), (2,), (3,))


def test_a_loop_continues_as_long_as_asked(form: str) -> None:
    text = [5, 1, 2, 3, 1, 2, 3]
    found = index_of(text).propose(text, 8)
    assert found is not None
    assert found.tokens == (1, 2, 3, 1, 2, 3, 1, 2)


def test_text_that_occurred_nowhere_has_no_continuation(form: str) -> None:
    assert index_of(list(range(100))).propose(list(range(100)), 4) is None
    assert index_of([1]).propose([1], 4) is None
    assert index_of([1, 2, 1, 2]).propose([1, 2, 1, 2], 0) is None


def test_nothing_continues_across_the_end_of_a_text(form: str) -> None:
    index = index_of([1, 2, 3, 4], [5, 6, 7], [])
    found = index.propose([9, 2, 3], 5)
    assert found is not None
    assert found.tokens == (4,)
    assert index.propose([3, 4], 5) is None
    assert index.propose([4, 5], 5) is None
    assert index.propose([4, 5, 6], 5) == Continuation(2, (7,), (1,), (1,))


def test_tokens_ahead_of_the_index_are_part_of_the_continuation(form: str) -> None:
    text = [5, 1, 2, 3, 1]
    found = index_of(text).propose([*text, 2, 3, 1], 4, ahead=3)
    assert found is not None
    assert found.tokens == (2, 3, 1, 2)


def test_tokens_ahead_may_be_more_than_a_match_can_be_long(form: str) -> None:
    text = [*range(100, 140), 5, 5]
    ahead = (9, 8, 7, 5, 5)
    index = SuffixIndex(64, SuffixLimits(longest_match=4))
    index.extend(text)
    found = index.propose([*text, *ahead], 4, ahead=len(ahead))
    assert found is not None
    assert found.tokens[:2] == (9, 8)


def test_positions_before_a_given_one_do_not_count(form: str) -> None:
    index = index_of([1, 2, 3, 9], [4, 5, 6, 9], [])
    assert index.propose([1, 2], 1) is not None
    assert index.propose([1, 2], 1, since=5) is None
    assert index.propose([4, 5], 1, since=5) is not None


def test_dropped_tokens_are_never_proposed(form: str) -> None:
    """A place that newer tokens have overwritten must not be read as before."""
    source = random.Random(5)
    index, text = SuffixIndex(32), list[int]()
    assert index.capacity == 32
    for _ in range(3000):
        token = source.randrange(5)
        index.extend([token])
        text.append(token)
        found = index.propose(text, 6)
        assert found == by_search_in_ring(text, 32, 6), text[-40:]


def by_search_in_ring(text: Sequence[int], capacity: int, most: int) -> Continuation | None:
    """In a ring, matches and continuations are within the newest tokens."""
    return by_search(text[-capacity:], most)


@pytest.mark.parametrize("seed", range(20))
def test_every_form_equals_a_search_of_the_whole_text(form: str, seed: int) -> None:
    source = random.Random(seed)
    text = random_text(source)
    index = SuffixIndex(len(text))
    for at in range(len(text)):
        index.extend(text[at : at + 1])
        assert index.propose(text[: at + 1], 12) == by_search(text[: at + 1], 12)


@pytest.mark.parametrize("seed", range(20))
def test_an_index_built_in_portions_equals_one_built_at_once(form: str, seed: int) -> None:
    source = random.Random(100 + seed)
    text = random_text(source)
    whole, portions, at = index_of(text), SuffixIndex(4096), 0
    while at < len(text):
        count = source.randrange(1, 6)
        portions.extend(text[at : at + count])
        at += count
    assert len(whole) == len(portions) == len(text)
    for cut in range(1, len(text)):
        assert whole.propose(text[:cut], 9) == portions.propose(text[:cut], 9)


@pytest.mark.parametrize("seed", range(10))
def test_both_forms_give_the_same_answers_about_long_chains_too(seed: int) -> None:
    library, why = load_library()
    if library is None:
        pytest.skip(f"no compiled index here: {why}")
    source = random.Random(seed)
    native, plain = NativeSuffixIndex(library, 256, 24), PlainSuffixIndex(256, 24)
    text = list[int]()
    for _ in range(400):
        token = source.randrange(3) if source.random() < 0.97 else -1
        text.append(token)
        for index in (native, plain):
            index.extend(array("i", [token]))
        context = array("i", [abs(token) for token in text[-24:]])
        since = source.choice([0, 0, len(text) - 100])
        assert native.propose(context, 0, since, 10) == plain.propose(context, 0, since, 10)


def test_memory_is_fixed(form: str) -> None:
    index = SuffixIndex(1000)
    before = index.bytes
    for start in range(0, 5000, 100):
        index.extend(range(start, start + 100))
    assert index.bytes == before == 1024 * 36
    assert len(index) == 5000


def test_an_index_that_ran_out_of_positions_starts_over(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix_index, "MOST_POSITIONS", 10)
    index = index_of([1, 2, 3, 1, 2, 3, 1, 2])
    index.extend([4, 5, 6])
    assert len(index) == 3
    assert index.propose([1, 2], 1) is None
