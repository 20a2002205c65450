"""Snapshots of an answer ring: its end, the number of answers since, and a copy of the newest ones.

An adaptation reads its answers for minutes, while files grow and the oldest are deleted. It therefore gets a copy of
the newest ones: whole lines only, and only those of the served target.
"""

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from eyas.serve.learning.answer_ring import RingFile, ring_files


class RingEnd(NamedTuple):
    """A position in a ring; later answers are newer."""

    number: int = 0
    offset: int = 0
    """The position in the file of that number, in bytes."""


@dataclass(frozen=True, kw_only=True)
class SnapshotCounts:
    """The number of lines that a snapshot holds."""

    answers: int
    others: int
    """Lines that were left out: of another target, or not readable."""


def end_of(folder: Path) -> RingEnd:
    """The current end of a ring."""
    files = ring_files(folder)
    return RingEnd(files[-1].number, files[-1].size) if files else RingEnd()


def count_behind(folder: Path, place: RingEnd) -> int:
    """The number of answers behind a position; all of them, if the ring was emptied meanwhile."""
    if end_of(folder) < place:
        place = RingEnd()
    newer = [file for file in ring_files(folder) if file.number >= place.number]
    return sum(1 for file in newer for _ in _lines(file, place.offset if file.number == place.number else 0))


def copy_newest(folder: Path, to: Path, *, most: int, fingerprint: str) -> SnapshotCounts:
    """Write the newest answers of a target to a new file in their order. OSError if that fails."""
    files = ring_files(folder)
    skipped = -most
    counted: list[tuple[RingFile, int]] = []
    for file in reversed(files):
        if skipped >= 0:
            break
        count = sum(1 for _ in _lines(file))
        counted.append((file, count))
        skipped += count
    answers = others = 0
    descriptor = os.open(to, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as copy:
        for number, (file, _) in enumerate(reversed(counted)):
            for place, line in enumerate(_lines(file)):
                if number == 0 and place < skipped:
                    continue
                if _author_of(line) == fingerprint:
                    copy.write(line)
                    answers += 1
                else:
                    others += 1
        copy.flush()
        os.fsync(copy.fileno())
    return SnapshotCounts(answers=answers, others=others)


def _lines(file: RingFile, start: int = 0) -> Iterator[bytes]:
    """The whole lines of a file, up to its size when it was listed."""
    with suppress(FileNotFoundError), file.path.open("rb") as lines:
        lines.seek(start)
        left = file.size - start
        for line in lines:
            left -= len(line)
            if left < 0 or not line.endswith(b"\n"):
                return
            yield line


def _author_of(line: bytes) -> str | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    author = record.get("target_fingerprint") if isinstance(record, dict) else None
    return author if isinstance(author, str) else None
