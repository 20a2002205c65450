"""What people read: progress on stderr, results on stdout as tables or JSON, files in the folder of --out."""

import json
import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from eyas.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID
    from rich.table import Table

    from eyas.data.bad_records import BadRecords

Item = TypeVar("Item")
LOGGER = logging.getLogger("eyas")
SECONDS = 10.0
"""Between two lines about the same piece of work, where there is no terminal."""


def report(message: str) -> None:
    """Print progress to stderr: stdout holds results only."""
    print(message, file=sys.stderr, flush=True)


class _ToStderr(logging.Handler):
    """Writes to the present `sys.stderr`, which tests and terminals replace."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write the message alone."""
        report(record.getMessage())


@contextmanager
def shown_logs() -> Iterator[None]:
    """Show what the library logs; as a library it keeps to Python's own settings."""
    handler, level = _ToStderr(), LOGGER.level
    LOGGER.addHandler(handler)
    LOGGER.setLevel(logging.INFO)
    try:
        yield
    finally:
        LOGGER.removeHandler(handler)
        LOGGER.setLevel(level)


def print_result(record: Mapping[str, Any], print_tables: Callable[[], None], *, as_json: bool) -> None:
    """Print a record as JSON, or else its tables."""
    if as_json:
        typer.echo(json.dumps(record))
    else:
        print_tables()


def cell(value: float | None, form: str) -> str:
    """Format a cell of a table."""
    return "-" if value is None else form.format(value)


def print_counts(counts: Mapping[str, float], *, as_json: bool) -> None:
    """Print a line for each count."""
    if as_json:
        typer.echo(json.dumps(counts))
        return
    for name, count in counts.items():
        typer.echo(f"{name:14} {count:>12,}")


def report_skipped(bad: "BadRecords", max_share: float) -> None:
    """Name records that were skipped; refuse too many of them."""
    bad.require_few(max_share, "--max-bad-share")
    if bad:
        report(f"note: {len(bad):,} of {bad.read:,} records are bad and skipped")
        for line in bad.lines():
            report(f"  {line}")


def make_folder(out: Path | None) -> None:
    """Make the folder of --out, before anything is measured."""
    try:
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make {out}: {error.strerror}; choose another --out") from error


def write_results(out: Path | None, files: Mapping[str, Callable[[Path], object]]) -> None:
    """Have each of these functions write its file in the folder of --out, and name the files."""
    if out is None:
        return
    try:
        for name, write in files.items():
            write(out / name)
    except OSError as error:
        raise UserError(f"cannot write to {out}: {error.strerror}; free space or choose another --out") from error
    report(f"written: {', '.join(str(out / name) for name in files)}")


def text_file(text: str) -> Callable[[Path], object]:
    """A writer of this text, for `write_results`."""
    return lambda path: path.write_text(text, encoding="utf-8")


def wide_console(width: int, *, highlight: bool = True) -> "Console":
    """A console on stdout, as wide as the terminal; in a file, which has no width, as wide as asked for."""
    from rich.console import Console

    console = Console(highlight=highlight)
    return console if console.is_terminal else Console(width=width, highlight=highlight)


def titled_table(title: str | None, headings: Sequence[str], rows: Iterable[Sequence[str]] = ()) -> "Table":
    """Make a table with its first column to the left and all others, numbers, to the right."""
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for place, heading in enumerate(headings):
        table.add_column(heading, justify="right" if place else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


class Ticker:
    """Reports at most every few seconds."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def __call__(self, message: str, *, at_once: bool = False) -> None:
        """Report, if it is time, or `at_once`."""
        now = time.monotonic()
        if at_once or now - self._last >= SECONDS:
            self._last = now
            report(message)


class ProgressDisplay:
    """Shows how far a long command is: a bar where there is a terminal, a line now and then where there is none.

        with ProgressDisplay() as progress:
            progress.update("answering", 3, 40, note="120 tokens/s")
            for answer in progress.follow("depth 3", answers, 40):
                ...

    One piece of work is shown at a time; another name begins another. What is printed meanwhile stands above the bar.
    """

    def __init__(self, *, seconds: float = SECONDS, clock: Callable[[], float] = time.monotonic) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        self._bar = Bar(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}", markup=False),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            disable=not sys.stderr.isatty(),
        )
        self._seconds, self._clock = seconds, clock
        self._spoken = clock()
        self._name: str | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> "ProgressDisplay":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def update(self, name: str, done: int, total: int | None = None, *, note: str = "") -> None:
        """Show progress. Without a terminal, beginning and end get a line in any case."""
        self._show(name, done, total, note, speak=name != self._name or done == total)

    def follow(
        self, name: str, items: Iterable[Item], total: int, *, summary: Callable[[float], str] | None = None
    ) -> Iterator[Item]:
        """Hand items on as they come, then print a line: `summary` of the seconds it took, or the count."""
        started, done = self._clock(), 0
        self._show(name, done, total)
        for done, item in enumerate(items, start=1):
            self._show(name, done, total)
            yield item
        seconds = self._clock() - started
        self.finish(f"{name} ({done:,} of {total:,}, {seconds:.1f} s)" if summary is None else summary(seconds))

    def finish(self, line: str) -> None:
        """Replace the bar by a line that stays."""
        self._leave()
        report(line)

    def _show(self, name: str, done: int, total: int | None, note: str = "", *, speak: bool = False) -> None:
        if name != self._name:
            self._leave()
            self._name, self._task = name, self._bar.add_task(name, total=total, completed=done, note=note)
        if self._task is not None:
            self._bar.update(self._task, completed=done, total=total, note=note)
        if self._bar.disable and (speak or self._clock() - self._spoken >= self._seconds):
            self._spoken = self._clock()
            counted = "" if total is None else f"{done:,} of {total:,}"
            report(", ".join(part for part in (name, counted, note) if part))

    def _leave(self) -> None:
        if self._task is not None:
            self._bar.remove_task(self._task)
        self._name = self._task = None
