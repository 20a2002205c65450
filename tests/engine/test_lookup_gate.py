"""Look-ups go on while they save more than they take, and lose little where they do not."""

from math import sqrt

from eyas.engine.speculation.probes import CREDIT, SHARE
from eyas.engine.suffix.lookup_gate import MOST_ROUNDS_OUT, LookupGate

PLAIN = 1e-2
"""Seconds of a plain step."""


def looked_up(gate: LookupGate, saved: float, rounds: int, *, rows: int = 4) -> int:
    """Of so many rounds, those that were looked up, where each saves so many seconds, or loses them."""
    count = 0
    for _ in range(rounds):
        if gate.is_open(rows, PLAIN):
            gate.book(rows, saved, PLAIN)
            count += 1
    return count


def test_what_saves_time_is_looked_up_in_every_round() -> None:
    assert looked_up(LookupGate(), 1e-4, 2000) == 2000


def test_what_saves_none_loses_a_few_plain_steps_and_a_small_share_of_the_time() -> None:
    for part in (0.005, 0.05, 0.2, 1.0):
        for rounds in (100, 1000, 20_000):
            lost = looked_up(LookupGate(), -part * PLAIN, rounds) * part
            overrun = part * (1 + sqrt(rounds) / 2)  # the last round of each stretch
            assert lost <= CREDIT + SHARE * rounds + overrun


def test_traffic_that_begins_to_repeat_is_found_out_and_traffic_that_ceases_to_is_too() -> None:
    gate = LookupGate()
    assert looked_up(gate, -0.05 * PLAIN, 5000) < 500
    assert looked_up(gate, 0.5 * PLAIN, 1000) > 500
    assert looked_up(gate, 0.5 * PLAIN, 1000) == 1000
    looked_up(gate, -0.05 * PLAIN, 2000)
    assert looked_up(gate, -0.05 * PLAIN, 5000) < 500


def test_numbers_of_requests_have_accounts_of_their_own() -> None:
    gate = LookupGate()
    looked_up(gate, -PLAIN, 500, rows=16)
    assert looked_up(gate, PLAIN, 500, rows=1) == 500
    report = gate.report()
    assert report[1]["looked_up"]
    assert report[1]["seconds_saved"] > 0 > report[16]["seconds_saved"]


# --- how often a request is --------------------------------------------------------------------------------------


def rounds_between_looks(gate: LookupGate, key: int, sent: list[bool]) -> list[int]:
    """Rounds that the request sat out before each of so many looks."""
    found = []
    for one in sent:
        out = 0
        while not gate.due(key):
            out += 1
        found.append(out)
        gate.note(key, sent=one)
    return found


def test_a_request_that_is_sent_nothing_sits_out_twice_as_many_rounds_each_time() -> None:
    assert rounds_between_looks(LookupGate(), 1, [False] * 6) == [0, 1, 2, 4, 4, MOST_ROUNDS_OUT]


def test_a_request_that_is_sent_something_is_looked_up_in_every_round() -> None:
    assert rounds_between_looks(LookupGate(), 1, [False, False, False, True, True, False, False]) == [
        *(0, 1, 2, 4, 0, 0, 1),
    ]


def test_requests_are_paced_each_for_itself_and_forgotten_at_their_end() -> None:
    gate = LookupGate()
    assert rounds_between_looks(gate, 1, [False] * 4) == [0, 1, 2, 4]
    assert gate.due(2)
    gate.forget(1)
    assert rounds_between_looks(gate, 1, [False] * 2) == [0, 1]
