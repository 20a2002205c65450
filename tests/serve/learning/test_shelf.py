"""The shelf of learnt drafters: bounded, whole, with their stories; who cannot be read is passed over."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from eyas.drafter.checkpoint import fingerprint_drafter
from eyas.errors import UserError
from eyas.serve.learning.shelf import KEPT, DrafterShelf, ServiceStory


def made(folder: Path, text: str = "weights") -> Path:
    folder.mkdir()
    (folder / "model.safetensors").write_text(text)
    (folder / "record.json").write_text(json.dumps({"schema": "eyas.adaptation/1", "kept": True}))
    return folder


def story(number: int, **changes: object) -> ServiceStory:
    values = {"number": number, "parent": number - 1 or None, "root": "r", "target_fingerprint": "t"}
    values |= {"swapped_at": "2026-01-01T00:00:00+00:00", "state": "confirmed"}
    return ServiceStory.model_validate(values | changes)


def names(shelf: DrafterShelf) -> list[str]:
    return sorted(one.name for one in shelf.folder.iterdir())


def test_only_the_last_ones_are_kept_and_those_that_are_needed(tmp_path: Path) -> None:
    shelf = DrafterShelf(tmp_path / "drafters")
    for number in range(1, 8):
        assert shelf.next_number == number
        shelf.add(made(tmp_path / "made"), story(number), needed={1, number})
        assert len(names(shelf)) <= KEPT
    assert names(shelf) == ["0001", "0005", "0006", "0007"]
    assert [one.number for one in shelf.stories()] == [1, 5, 6, 7]
    record = json.loads((shelf.place(7) / "record.json").read_text())
    assert record["kept"], "what the adaptation said stays"
    assert record["service"]["parent"] == 6


def test_the_last_good_one_is_of_this_target_and_of_this_drafter_and_was_not_rejected(tmp_path: Path) -> None:
    shelf = DrafterShelf(tmp_path / "drafters")
    assert shelf.good(root="r", target_fingerprint="t") == []
    for number, changes in enumerate(
        [{}, {"state": "watching"}, {"state": "rejected"}, {"target_fingerprint": "other"}], start=1
    ):
        shelf.add(made(tmp_path / "made"), story(number, **changes), needed=())
    found = shelf.good(root="r", target_fingerprint="t")
    assert [one.number for one in found] == [2, 1]
    shelf.amend(found[0].model_copy(update={"state": "rejected", "reason": "worse"}))
    assert [one.number for one in shelf.good(root="r", target_fingerprint="t")] == [1]
    assert shelf.good(root="another", target_fingerprint="t") == []


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"service": 3}', '{"service": {"number": "x"}}', "\x00" * 9])
def test_a_story_that_cannot_be_read_is_passed_over(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    shelf = DrafterShelf(tmp_path / "drafters")
    for number in (1, 2):
        shelf.add(made(tmp_path / "made"), story(number), needed=())
    (shelf.place(2) / "record.json").write_text(text)
    assert [one.number for one in shelf.stories()] == [1]
    assert "0002" in caplog.text
    assert shelf.next_number == 3, "its number is not given again"
    shelf.amend(story(2, state="rejected"))


def test_a_drafter_that_cannot_be_put_there_leaves_the_shelf_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf = DrafterShelf(tmp_path / "drafters")
    shelf.add(made(tmp_path / "made"), story(1), needed=())
    second = made(tmp_path / "made")

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        with pytest.raises(UserError, match="No space left"):
            shelf.add(second, story(2), needed=())
    assert names(shelf) == ["0001"]


def test_a_drafter_whose_weights_are_others_than_those_that_came_to_work_is_not_whole(tmp_path: Path) -> None:
    shelf = DrafterShelf(tmp_path / "drafters")
    folder = made(tmp_path / "made")
    told = story(1, fingerprint=fingerprint_drafter(str(folder)))
    place = shelf.add(folder, told, needed=())
    shelf.require_whole(told)
    (place / "model.safetensors").write_text("others")
    with pytest.raises(UserError, match="are not those that were learnt"):
        shelf.require_whole(told)
    shelf.require_whole(story(1))  # of an earlier release


def test_only_the_owner_can_read_a_story(tmp_path: Path) -> None:
    shelf = DrafterShelf(tmp_path / "drafters")
    place = shelf.add(made(tmp_path / "made"), story(1), needed=())
    assert stat.S_IMODE((place / "record.json").stat().st_mode) == 0o600
