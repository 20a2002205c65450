"""How far a long command is, on stderr: a bar where there is a terminal, a line now and then where there is none.

    with ProgressDisplay() as progress:
        progress.update("answering", 3, 40, note="120 tokens/s")
        for answer in progress.follow("depth 3", answers, 40):
            ...

One stretch of work is shown at a time; another name begins another. What is printed or logged meanwhile stands above
the bar.
"""

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, TypeVar

from eyas.cli.options import report

if TYPE_CHECKING:
    from rich.progress import TaskID

Item = TypeVar("Item")

SECONDS = 10.0
"""Between two lines about the same stretch, where there is no terminal."""


class ProgressDisplay:
    """Shows where the work stands."""

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
        """So much of a stretch is done. Without a terminal its beginning and its end get a line in any case."""
        self._show(name, done, total, note, speak=name != self._name or done == total)

    def follow(
        self, name: str, items: Iterable[Item], total: int, *, summary: Callable[[float], str] | None = None
    ) -> Iterator[Item]:
        """Hand items on as they come, then print a line: `summary` of the seconds it took, or what was counted."""
        started, done = self._clock(), 0
        self._show(name, done, total)
        for done, item in enumerate(items, start=1):
            self._show(name, done, total)
            yield item
        seconds = self._clock() - started
        self.finish(f"{name} ({done:,} of {total:,}, {seconds:.1f} s)" if summary is None else summary(seconds))

    def finish(self, line: str) -> None:
        """End the stretch: its bar gives way to a line that stays."""
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
