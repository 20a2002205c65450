"""The folder of answers: bounded, private, and whole lines whatever happens to its writer."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
from typing import TYPE_CHECKING, Any

import pytest

from eyas.data.author_check import AuthorCheck
from eyas.errors import UserError
from eyas.serve.learning.answer_ring import FILES, LEAST_BYTES, AnswerRing

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BOUND = LEAST_BYTES


@pytest.fixture
def ring(tmp_path: Path) -> Iterator[AnswerRing]:
    ring = AnswerRing(tmp_path / "kept" / "answers", BOUND)
    yield ring
    ring.close()


def line(number: int, size: int = 1000) -> bytes:
    text = json.dumps({"number": number, "text": "x" * size})
    return text.encode() + b"\n"


def files(ring: AnswerRing) -> list[Path]:
    return sorted(ring.folder.glob("*.jsonl"))


def numbers(ring: AnswerRing) -> list[int]:
    return [json.loads(text)["number"] for file in files(ring) for text in file.read_bytes().splitlines()]


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_kept_answers_are_private(ring: AnswerRing) -> None:
    before = os.umask(0)
    try:
        assert ring.append(line(0))
    finally:
        os.umask(before)
    assert mode(ring.folder) == 0o700
    assert {mode(path) for path in ring.folder.iterdir()} == {0o600}


def test_a_folder_that_others_can_read_is_refused_with_the_fix(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir(mode=0o755)
    folder.chmod(0o750)
    with pytest.raises(UserError, match=r"mode 750.*chmod 700"):
        AnswerRing(folder, BOUND)
    folder.chmod(0o700)
    AnswerRing(folder, BOUND).close()


def test_a_folder_that_is_opened_to_others_later_gets_no_new_file(ring: AnswerRing) -> None:
    ring.append(line(0))
    ring.folder.chmod(0o755)
    with pytest.raises(UserError, match="chmod 700"):
        ring.append(line(1, BOUND // FILES))
    assert numbers(ring) == [0]


def test_the_oldest_files_are_deleted_and_the_bound_always_holds(ring: AnswerRing) -> None:
    for number in range(3000):
        assert ring.append(line(number, 1000 + 977 * number % 3000))
        assert ring.bytes == sum(file.stat().st_size for file in files(ring)) <= BOUND
    kept = numbers(ring)
    assert kept == list(range(kept[0], 3000))
    assert kept[0] > 2000
    assert ring.bytes > BOUND * (FILES - 2) / FILES


def test_a_long_line_has_a_file_of_its_own_and_one_beyond_the_bound_is_not_kept(ring: AnswerRing) -> None:
    ring.append(line(0))
    assert ring.append(line(1, BOUND // 2))
    assert [len(file.read_bytes().splitlines()) for file in files(ring)] == [1, 1]
    assert not ring.append(line(2, BOUND))
    assert numbers(ring) == [0, 1]


def test_the_bound_holds_for_answers_of_an_earlier_server(tmp_path: Path) -> None:
    first = AnswerRing(tmp_path / "answers", 2 * BOUND)
    for number in range(1900):
        first.append(line(number))
    first.close()
    second = AnswerRing(tmp_path / "answers", BOUND)
    second.append(line(1900))
    assert second.bytes <= BOUND
    assert numbers(second)[-2:] == [1899, 1900]
    second.close()


def test_remains_of_a_killed_process_are_repaired_at_the_next_start(ring: AnswerRing) -> None:
    for number in range(3):
        ring.append(line(number))
    ring.close()
    (newest,) = files(ring)
    newest.write_bytes(newest.read_bytes() + line(3, 200_000)[:-1])
    (ring.folder / "answers-00000007.jsonl").write_bytes(b'{"number": 4')
    (ring.folder / ".answers-00000008.jsonl.partial").write_bytes(b"{")
    again = AnswerRing(ring.folder, BOUND)
    assert numbers(again) == [0, 1, 2]
    again.append(line(5))
    again.close()
    assert numbers(again) == [0, 1, 2, 5]
    assert {path.name for path in ring.folder.iterdir()} == {".lock", *(file.name for file in files(ring))}


def test_a_full_disk_leaves_no_part_of_a_line(ring: AnswerRing, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    for begun in (False, True):
        if begun:
            ring.append(line(0))
        left = [100]

        def fill(descriptor: int, data: Any, left: list[int] = left) -> int:
            if not left[0]:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            done = write(descriptor, bytes(data)[: left[0]])
            left[0] -= done
            return done

        monkeypatch.setattr("eyas.serve.learning.answer_ring.os.write", fill)
        with pytest.raises(OSError, match="No space left"):
            ring.append(line(1))
        monkeypatch.undo()
        assert numbers(ring) == ([0] if begun else [])
        assert not list(ring.folder.glob(".answers*"))
    ring.append(line(2))
    assert numbers(ring) == [0, 2]


def test_files_may_be_deleted_while_it_is_written(ring: AnswerRing) -> None:
    for number in range(200):
        ring.append(line(number))
    for file in files(ring):
        file.unlink()
    ring.append(line(200))
    assert numbers(ring) == [200]
    assert ring.bytes == len(line(200))


def test_two_servers_do_not_share_a_folder(ring: AnswerRing) -> None:
    with pytest.raises(UserError, match="another server"):
        AnswerRing(ring.folder, BOUND)


def test_answers_of_another_target_are_not_mixed_in(ring: AnswerRing) -> None:
    check = AuthorCheck(source="ours", fingerprint="abc", vocab_size=64)
    ring.require_author(check)
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    record = {"messages": said, "target": "theirs", "target_fingerprint": "xyz"}
    ring.append(json.dumps(record).encode() + b"\n")
    with pytest.raises(UserError, match=r"answers of theirs.*ours.*--learn"):
        ring.require_author(check)
    ring.require_author(AuthorCheck(source="theirs", fingerprint="xyz", vocab_size=64))


def test_a_folder_that_is_opened_to_others_gets_no_further_line_until_it_is_closed(ring: AnswerRing) -> None:
    assert ring.append(line(0))
    ring.folder.chmod(0o755)
    with pytest.raises(UserError, match="open to other users"):
        ring.append(line(1))
    ring.folder.chmod(0o700)
    assert ring.append(line(2))
    assert numbers(ring) == [0, 2]


def test_a_folder_that_was_removed_is_made_again(ring: AnswerRing) -> None:
    assert ring.append(line(0))
    shutil.rmtree(ring.folder)
    assert ring.append(line(1))
    assert numbers(ring) == [1]
    assert mode(ring.folder) == 0o700
    assert ring.bytes == len(line(1))


def test_lines_do_not_follow_a_file_that_was_moved_away(ring: AnswerRing, tmp_path: Path) -> None:
    assert ring.append(line(0))
    (file,) = files(ring)
    file.rename(tmp_path / "elsewhere")
    assert ring.append(line(1))
    assert numbers(ring) == [1]
    assert (tmp_path / "elsewhere").read_bytes() == line(0)
    assert files(ring)[0].name > file.name, "numbers are not given again"


def test_copies_that_a_killed_adaptation_left_are_deleted_at_any_start(ring: AnswerRing) -> None:
    ring.close()
    copies = ring.folder / "adaptation"
    copies.mkdir()
    (copies / "answers.jsonl").write_bytes(line(0))
    AnswerRing(ring.folder, BOUND).close()
    assert not copies.exists()
