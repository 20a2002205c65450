"""The gate before the server's own compiler: it admits only grammars that the grammar worker has compiled.

A matcher cannot cross processes, so the server compiles an admitted grammar again, at the cost that the worker has
bounded. A grammar beyond the bounds ends a fork of the worker and nothing else.
"""

import json
import logging
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import count
from typing import Any

from eyas.freed_memory import give_back
from eyas.grammar.compile import GrammarKind, TokenizerData
from eyas.serve.grammar.worker import Outcome

logger = logging.getLogger(__name__)
END_SECONDS = 2.0
"""The time for the worker to end its forks."""


@dataclass(frozen=True, kw_only=True)
class GrammarVerdict:
    """The worker's result for a grammar."""

    outcome: Outcome
    reason: str = ""
    """The reason why it is invalid, if it is."""
    taken: int = 0
    """Memory of the compiled grammar, in bytes."""


class GrammarGate:
    """A worker process, started at first use or by `start`, and again after it was lost."""

    def __init__(self, tokenizer: Callable[[], TokenizerData]) -> None:
        self._tokenizer = tokenizer
        self._writer = ThreadPoolExecutor(1, "eyas-grammar-gate")
        """Writes to the worker: its pipe may be full, and the event loop must not wait."""
        self._lock = threading.Lock()
        self._ids = count()
        self._pending: dict[int, Future[GrammarVerdict]] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._close: weakref.finalize[Any, Any] | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the worker, so that the first grammar does not wait for it."""
        self._writer.submit(self._write, None)

    def check(self, client: str, kind: GrammarKind, text: str) -> Future[GrammarVerdict]:
        """Let the worker try a grammar. Clients take turns, so that none of them blocks the others."""
        verdict: Future[GrammarVerdict] = Future()
        job = {"id": next(self._ids), "client": client, "kind": kind, "text": text}
        with self._lock:
            self._pending[job["id"]] = verdict  # type: ignore[index]
        self._writer.submit(self._write, job)
        return verdict

    def close(self) -> None:
        """End the worker. Grammars that it is trying get the outcome busy."""
        if self._close is not None:
            self._close()

    def _write(self, job: dict[str, object] | None) -> None:
        try:
            if self._process is None or self._process.poll() is not None:
                self._spawn()
            if job is not None:
                self._send(job)
        except Exception:
            logger.exception("the grammar worker cannot be reached; grammars are refused until it can")
            if job is not None:
                self._settle(job["id"], GrammarVerdict(outcome="busy"))  # type: ignore[arg-type]

    def _spawn(self) -> None:
        # A fresh interpreter, never a fork of this process: it has threads, and perhaps a GPU.
        command = f"import sys; sys.path[:] = {sys.path!r}; from eyas.serve.grammar.worker import main; main()"
        self._process = process = subprocess.Popen(
            [sys.executable, "-c", command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # a fork that dies prints a trace that nobody needs
            start_new_session=True,  # Ctrl-C is for the server; the worker ends with its input
        )
        if self._close is not None:
            self._close.detach()
        self._close = weakref.finalize(self, _end, process)
        threading.Thread(
            target=_read, args=(weakref.WeakMethod(self._settle), process), name="eyas-grammar-verdicts", daemon=True
        ).start()
        self._send(asdict(self._tokenizer()))
        give_back()  # a copy of the tokenizer, and its text

    def _send(self, message: dict[str, object]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\n")
        self._process.stdin.flush()

    def _settle(self, id_: int | None, verdict: GrammarVerdict) -> None:
        """Give a verdict to the future that waits for it; without an id to all."""
        with self._lock:
            if id_ is None:
                settled, self._pending = list(self._pending.values()), {}
            else:
                settled = [self._pending.pop(id_)] if id_ in self._pending else []
        for future in settled:
            if future.set_running_or_notify_cancel():
                future.set_result(verdict)


def _read(
    settle: "weakref.WeakMethod[Callable[[int | None, GrammarVerdict], None]]", process: subprocess.Popen[bytes]
) -> None:
    """Pass on verdicts until the worker ends. The weak reference lets the gate be collected, which ends the worker."""
    assert process.stdout is not None
    for line in process.stdout:
        told = json.loads(line)
        if (method := settle()) is not None:
            method(told.pop("id"), GrammarVerdict(**told))
        del method
    process.wait()
    if (method := settle()) is not None:
        method(None, GrammarVerdict(outcome="busy"))


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
