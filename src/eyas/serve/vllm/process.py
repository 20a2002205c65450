"""One process of vLLM: started, waited for, ended with all that it started. What it says goes to a file.

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
"""For vLLM to end by itself."""
REPORT_SECONDS = 10.0
SHOWN_LINES = 12
MOST_READ = 2**20
"""Bytes of the log, from its end."""
ERRORS = (r"\bERROR\b.*(Error|Exception)\b.*: ", r"\bValue error, ", r"(?:^|[ .])\w*(?:Error|error): ")
"""Lines that tell why vLLM ended: of its log, of options that it does not take, of anything else; the first kind counts
most."""
ENVIRONMENT = {"VLLM_NO_USAGE_STATS": "1", "PYTHONUNBUFFERED": "1"}

_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""A proxy of the environment is for other machines."""


class VLLMEndedError(RuntimeError):
    """vLLM ended by itself."""


class VLLMProcess:
    """A running `vllm serve`."""

    def __init__(self, python: str, words: Callable[[int], Sequence[str]], log: Path) -> None:
        """`words` are those of the `vllm serve` line, given its port."""
        port = _free_port()
        self.url, self.key, self.log = f"http://127.0.0.1:{port}", secrets.token_urlsafe(24), log
        self._stopped = False
        program, *arguments = words(port)
        assert program == "vllm"
        with log.open("ab") as output:  # behind what one before it said, which may be why it ended
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
        """Also its session."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def wait_ready(self, seconds: float, report: Callable[[str], None], stopped: Callable[[], bool]) -> None:
        """Wait until it serves; `stopped` says that nobody wants it any more."""
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
        """Whether it says so."""
        return self.health(seconds) == 200

    def health(self, seconds: float = 5.0) -> int | None:
        """The status of its /health; None where it does not answer."""
        try:
            with _DIRECT.open(f"{self.url}/health", timeout=seconds) as reply:
                return int(reply.status)
        except urllib.error.HTTPError as error:
            return error.code
        except (OSError, TimeoutError):
            return None

    def stop(self) -> None:
        """End it and all that it started; once is enough."""
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
        """The first error that it logged: those behind it are of processes that miss the one that failed."""
        lines = self._lines()
        found = (line for kind in ERRORS for line in lines if re.search(kind, line))
        line = next(found, lines[-1] if lines else "it said nothing")
        return re.sub(r"^(.*?\bERROR\b.*?\]|\([^)]*\)) ", "", line)[:400]

    def last_line(self) -> str:
        """The newest line of its log."""
        return (self._lines() or ["it said nothing"])[-1]

    def tail(self) -> list[str]:
        """The end of its log."""
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
    """Wait for the first start; a failure is the user's to see, with the end of the log."""
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
