"""Who is looked up, and how often."""

from eyas.engine.suffix.lookup_pace import MOST_ROUNDS_OUT, LookupPace


def rounds_between_looks(pace: LookupPace, key: int, sent: list[bool]) -> list[int]:
    """Rounds that the request sat out before each of so many looks."""
    found = []
    for one in sent:
        out = 0
        while not pace.due(key):
            out += 1
        found.append(out)
        pace.note(key, sent=one)
    return found


def test_who_is_sent_nothing_sits_out_twice_as_many_rounds_each_time() -> None:
    assert rounds_between_looks(LookupPace(), 1, [False] * 7) == [0, 1, 2, 4, 8, 8, MOST_ROUNDS_OUT]


def test_nobody_sits_out_longer_than_the_longest() -> None:
    pace = LookupPace()
    assert rounds_between_looks(pace, 1, [False] * 5) == [0, 1, 2, 4, 8]
    pace.note(1, sent=False, longest=2)
    assert [pace.due(1) for _ in range(3)] == [False, False, True]


def test_who_is_sent_something_is_looked_up_in_every_round() -> None:
    assert rounds_between_looks(LookupPace(), 1, [False, False, False, True, True, False, False]) == [
        *(0, 1, 2, 4, 0, 0, 1),
    ]


def test_requests_are_paced_each_for_itself_and_forgotten_at_their_end() -> None:
    pace = LookupPace()
    assert rounds_between_looks(pace, 1, [False] * 4) == [0, 1, 2, 4]
    assert pace.due(2)
    pace.forget(1)
    assert rounds_between_looks(pace, 1, [False] * 2) == [0, 1]
