"""Runs adaptations, one at a time, from start to verdict, in FOLDER/adaptation. `loop.py` decides what follows.

An attempt gets a copy of the newest answers and runs `eyas adapt` on it, from the drafter in service, on the stated
share of the device's time. It ends with a drafter that is better, with one that is not, or with a failure: killed, out
of disk, a record that cannot be read. As soon as it has ended, its copies of answers are deleted.

FOLDER/learner.json holds the position up to which answers were learnt from, so that a restarted server knows how many
are new.
"""

import json
import logging
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from eyas.atomic import new_file
from eyas.errors import UserError
from eyas.serve.learning.adaptation_process import AdaptationProcess
from eyas.serve.learning.adaptation_record import AdaptationRecord
from eyas.serve.learning.answer_ring import ATTEMPT
from eyas.serve.learning.answer_snapshot import RingEnd, copy_newest, count_behind, end_of
from eyas.serve.learning.shelf import RECORD, read_record

logger = logging.getLogger(__name__)
MOST_ANSWERS = 4000
"""The newest answers that one adaptation learns from and is judged by."""
LEAST_ANSWERS = 64
"""With fewer answers an interval says little: `eyas adapt` holds out at least 16."""
LEAST_SHARE = 0.001
"""The least share of the device's time, as in `eyas adapt --device-share`."""
MOST_SECONDS = 6 * 3600.0
"""The time limit: a longer adaptation hangs, or its share of the device is too small."""
ANSWERS, ADAPTED, DRAFTER = "answers.jsonl", "adapted", "drafter"

AttemptOutcome = Literal["better", "not_better", "failed"]
Command = Callable[[str, Path, Path], Sequence[str]]
"""Makes the command line of an adaptation from a drafter, a file of answers and an output folder."""


@dataclass(frozen=True, kw_only=True)
class LearnerSettings:
    """When the server adapts its drafter, and with which share of the device."""

    share: float
    """The share of the device's time."""
    options: Sequence[str] = ()
    """Further options of `eyas adapt`: the target, its precision, the device, and the operator's own."""
    answers: int = 500
    """New answers that an adaptation waits for."""
    interval: float = 1800.0
    """The least time between two adaptations, in seconds."""
    resume: bool = True
    """Whether a starting server loads the last good drafter of its folder."""

    def __post_init__(self) -> None:
        if not LEAST_SHARE <= self.share <= 1:
            raise UserError(f"--learn-share is {self.share:g}; give a share of the device's time, {LEAST_SHARE} to 1")
        if self.answers < LEAST_ANSWERS:
            raise UserError(f"--learn-answers is {self.answers}; an adaptation takes {LEAST_ANSWERS} at least")
        if not self.interval >= 0:
            raise UserError(f"--learn-interval is {self.interval:g}; give seconds, 0 or more")

    def command(self, drafter: str, answers: Path, out: Path) -> list[str]:
        given = ["--out", str(out), "--device-share", f"{self.share:g}", "--no-doctor", *self.options]
        return [sys.executable, "-m", "eyas", "adapt", drafter, str(answers), *given]


@dataclass(frozen=True, kw_only=True)
class AttemptResult:
    """The result of an attempt."""

    outcome: AttemptOutcome
    reason: str
    """The reason, without private texts: every user may read it."""
    seconds: float
    answers: int
    record: AdaptationRecord | None = None
    made: Path | None = None
    """The folder of the new drafter, if it is better."""


