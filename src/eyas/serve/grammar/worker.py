"""The grammar worker: a small process that tries untrusted grammars before the server compiles them.

It imports no torch, reads the tokenizer once and then forks for each grammar: the fork compiles it and computes the
first token mask under limits of memory and processor time, reports the outcome and ends, so its memory is always
returned. Forking is safe here and only here: this process has one thread and nothing but the tokenizer.

Lines of JSON come in on standard input (the tokenizer first, then jobs) and go out on standard output (verdicts). The
worker ends when its input ends, so it cannot outlive its server.

Fairness: each client has a queue, and clients take turns. A few grammars run at once; one that takes longer than most
makes room for the next, as long as there are not too many slow ones.
"""

import json
import os
import resource
import selectors
import signal
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn

from eyas.errors import UserError
from eyas.freed_memory import give_back
from eyas.grammar.compile import GrammarKind, TokenizerData, compile_matcher
from eyas.serve.grammar.bounds import check_bounds

Outcome = Literal["ok", "invalid", "time", "memory", "crash", "busy"]
JOB_BYTES = 192 * 2**20
"""Address space for a grammar beside the tokenizer."""
JOB_CPU_SECONDS = 2.0
JOB_SECONDS = 15.0
"""Wall time: a grammar that did not get its processor time by then may be sent again."""
QUICK_JOBS = 2
QUICK_CPU_SECONDS = 0.3
"""Processor time after which a job counts as slow: a quick one on a busy machine is still quick."""
SLOW_JOBS = 2
WAIT_SECONDS = 10.0
MAX_WAITING = 128
MAX_WAITING_OF_CLIENT = 32
VIRTUAL, RESIDENT = 0, 1
"""Columns of /proc/self/statm."""
NICENESS = 5
"""Compiling must not slow the engine."""


@dataclass(kw_only=True)
class Job:
    """A grammar to try."""

    id: int
    client: str
    kind: GrammarKind
    text: str
    came: float = field(default_factory=time.monotonic)
    started: float = 0.0
    pid: int = 0
    pipe: int = -1
    """The pipe to which its process writes the verdict."""
    slow: bool = False


