"""A JSON lines file that a later run can continue.

Every line has an `id` and is flushed as it is written, so a killed run leaves whole lines, except perhaps the last; the
next run removes a partial line and adds the missing ids. The arguments are kept in `<file>.json` and must be equal in
all runs, so that a file never mixes two settings.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

from filelock import FileLock, Timeout

from eyas.atomic import new_file
from eyas.errors import UserError


@contextmanager
def resumable_file(out: Path, arguments: Mapping[str, object], *, what: str) -> Iterator[tuple[IO[bytes], set[int]]]:
    """Open `out` for appending, locked for this run; yield the stream and the ids that it already has.

    `arguments` are all settings that decide the content, as JSON values; `what` names the lines in messages.
    """
    record = out.with_name(f"{out.name}.json")
    with ExitStack() as opened:
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            opened.enter_context(FileLock(out.with_name(f".{out.name}.lock"), timeout=0))
            stream = opened.enter_context(_closed_in_the_end(out.open("a+b"), what))
            stream.seek(0)
            lines = stream.read()
            lines = lines[: lines.rfind(b"\n") + 1]
            ids = _written_ids(lines, out, what)
            _check_arguments(record, arguments, out, what if ids else None)
            stream.truncate(len(lines))
        except Timeout as error:
            raise UserError(f"another run is writing {out}; wait for it or choose another file") from error
        except OSError as error:
            raise UserError(f"cannot write {out}: {error.strerror or error}; choose another file") from error
        yield stream, ids


def write_line(stream: IO[bytes], row: Mapping[str, object], what: str) -> None:
    """Write and flush one line; `what` names it in messages."""
    try:
        stream.write(json.dumps(row, ensure_ascii=False, separators=(",", ":")).encode() + b"\n")
        stream.flush()
    except OSError as error:
        raise _cannot_write(what, error) from error


@contextmanager
def _closed_in_the_end(stream: IO[bytes], what: str) -> Iterator[IO[bytes]]:
    """Close a stream; after an error, closing would write again and fail again."""
    try:
        yield stream
    except BaseException:
        with suppress(OSError):
            stream.close()
        raise
    try:
        stream.close()
    except OSError as error:  # network disks may report only now that they are full
        raise _cannot_write(what, error) from error


def _cannot_write(what: str, error: OSError) -> UserError:
    return UserError(
        f"cannot write {what}: {error.strerror or error}; what was written before is kept, free space and run again"
    )


def _written_ids(lines: bytes, out: Path, what: str) -> set[int]:
    ids: set[int] = set()
    for number, line in enumerate(lines.splitlines(), start=1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UserError(f"{out}:{number} is not JSON ({error}); remove the line or choose another file") from error
        here = row.get("id") if isinstance(row, dict) else None
        if not isinstance(here, int) or here in ids:
            wrong = "has no id" if not isinstance(here, int) else f"holds id {here} again"
            raise UserError(f"{out}:{number} {wrong}, so it is no file of {what} to go on with; choose another file")
        ids.add(here)
    return ids


def _check_arguments(record: Path, arguments: Mapping[str, object], out: Path, held: str | None) -> None:
    """Write the arguments for a new file; raise if a continued file has others."""
    now = json.loads(json.dumps(dict(arguments)))
    if held is not None:
        try:
            before = json.loads(record.read_bytes())
            assert isinstance(before, dict)
        except (OSError, ValueError, AssertionError) as error:
            raise UserError(
                f"{out} holds {held} but {record} does not say how they were made; choose another file"
            ) from error
        for name in sorted({*before, *now}):
            if before.get(name) != now.get(name):
                raise UserError(
                    f"{out} was begun with {name} {before.get(name)!r} and this run has {now.get(name)!r}; "
                    "use the same or choose another file"
                )
        return
    with new_file(record) as staging:
        staging.write_text(json.dumps(now, indent=2) + "\n", encoding="utf-8")
