"""`make lossless` repeats failed tests only."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from resumption import Resumption


def _run(resumption: Resumption, name: str, *, passed: bool, marked: bool = True) -> bool:
    """Run a test with this outcome, unless it is skipped; return whether it ran."""
    item: Any = SimpleNamespace(nodeid=name, get_closest_marker=lambda _: object() if marked else None)
    try:
        resumption.pytest_runtest_setup(item)
    except pytest.skip.Exception:
        return False
    reports = resumption.pytest_runtest_makereport(item)
    next(reports)
    report: Any = SimpleNamespace(when="call", passed=passed)
    with pytest.raises(StopIteration):
        reports.send(report)
    return True


def test_passed_tests_are_not_run_again(tmp_path: Path) -> None:
    first = Resumption(tmp_path / "here")
    assert _run(first, "good", passed=True)
    assert _run(first, "bad", passed=False)
    assert _run(first, "another mark", passed=True, marked=False)
    again = Resumption(tmp_path / "here")
    assert not _run(again, "good", passed=True)
    assert _run(again, "bad", passed=True)
    assert _run(again, "another mark", passed=True, marked=False)
    assert _run(Resumption(tmp_path / "elsewhere"), "good", passed=True)


def test_nothing_is_kept_for_uncommitted_changes() -> None:
    for _ in range(2):
        assert _run(Resumption(None), "good", passed=True)
