"""Resumes `make lossless`: tests that passed with this commit and these prompts are skipped.

Each way that passed leaves an empty file, whose folder is named after the commit and the options. A tree with changes
that are not committed has no name, so nothing is kept of it.
"""

import hashlib
from collections.abc import Generator
from pathlib import Path

import pytest

from time_budget import ROOT, git

PASSED = "passed before with this commit and these prompts"


class Resumption:
    """Skips tests that passed before."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    @classmethod
    def of(cls, prompts: Path, drafter: str) -> "Resumption":
        """Results of this commit with these options."""
        commit = git("rev-parse", "HEAD")
        if not commit or git("status", "--porcelain"):
            return cls(None)
        name = hashlib.sha256(f"{commit} {drafter}".encode() + prompts.read_bytes()).hexdigest()[:16]
        return cls(ROOT / ".pytest_cache" / "lossless" / name)

    def _note(self, item: pytest.Item) -> Path | None:
        if self.folder is None or item.get_closest_marker("lossless") is None:
            return None
        return self.folder / hashlib.sha256(item.nodeid.encode()).hexdigest()[:16]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        note = self._note(item)
        if note is not None and note.exists():
            pytest.skip(PASSED)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        note = self._note(item)
        if note is not None and report.when == "call" and report.passed:
            note.parent.mkdir(parents=True, exist_ok=True)
            note.touch()
        return report
