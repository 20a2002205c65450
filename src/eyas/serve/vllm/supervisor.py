"""Watches a vLLM process on a thread, and restarts it when it ends or reports a dead engine.

Restarts are limited: after `MOST_FAILURES` in a row, each within `STEADY_SECONDS` of its start, the supervisor gives
up, and /health reports the failure.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from eyas.serve.engine_client import NOTICES
from eyas.serve.vllm.process import VLLMEndedError, VLLMProcess

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.5
HEALTH_SECONDS = 5.0
"""The interval of health checks."""
STEADY_SECONDS = 60.0
MOST_FAILURES = 3


class VLLMSupervisor:
    """Keeps one process serving. `close` ends the thread, then the process."""

    def __init__(
        self,
        process: VLLMProcess,
        start: Callable[[], VLLMProcess],
        *,
        start_seconds: float,
        on_end: Callable[[], None] = lambda: None,
        look_seconds: float = LOOK_SECONDS,
    ) -> None:
        """`process` is ready; `start` starts another. `on_end` is called after each end."""
        self.process = process
        self.restarts = 0
        self.failure: BaseException | None = None
        self.unavailable: str | None = None
        self.notices: deque[tuple[float, str]] = deque(maxlen=NOTICES)
        self._start, self._start_seconds, self._on_end, self._look = start, start_seconds, on_end, look_seconds
        self._closing = threading.Event()
        self._closed = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="eyas-vllm", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End vLLM. A second call waits for the first."""
        self._closing.set()
        self.unavailable = "the server is shutting down"
        with self._closed:
            self._thread.join()
            self.process.stop()

    def _run(self) -> None:
        try:
            self._watch()
        except Exception as error:  # it can neither be watched nor started; without this nothing would report it
            self.failure = error
            self._say(f"vLLM is given up: {type(error).__name__}: {error}")

    def _watch(self) -> None:
        failures, began = 0, time.monotonic()
        while (ended := self._wait_end()) is not None:
            steady = time.monotonic() - began > STEADY_SECONDS
            failures = 1 if steady else failures + 1
            self._on_end()
            while True:
                self.unavailable = f"{ended}; it is started again"
                self._say(f"{ended}: {self.process.reason()}; the requests that it answered are lost")
                self.process.stop()
                if failures >= MOST_FAILURES:
                    self.failure = VLLMEndedError(f"vLLM failed {failures} times in a row; its log: {self.process.log}")
                    self._say(str(self.failure))
                    return
                try:
                    self.process = self._start()
                    self.process.wait_ready(self._start_seconds, logger.info, self._closing.is_set)
                except VLLMEndedError as error:
                    if self._closing.is_set():
                        return
                    ended, failures = str(error).partition(":")[0], failures + 1
                    continue
                break
            self.restarts, began, self.unavailable = self.restarts + 1, time.monotonic(), None
            self._say("vLLM serves again")

    def _wait_end(self) -> str | None:
        """Wait for the reason of a restart; None if it was closed."""
        asked = time.monotonic()
        while not self._closing.wait(self._look):
            if (code := self.process.exit_code) is not None:
                return f"vLLM ended with code {code}"
            if time.monotonic() - asked > HEALTH_SECONDS:
                # A process that does not answer may be busy; one with status 503 is up and its engine is dead.
                if self.process.health() == 503:
                    return "vLLM's engine is dead"
                asked = time.monotonic()
        return None

    def _say(self, event: str) -> None:
        self.notices.append((time.monotonic(), event))
        logger.warning(event)
