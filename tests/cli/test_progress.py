"""Progress: lines without a terminal, a bar with one, and a line for every stretch that is done."""

from __future__ import annotations

import io
import sys

import pytest

from eyas.cli.terminal import ProgressDisplay


class Clock:
    """Stands still until told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_without_a_terminal_beginnings_and_ends_get_a_line_and_the_rest_one_now_and_then(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    with ProgressDisplay(clock=clock) as progress:
        for done in range(1, 41):
            clock.now += 1
            progress.update("answering", done, 40, note=f"{done} tokens/s")
        progress.update("conditions: [noise]", 1)
        progress.update("conditions: [noise]", 2)
    assert capsys.readouterr().err.splitlines() == [
        "answering, 1 of 40, 1 tokens/s",
        "answering, 11 of 40, 11 tokens/s",
        "answering, 21 of 40, 21 tokens/s",
        "answering, 31 of 40, 31 tokens/s",
        "answering, 40 of 40, 40 tokens/s",
        "conditions: [noise]",
    ]


def test_what_is_followed_is_handed_on_and_leaves_one_line(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressDisplay(clock=clock) as progress:
        for item in progress.follow("plain", iter("abc"), 3):
            assert item in "abc"
            clock.now += 1
        made = list(progress.follow("depth 3", "abc", 3, summary=lambda seconds: f"2.5 tokens in {seconds:g} s"))
    assert made == ["a", "b", "c"]
    assert capsys.readouterr().err.splitlines() == ["plain (3 of 3, 3.0 s)", "2.5 tokens in 0 s"]


def test_long_stretches_that_are_followed_say_where_they_are(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressDisplay(clock=clock) as progress:
        for _ in progress.follow("plain", range(3), 3):
            clock.now += 6
    assert capsys.readouterr().err.splitlines() == ["plain, 3 of 3", "plain (3 of 3, 18.0 s)"]


def test_a_terminal_gets_a_bar_and_the_finished_lines(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    with ProgressDisplay(clock=clock) as progress:
        progress.update("drafting [to every depth]", 3, 4, note="7 tokens/s")
        progress.finish("drafted")
    drawn = terminal.getvalue()
    for part in ("drafting [to every depth]", "3/4", "7 tokens/s", "drafted\n"):
        assert part in drawn
    assert "3 of 4" not in drawn
