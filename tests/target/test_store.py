"""Converted folders are built once, whole, whoever asks and whatever was left behind."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from eyas.errors import UserError
from eyas.target.store import build_once, logger


def test_a_second_asker_waits_for_the_first_and_builds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "targets" / "one"
    started, finish, waiting = threading.Event(), threading.Event(), threading.Event()
    built: list[Path] = []

    def slow(staging: Path) -> None:
        built.append(staging)
        started.set()
        assert finish.wait(10)
        (staging / "done").touch()

    first = threading.Thread(target=build_once, args=(folder, slow))
    monkeypatch.setattr(logger, "info", lambda line: waiting.set())
    second = threading.Thread(target=build_once, args=(folder, slow))
    first.start()
    assert started.wait(10)
    second.start()
    assert waiting.wait(10)
    assert not folder.exists()
    finish.set()
    first.join(10)
    second.join(10)
    assert len(built) == 1
    assert (folder / "done").is_file()


def test_what_a_killed_builder_left_is_swept(tmp_path: Path) -> None:
    stale = tmp_path / ".one.partial-killed"
    stale.mkdir()
    (stale / "half").touch()
    build_once(tmp_path / "one", lambda staging: (staging / "done").touch())
    assert not stale.exists()
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["one"]


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot use the cache"):
        build_once(tmp_path / "file" / "one", lambda staging: None)
