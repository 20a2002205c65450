"""Tests within a time budget: files that a change touches first, the rest in an order given by the commit's hash.

A test that would begin too late is skipped, and the closing lines name what was left out. One that takes minutes says
so: `@pytest.mark.slow(minutes=4)`.
"""

import hashlib
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LEFT_OUT = "left out: the time budget is spent"


def git(*arguments: str) -> str:
    """Output of a git command; empty if it fails."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def room_of(path: str) -> str:
    """Part of the project that a path belongs to: `engine` of src/eyas/engine/... and of tests/engine/..."""
    parts = Path(path.removeprefix("src/eyas/").removeprefix("tests/")).parts
    return "docs" if path.endswith(".md") else parts[0].removeprefix("test_").removesuffix(".py")


def changed_rooms() -> set[str]:
    """Rooms of the paths changed since the main branch, or, on it, since the previous commit."""
    head, base = git("rev-parse", "HEAD"), git("merge-base", "HEAD", "origin/main")
    if base in ("", head):
        base = "HEAD~1"
    return {room_of(path) for path in git("diff", "--name-only", base, "HEAD").splitlines()}


class TimeBudget:
    """Orders tests, and skips and reports those that would begin after `until`."""

    def __init__(self, until: float) -> None:
        self.until = until

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        commit, changed = git("rev-parse", "HEAD"), changed_rooms()

        def place(item: pytest.Item) -> tuple[bool, bytes]:
            path = item.path.relative_to(ROOT).as_posix()
            return room_of(path) not in changed, hashlib.sha256(f"{commit} {path}".encode()).digest()

        items.sort(key=place)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        marker = item.get_closest_marker("slow")
        minutes = marker.kwargs.get("minutes", 0) if marker is not None else 0
        if time.time() + 60 * minutes > self.until:
            pytest.skip(LEFT_OUT)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        skipped = terminalreporter.stats.get("skipped", [])
        counts = Counter(report.nodeid.split("::")[0] for report in skipped if LEFT_OUT in str(report.longrepr))
        if counts:
            terminalreporter.section("left out: the time budget was spent")
            for path, count in sorted(counts.items()):
                terminalreporter.write_line(f"{path}: {count}")
