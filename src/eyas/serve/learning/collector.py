"""Writes finished answers on a thread of its own while the server serves.

Serving never waits for it. Answers that come faster than they are written are dropped beyond a bound, and counted. If
the disk is full or a write fails, collecting pauses: answers are dropped, the log and /status say why, and the first
answer after `RETRY_SECONDS` is tried again. Texts are never logged, not even those of errors.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from eyas.errors import UserError
from eyas.serve.learning.answer_record import AnswerRecorder, FinishedAnswer
from eyas.serve.learning.answer_ring import AnswerRing
from eyas.serve.learning.learner import LearnerSettings
from eyas.serve.monitoring.metrics import ServerMetrics

logger = logging.getLogger(__name__)
MAX_WAITING_TOKENS = 2**20
"""The limit of tokens in prompts and answers that wait to be written."""
MAX_WAITING_ANSWERS = 512
"""The limit of waiting answers: each holds its request's body, which may be far longer than its prompt."""
RETRY_SECONDS = 30.0
CLOSE_SECONDS = 30.0
"""The time to write the waiting answers at the end; more than a working disk needs."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LearnFolder:
    """A folder of answers, and the target that made them."""

    ring: AnswerRing
    author: Mapping[str, str]
    """The target's name and, if its weights are accessible, their fingerprint; in every record."""
    learner: LearnerSettings | None = None
    """How the server adapts its drafter to the answers; None if it only keeps them."""


@dataclass(frozen=True, kw_only=True)
class CollectorStatus:
    """Counts of answers since the start, and the bytes that are kept now."""

    collected: int
    dropped: int
    bytes: int
    max_bytes: int
    paused: str | None
    """The reason why no answers are kept at the moment, if so."""


class AnswerCollector:
    """Takes answers from the event loop and writes them. Call `close` at the end."""

    def __init__(
        self,
        ring: AnswerRing,
        recorder: AnswerRecorder,
        metrics: ServerMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ring, self._recorder, self._clock = ring, recorder, clock
        self._metrics = metrics
        self._waiting: queue.SimpleQueue[FinishedAnswer | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._waiting_tokens = self._collected = self._dropped = 0
        self._paused: str | None = None
        self._retry_at = 0.0
        self._thread = threading.Thread(target=self._run, name="eyas-collector", daemon=True)
        self._thread.start()
        metrics.learn_bytes.set_function(lambda: ring.bytes)
        metrics.learn_paused.set_function(lambda: self._paused is not None)

    @property
    def status(self) -> CollectorStatus:
        with self._lock:
            return CollectorStatus(
                collected=self._collected,
                dropped=self._dropped,
                bytes=self._ring.bytes,
                max_bytes=self._ring.max_bytes,
                paused=self._paused,
            )

    def offer(self, answer: FinishedAnswer) -> None:
        """Queue an answer, or drop it if the queue is full."""
        size = _size(answer)
        with self._lock:
            fits = self._waiting_tokens + size <= MAX_WAITING_TOKENS and self._waiting.qsize() < MAX_WAITING_ANSWERS
            self._waiting_tokens += size if fits else 0
        if fits:
            self._waiting.put(answer)
        else:
            self._drop()

    def close(self) -> None:
        """Write the waiting answers and stop. The caller closes the folder."""
        self._waiting.put(None)
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            logger.warning(f"answers to learn from were not all written within {CLOSE_SECONDS:g} s; they are lost")

    def _run(self) -> None:
        while (answer := self._waiting.get()) is not None:
            try:
                self._keep(answer)
            except Exception as error:
                # Only the type of a bug's error: its message may hold a text.
                logger.error(f"a bug in eyas lost an answer that was to be kept ({type(error).__name__})")
                self._drop()
            finally:
                with self._lock:
                    self._waiting_tokens -= _size(answer)

    def _keep(self, answer: FinishedAnswer) -> None:
        if self._paused is not None and self._clock() < self._retry_at:
            self._drop()
            return
        line = self._recorder.line(answer)
        if line is None:
            return
        try:
            kept = self._ring.append(line)
        except (OSError, UserError) as error:
            self._pause(error)
            self._drop()
            return
        if self._paused is not None:
            logger.warning("answers to learn from are kept again")
            with self._lock:
                self._paused = None
        if not kept:
            self._drop()
            return
        self._metrics.learn_answers.labels("collected").inc()
        with self._lock:
            self._collected += 1

    def _pause(self, error: OSError | UserError) -> None:
        """Pause collecting. The folder's name goes to the log only, since every key may read /status."""
        reason = "the folder is not private; see the log"
        if isinstance(error, OSError):
            reason = error.strerror or type(error).__name__
        if reason != self._paused:
            told = error if isinstance(error, UserError) else f"{self._ring.folder}: {reason}"
            logger.warning(
                f"answers to learn from cannot be kept: {told}; serving goes on, and it is tried again every "
                f"{RETRY_SECONDS:g} s"
            )
        with self._lock:
            self._paused, self._retry_at = reason, self._clock() + RETRY_SECONDS

    def _drop(self) -> None:
        self._metrics.learn_answers.labels("dropped").inc()
        with self._lock:
            self._dropped += 1


def _size(answer: FinishedAnswer) -> int:
    return len(answer.prompt) + answer.choice.tokens
