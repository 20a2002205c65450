"""Runs one vLLM process: starts it, waits for it, ends it and its child processes. Its output goes to a file.

It runs in a session of its own, so that Ctrl-C is for eyas, and a keeper ends that session if eyas is killed.
"""

import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from eyas.errors import UserError
from eyas.serve import keeper
from eyas.serve.keeper import end_session

STOP_SECONDS = 15.0
"""The time for vLLM to end by itself."""
REPORT_SECONDS = 10.0
SHOWN_LINES = 12
MOST_READ = 2**20
"""The bytes of the log that are read, from its end."""
ERRORS = (r"\bERROR\b.*(Error|Exception)\b.*: ", r"\bValue error, ", r"(?:^|[ .])\w*(?:Error|error): ")
"""Lines that say why vLLM ended, the best first: errors in its log, refused options, other errors."""
ENVIRONMENT = {"VLLM_NO_USAGE_STATS": "1", "PYTHONUNBUFFERED": "1"}

_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Ignores proxies of the environment, which are for other machines."""


class VLLMEndedError(RuntimeError):
    """vLLM ended by itself."""


class VLLMProcess:
    """A running `vllm serve`."""

    def __init__(self, python: str, words: Callable[[int], Sequence[str]], log: Path) -> None:
        """`words` makes the `vllm serve` command line for a port."""
        port = _free_port()
        self.url, self.key, self.log = f"http://127.0.0.1:{port}", secrets.token_urlsafe(24), log
        self._stopped = False
        program, *arguments = words(port)
        assert program == "vllm"
        with log.open("ab") as output:  # keeps the output of the previous process, which may say why it ended
            self._begin = output.tell()
            self._process = subprocess.Popen(
                [python, "-m", "vllm.entrypoints.cli.main", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **ENVIRONMENT, "VLLM_API_KEY": self.key},
                start_new_session=True,
            )
        self._keeper = subprocess.Popen(
            [sys.executable, "-S", "-E", str(keeper.__file__), str(self.pid)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """The exit code; None while it runs."""
        return self._process.poll()

    def wait_ready(self, seconds: float, report: Callable[[str], None], stopped: Callable[[], bool]) -> None:
        """Wait until it is ready, or until `stopped` is set."""
        began = last = time.monotonic()
        while not self.is_healthy():
            now = time.monotonic()
            if self.exit_code is not None:
                raise VLLMEndedError(f"vLLM ended with code {self.exit_code} before it served: {self.reason()}")
            if now - began > seconds:
                raise VLLMEndedError(f"vLLM did not serve within {seconds:g} s: {self.last_line()}")
            if stopped():
                raise VLLMEndedError("vLLM was stopped before it served")
            if now - last >= REPORT_SECONDS:
                last = now
                report(f"vllm      {now - began:.0f} s: {self.last_line()[:120]}")
            time.sleep(0.2)

    def is_healthy(self, seconds: float = 5.0) -> bool:
        return self.health(seconds) == 200

    def health(self, seconds: float = 5.0) -> int | None:
        """The status of its /health; None if it does not answer."""
        try:
            with _DIRECT.open(f"{self.url}/health", timeout=seconds) as reply:
                return int(reply.status)
        except urllib.error.HTTPError as error:
            return error.code
        except (OSError, TimeoutError):
            return None

    def stop(self) -> None:
        """End it and its child processes, if that was not done yet."""
        if self._stopped:
            return
        self._stopped = True
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_SECONDS)
        end_session(self.pid)
        self._process.wait()
        assert self._keeper.stdin is not None
        self._keeper.stdin.close()
        self._keeper.wait()

    def reason(self) -> str:
        """The first error that it logged: later ones come from processes that lost the failed one."""
        lines = self._lines()
        found = (line for kind in ERRORS for line in lines if re.search(kind, line))
        line = next(found, lines[-1] if lines else "it said nothing")
        return re.sub(r"^(.*?\bERROR\b.*?\]|\([^)]*\)) ", "", line)[:400]

    def last_line(self) -> str:
        return (self._lines() or ["it said nothing"])[-1]

    def tail(self) -> list[str]:
        return self._lines()[-SHOWN_LINES:]

    def _lines(self) -> list[str]:
        try:
            with self.log.open("rb") as log:
                log.seek(max(self._begin, self.log.stat().st_size - MOST_READ))
                text = log.read().decode("utf-8", "replace")
        except OSError:
            return []
        return [line.strip() for line in text.splitlines() if line.strip()]


def require_started(process: VLLMProcess, seconds: float, report: Callable[[str], None]) -> None:
    """Wait for the first start; a failure is shown to the user with the end of the log."""
    try:
        process.wait_ready(seconds, report, lambda: False)
    except VLLMEndedError as error:
        for line in process.tail():
            report(f"vllm      | {line}")
        raise UserError(f"{error}; all that it said is in {process.log}") from error


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