class GrammarWorker:
    """Runs the jobs of one server."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._waiting: dict[str, deque[Job]] = {}
        """Jobs by client, in the order of their turns."""
        self._running: dict[int, Job] = {}
        """Jobs by pipe."""
        self._selector = selectors.DefaultSelector()
        self._selector.register(sys.stdin.fileno(), selectors.EVENT_READ)

    def run(self, unread: bytes) -> None:
        signal.signal(signal.SIGTERM, lambda *_: self._end())
        while True:
            *lines, unread = unread.split(b"\n")
            for line in lines:
                self._enqueue(Job(**json.loads(line)))
            self._start_jobs()
            for key, _ in self._selector.select(timeout=0.05 if self._running or self._waiting else None):
                if key.fd in self._running:
                    self._finish(self._running[key.fd])
                elif chunk := os.read(key.fd, 2**16):
                    unread += chunk
                else:
                    self._end()
            self._check_clock()

    def _enqueue(self, job: Job) -> None:
        line = self._waiting.setdefault(job.client, deque())
        if len(line) >= MAX_WAITING_OF_CLIENT or sum(map(len, self._waiting.values())) >= MAX_WAITING:
            _tell(job, "busy")
        else:
            line.append(job)

    def _start_jobs(self) -> None:
        while self._waiting and sum(not job.slow for job in self._running.values()) < QUICK_JOBS:
            client, line = next(iter(self._waiting.items()))
            del self._waiting[client]
            if line:
                self._start(line.popleft())
            if line:
                self._waiting[client] = line  # behind all others

    def _start(self, job: Job) -> None:
        job.started = time.monotonic()
        job.pipe, written = os.pipe()
        job.pid = os.fork()
        if job.pid == 0:
            _try_grammar(self._tokenizer, job, written)
        os.close(written)
        self._running[job.pipe] = job
        self._selector.register(job.pipe, selectors.EVENT_READ)

    def _finish(self, job: Job, outcome: Outcome | None = None) -> None:
        """Report the outcome of a job: the verdict of its process, or the signal that ended it."""
        self._selector.unregister(job.pipe)
        del self._running[job.pipe]
        if outcome is not None:
            os.kill(job.pid, signal.SIGKILL)
        with os.fdopen(job.pipe, "rb") as pipe:
            written = pipe.read()
        _, status = os.waitpid(job.pid, 0)
        died_of = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        if outcome is not None:
            _tell(job, outcome)
        elif written and not died_of:
            verdict = json.loads(written)
            _tell(job, **verdict)
        elif died_of == signal.SIGPROF:
            _tell(job, "time")
        elif died_of in (signal.SIGABRT, signal.SIGKILL):  # an allocation failed in llguidance, or the system ended it
            _tell(job, "memory")
        else:
            _tell(job, "crash")

    def _check_clock(self) -> None:
        now = time.monotonic()
        for job in list(self._running.values()):
            if now - job.started > JOB_SECONDS:
                self._finish(job, "busy")
            elif not job.slow and _cpu_seconds(job) > QUICK_CPU_SECONDS:
                if sum(other.slow for other in self._running.values()) < SLOW_JOBS:
                    job.slow = True
                elif self._waiting:  # otherwise nothing needs its place
                    self._finish(job, "busy")
        for line in self._waiting.values():
            while line and now - line[0].came > WAIT_SECONDS:
                _tell(line.popleft(), "busy")
        self._waiting = {client: line for client, line in self._waiting.items() if line}

    def _end(self) -> NoReturn:
        for job in self._running.values():
            os.kill(job.pid, signal.SIGKILL)
        os._exit(0)


def _cpu_seconds(job: Job) -> float:
    """Processor time of its process so far; the time since its start on systems without /proc."""
    stat = Path(f"/proc/{job.pid}/stat")
    if not stat.exists():
        return time.monotonic() - job.started
    fields = stat.read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _tell(job: Job, outcome: Outcome, reason: str = "", taken: int = 0) -> None:
    verdict = {"id": job.id, "outcome": outcome, "reason": reason, "taken": taken}
    sys.stdout.buffer.write(json.dumps(verdict).encode() + b"\n")
    sys.stdout.buffer.flush()


def _try_grammar(tokenizer: Any, job: Job, written: int) -> NoReturn:
    """Compile a grammar in the fork, report and exit."""
    code = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.close(sys.stdin.fileno())
        os.close(sys.stdout.fileno())
        _limit_process()
        outcome: Outcome = "ok"
        reason, before, taken = "", _memory(RESIDENT), 0
        try:
            check_bounds(job.kind, job.text)
            matcher = compile_matcher(tokenizer, job.kind, job.text)
            taken = max(0, _memory(RESIDENT) - before)
            del matcher  # kept until its memory was measured
        except UserError as error:
            outcome, reason = "invalid", str(error)[:2000]
        except MemoryError:
            outcome = "memory"
        os.write(written, json.dumps({"outcome": outcome, "reason": reason, "taken": taken}).encode())
        code = 0
    finally:
        os._exit(code)  # without cleanup, which belongs to the parent


def _limit_process() -> None:
    """Limit memory and processor time of this process from here on."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if taken := _memory(VIRTUAL):
        resource.setrlimit(resource.RLIMIT_AS, (taken + JOB_BYTES, taken + JOB_BYTES))
    signal.setitimer(signal.ITIMER_PROF, JOB_CPU_SECONDS)  # its signal ends the process at any point


def _memory(column: int) -> int:
    """Memory of this process in bytes; 0 except on Linux, since limits do not work elsewhere."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[column]) * resource.getpagesize() if statm.exists() else 0


def main() -> None:
    """Read the tokenizer, then work until the input ends."""
    os.nice(NICENESS)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    unread = b""
    while b"\n" not in unread:
        chunk = os.read(sys.stdin.fileno(), 2**20)
        if not chunk:
            return
        unread += chunk
    line, _, unread = unread.partition(b"\n")
    tokenizer = TokenizerData(**json.loads(line)).read()
    del line
    give_back()
    GrammarWorker(tokenizer).run(unread)


if __name__ == "__main__":
    main()
