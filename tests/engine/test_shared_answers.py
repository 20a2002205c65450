"""Answers are kept for their own caller, for a while, within limits."""

from eyas.engine.suffix.config import SuffixConfig
from eyas.engine.suffix.shared_answers import SharedAnswers


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def kept(clock: Clock | None = None, **limits: float) -> SharedAnswers:
    return SharedAnswers(SuffixConfig(**limits), clock or Clock())  # type: ignore[arg-type]


def finds(answers: SharedAnswers, caller: str | None, first: int) -> bool:
    """Whether the answer that starts with this number and counts on is found."""
    found = answers.propose(caller, [first, first + 1], 1)
    assert found is None or found.tokens == (first + 2,)
    return found is not None


def test_only_the_caller_finds_an_answer() -> None:
    answers = kept()
    answers.add("a", [10, 11, 12, 13])
    answers.add(None, [20, 21, 22, 23])
    assert [finds(answers, caller, 10) for caller in ("a", "b", None)] == [True, False, False]
    assert [finds(answers, caller, 20) for caller in ("a", "b", None)] == [False, False, True]


def test_two_answers_are_two_texts() -> None:
    answers = kept()
    answers.add("a", [1, 2, 3])
    answers.add("a", [4, 5, 6])
    assert answers.propose("a", [1, 2], 5).tokens == (3,)  # type: ignore[union-attr]
    assert answers.propose("a", [2, 3], 5) is None
    assert answers.propose("a", [3, 4], 5) is None


def test_old_answers_are_forgotten() -> None:
    clock = Clock()
    answers = kept(clock, max_age_seconds=60)
    answers.add("a", [10, 11, 12])
    clock.now = 40
    answers.add("a", [20, 21, 22])
    assert finds(answers, "a", 10)
    clock.now = 61
    assert not finds(answers, "a", 10)
    assert finds(answers, "a", 20)
    clock.now = 101
    assert not finds(answers, "a", 20)
    assert answers.bytes == 0


def test_no_more_answers_are_kept_than_agreed() -> None:
    answers = kept(max_cached_requests=2)
    for first in (10, 20, 30):
        answers.add("a", [first, first + 1, first + 2])
    assert [finds(answers, "a", first) for first in (10, 20, 30)] == [False, True, True]
    nothing = kept(max_cached_requests=0)
    nothing.add("a", [10, 11, 12])
    assert not finds(nothing, "a", 10)
    assert nothing.bytes == 0


def test_no_more_tokens_are_kept_than_agreed() -> None:
    answers = kept(max_cached_tokens=64)
    for first in range(0, 4000, 10):
        answers.add("a", range(first, first + 10))
    assert answers.bytes == 64 * 36
    assert [finds(answers, "a", first) for first in (0, 2000, 3900, 3980, 3990)] == [False, False, False, True, True]


def test_an_answer_longer_than_the_ring_is_kept_by_its_end() -> None:
    answers = kept(max_cached_tokens=64)
    answers.add("a", range(500))
    assert not finds(answers, "a", 3)
    assert finds(answers, "a", 480)
    assert answers.propose("a", [498, 499], 3) is None


def test_callers_that_were_idle_longest_are_forgotten_first() -> None:
    answers = kept(max_callers=2)
    answers.add("a", [10, 11, 12])
    answers.add("b", [20, 21, 22])
    assert finds(answers, "a", 10), "a is active now"
    answers.add("c", [30, 31, 32])
    assert [finds(answers, caller, first) for caller, first in (("a", 10), ("b", 20), ("c", 30))] == [True, False, True]
    assert answers.bytes == 2 * 2**16 * 36


def test_expired_answers_of_inactive_callers_go_when_others_come() -> None:
    clock = Clock()
    answers = kept(clock, max_age_seconds=60)
    answers.add("a", [10, 11, 12])
    answers.add("b", [20, 21, 22])
    clock.now = 61
    answers.add("c", [30, 31, 32])
    assert answers.bytes == 2**16 * 36, "of one caller"
    assert finds(answers, "c", 30)