class Learner:
    """Makes attempts, one at a time. Its methods may block on the disk: call them off the event loop."""

    def __init__(
        self,
        folder: Path,
        *,
        fingerprint: str,
        command: Command,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`fingerprint` is that of the target."""
        self._folder, self._fingerprint, self._command, self._clock = folder, fingerprint, command, clock
        self._out, self._notes = folder / ATTEMPT, folder / "learner.json"
        self._process: AdaptationProcess | None = None
        self._answers = 0
        self._taken_until = RingEnd()

    @property
    def running(self) -> bool:
        return self._process is not None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def count_new(self) -> int:
        """The number of answers in the folder that no attempt has learnt from."""
        try:
            number, offset = read_record(self._notes)["learnt_until"]
            return count_behind(self._folder, RingEnd(int(number), int(offset)))
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.warning(f"{self._notes} cannot be read ({type(error).__name__}); all answers count as new")
        return count_behind(self._folder, RingEnd())

    def start(self, drafter: str) -> None:
        """Begin an attempt from this drafter. If that fails (UserError, OSError), nothing has changed."""
        assert self._process is None, "one attempt at a time"
        try:
            shutil.rmtree(self._out, ignore_errors=True)
            self._out.mkdir(mode=0o700)
            answers = self._out / ANSWERS
            self._taken_until = end_of(self._folder)
            counts = copy_newest(self._folder, answers, most=MOST_ANSWERS, fingerprint=self._fingerprint)
            if counts.others:
                logger.warning(f"{counts.others} answers of another target, or not to be read, are not learnt from")
            if counts.answers < LEAST_ANSWERS:
                raise UserError(
                    f"of the target that is served there are {counts.answers} answers, and an adaptation takes "
                    f"{LEAST_ANSWERS} at least; collect more"
                )
            self._answers = counts.answers
            command = self._command(drafter, answers, self._out / ADAPTED)
            self._process = AdaptationProcess(command, self._folder / "learner.log", self._clock)
        except BaseException:
            shutil.rmtree(self._out, ignore_errors=True)
            raise

    def poll(self) -> AttemptResult | None:
        """The result of the attempt; None while it runs. Its files stay until `clear`."""
        process = self._process
        assert process is not None
        code, seconds = process.poll(), process.seconds
        if code is None and seconds <= MOST_SECONDS:
            return None
        self._process = None
        if code is None:
            process.stop()
        self._forget_answers()
        if code is None:
            return self._failed(f"it took more than {MOST_SECONDS / 3600:g} hours", process, seconds)
        if code < 0:
            return self._failed(f"it was killed by signal {-code}", process, seconds)
        out = self._out / ADAPTED
        made = out / DRAFTER
        if code > 1 or (code == 1 and not (out / RECORD).exists()):  # a drafter that is not better exits with 1 too
            return self._failed(f"it ended with code {code}", process, seconds)
        try:
            record = AdaptationRecord.read(out)
        except (OSError, ValueError) as error:
            what = error.strerror if isinstance(error, OSError) else "it is not what eyas adapt writes"
            return self._failed(f"its record cannot be read ({what})", process, seconds)
        if record.kept != (code == 0) or record.kept != made.is_dir():
            return self._failed("its record and its exit code contradict each other", process, seconds)
        return AttemptResult(
            outcome="better" if record.kept else "not_better",
            reason=record.verdict,
            seconds=seconds,
            answers=self._answers,
            record=record,
            made=made if record.kept else None,
        )

    def note_learnt(self) -> None:
        """Record that the attempt's answers are not new any more. On a full disk the record is lost."""
        try:
            with new_file(self._notes) as staging:
                staging.touch(mode=0o600)
                staging.write_text(json.dumps({"learnt_until": self._taken_until}), encoding="utf-8")
        except UserError as error:
            logger.warning(f"how far answers were learnt from could not be written down: {error}")

    def _forget_answers(self) -> None:
        """Delete the attempt's copies of answers: a drafter that it made may wait for long."""
        with suppress(OSError):  # the server continues, and `clear` tries again
            (self._out / ANSWERS).unlink()
        shutil.rmtree(self._out / ADAPTED / "training" / "encoded", ignore_errors=True)

    def clear(self) -> None:
        """Delete the files of the last attempt."""
        shutil.rmtree(self._out, ignore_errors=True)

    def stop(self) -> None:
        """End a running attempt: the server stops, or its drafter was changed."""
        if self._process is not None:
            process, self._process = self._process, None
            with suppress(OSError):
                process.stop()
        self.clear()

    def _failed(self, reason: str, process: AdaptationProcess, seconds: float) -> AttemptResult:
        """A failure. The last line of its log goes to our log only: it may name folders, and /status is public."""
        logger.warning(f"an adaptation failed: {reason}; its last words: {process.last_line()}")
        return AttemptResult(outcome="failed", reason=reason, seconds=seconds, answers=self._answers)
