"""Keeps answers in a folder of bounded size: files of JSON lines, the oldest of which is deleted for new lines.

Invariants: the files together never hold more than `max_bytes`; a file under its final name holds at least one line;
all lines are whole, except the last one of a file while it is written or if the process was killed meanwhile (the next
start removes it). Only the user who runs the server can read them: the folder has mode 0700 and its files 0600, and a
folder with other permissions is refused, at the start and with every line.

The operator may delete or replace files at any time: the next line then begins a new one.
"""

import json
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock, Timeout

from eyas.data.author_check import AuthorCheck
from eyas.data.bad_records import RecordError
from eyas.data.conversations import parse_conversation
from eyas.errors import UserError

FILES = 16
"""Files that share the bytes: a sixteenth is deleted at a time."""
LEAST_BYTES = 2**20
ATTEMPT = "adaptation"
"""The subfolder with an adaptation's copy of the answers (`learner.py`)."""
_NAME = re.compile(r"answers-(\d{8,})\.jsonl")
_CHUNK = 2**16


class RingFile(NamedTuple):
    """A file of answers; within a folder, higher numbers are newer."""

    number: int
    path: Path
    size: int


def ring_files(folder: Path) -> list[RingFile]:
    """The files of a folder of answers, the oldest first. A process may read them while another writes."""
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):  # deleted meanwhile
                if (match := _NAME.fullmatch(entry.name)) and entry.is_file(follow_symlinks=False):
                    found.append(RingFile(int(match[1]), Path(entry.path), entry.stat().st_size))
    return sorted(found)


class AnswerRing:
    """A folder of answers that one process writes to, on one thread at a time."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        """Make the folder, or open an existing one and repair it if a process was killed."""
        if max_bytes < LEAST_BYTES:
            raise UserError(f"--learn-bytes is {max_bytes:,}; give {LEAST_BYTES:,} or more")
        self.folder, self.max_bytes = folder, max_bytes
        self._open: tuple[Path, int] | None = None
        """The newest file and its descriptor, while lines are added to it."""
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            self._require_private()
            self._lock = FileLock(folder / ".lock", mode=0o600, timeout=0)
            self._lock.acquire()
            self._mend()
            self.bytes = sum(size for _, size in self._files())
            self._newest = max((file.number for file in ring_files(folder)), default=0)
            """The number of the newest file so far, as far as this process knows."""
        except Timeout as error:
            raise UserError(f"another server keeps its answers in {folder}; name another folder by --learn") from error
        except OSError as error:
            reason = error.strerror or error
            raise UserError(f"cannot keep answers in {folder}: {reason}; name another folder by --learn") from error

    def require_author(self, check: AuthorCheck) -> None:
        """Raise an error if the folder holds answers of another target: no drafter can learn from both."""
        for path, _ in reversed(self._files()):
            with path.open("rb") as lines:
                try:
                    held = parse_conversation(json.loads(lines.readline()), str(path))
                except (ValueError, RecordError):
                    continue
            try:
                check(held)
            except UserError as error:
                raise UserError(
                    f"{self.folder} holds answers of {held.author or 'another target'}, and the target is "
                    f"{check.source}, another model; name another folder by --learn, or delete the files in this one"
                ) from error
            return

    def append(self, line: bytes) -> bool:
        """Add a line that ends with a line break; False if it is longer than `max_bytes`.

        An OSError (such as a full disk) or a UserError (the folder was opened to others) leaves no part of it behind.
        """
        if len(line) > self.max_bytes:
            return False
        try:
            self._require_private()
            if self._open is not None and (
                not self._is_in_place() or os.fstat(self._open[1]).st_size + len(line) > self.max_bytes // FILES
            ):
                self._end_file()
            self._make_room(len(line))
            if self._open is None:
                self._begin_file(line)
            else:
                self._extend_file(line)
        finally:
            self.bytes = 0
            with suppress(OSError):
                self.bytes = sum(size for _, size in self._files())
        return True

    def _is_in_place(self) -> bool:
        """Whether the newest file still exists under its name: it may have been deleted, moved or replaced."""
        assert self._open is not None
        path, descriptor = self._open
        try:
            return os.path.samestat(os.fstat(descriptor), path.stat())
        except FileNotFoundError:
            return False

    def close(self) -> None:
        """Close the newest file and unlock the folder. May be called twice."""
        self._end_file()
        self._lock.release()

    def _require_private(self) -> None:
        """Make the folder if it does not exist; refuse one that others can read."""
        with suppress(FileExistsError):
            self.folder.mkdir(mode=0o700)
        found = self.folder.stat()
        if os.name == "posix" and found.st_uid != os.getuid():
            raise UserError(f"{self.folder} belongs to another user; name a folder of your own by --learn")
        if os.name == "posix" and found.st_mode & 0o077:
            raise UserError(
                f"{self.folder} is open to other users (mode {found.st_mode & 0o777:o}), and answers are private; "
                f"close it (chmod 700 {self.folder}) or name another folder by --learn"
            )

    def _files(self) -> list[tuple[Path, int]]:
        """The files, oldest first, each with its size."""
        return [(file.path, file.size) for file in ring_files(self.folder)]

    def _mend(self) -> None:
        """Remove the remains of a killed process: a file under a temporary name, a part of a line, and an adaptation's
        copy of answers."""
        shutil.rmtree(self.folder / ATTEMPT, ignore_errors=True)
        for path in self.folder.glob(".answers-*.partial"):
            path.unlink()
        for path, size in self._files():
            with path.open("r+b") as file:
                whole = size
                while whole and (lines := _read_before(file.fileno(), whole)).rfind(b"\n") != len(lines) - 1:
                    whole -= len(lines) - 1 - lines.rfind(b"\n")
                file.truncate(whole)
            if not whole:
                path.unlink()

    def _make_room(self, needed: int) -> None:
        files = self._files()
        held = sum(size for _, size in files)
        for path, size in files:
            if held + needed <= self.max_bytes:
                return
            if self._open is not None and path == self._open[0]:
                self._end_file()
            path.unlink(missing_ok=True)
            held -= size

    def _begin_file(self, line: bytes) -> None:
        """Begin a file under a hidden name until its first line is whole, since readers refuse empty files."""
        newest = max([self._newest, *(file.number for file in ring_files(self.folder))])
        path = self.folder / f"answers-{newest + 1:08d}.jsonl"
        staging = self.folder / f".{path.name}.partial"
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL
        staging.unlink(missing_ok=True)
        descriptor = os.open(staging, flags, 0o600)
        try:
            _write(descriptor, line)
            staging.rename(path)
        except BaseException:
            os.close(descriptor)
            with suppress(OSError):
                staging.unlink()
            raise
        self._open, self._newest = (path, descriptor), newest + 1

    def _extend_file(self, line: bytes) -> None:
        assert self._open is not None
        descriptor = self._open[1]
        before = os.fstat(descriptor).st_size
        try:
            _write(descriptor, line)
        except BaseException:
            with suppress(OSError):
                os.ftruncate(descriptor, before)
            self._end_file()
            raise

    def _end_file(self) -> None:
        if self._open is not None:
            descriptor, self._open = self._open[1], None
            os.close(descriptor)


def _write(descriptor: int, line: bytes) -> None:
    left = memoryview(line)
    while left:
        left = left[os.write(descriptor, left) :]


def _read_before(descriptor: int, end: int) -> bytes:
    """The last bytes before a position in a file."""
    start = max(0, end - _CHUNK)
    return os.pread(descriptor, end - start, start)
