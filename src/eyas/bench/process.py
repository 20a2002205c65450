"""Server processes that the bench starts and stops."""

import asyncio
import logging
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import IO

from eyas.bench.client import Client, ServerGoneError
from eyas.bench.provenance import without_secrets
from eyas.errors import UserError
from eyas.remote.address import Address

logger = logging.getLogger(__name__)

STOP_SECONDS = 40.0
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")


@dataclass(frozen=True, kw_only=True)
class Command:
    """Command line of a server, with its port."""

    words: tuple[str, ...]
    environment: dict[str, str]
    port: int

    @classmethod
    def of(cls, text: str) -> "Command":
        """Parse a command line; `{port}` is replaced, or `--port` added unless the command names one."""
        try:
            words = shlex.split(text)
        except ValueError as error:
            raise UserError(f"cannot read the command {text!r} ({error}); mind its quotes") from error
        environment = {}
        while words and _ASSIGNMENT.match(words[0]):
            name, _, value = words.pop(0).partition("=")
            environment[name] = value
        if not words:
            raise UserError(f"{text!r} is no command; give one such as 'eyas serve smollm2'")
        port = _named_port(words) or _free_port()
        if any("{port}" in word for word in words):
            words = [word.replace("{port}", str(port)) for word in words]
        elif _named_port(words) is None:
            words += ["--port", str(port)]
        if words[0] == "eyas":  # this installation
            words = [sys.executable, "-m", "eyas", *words[1:]]
        return cls(words=tuple(words), environment=environment, port=port)


@asynccontextmanager
async def running_server(text: str, *, api_key: str | None, seconds: float) -> AsyncIterator[Address]:
    """Run a server until the block ends."""
    command = Command.of(text)
    with tempfile.TemporaryFile() as log:
        try:
            process = subprocess.Popen(
                command.words,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **command.environment},
                start_new_session=True,  # Ctrl-C reaches the bench alone, which stops the server
            )
        except OSError as error:
            raise UserError(f"cannot start {command.words[0]!r}: {error.strerror}; check the command") from error
        try:
            address = Address(url=f"http://127.0.0.1:{command.port}", api_key=api_key)
            began = time.monotonic()
            await _until_ready(process, address, text, log, seconds)
            logger.info("started   %s in %.0f s", without_secrets(text), time.monotonic() - began)
            yield address
        finally:
            _stop(process)


async def _until_ready(
    process: "subprocess.Popen[bytes]", address: Address, text: str, log: IO[bytes], seconds: float
) -> None:
    deadline = time.monotonic() + seconds
    async with Client(address, timeout=5) as client:
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise UserError(f"{text!r} ended with code {process.returncode} before it served: {_log_tail(log)}")
            with suppress(ServerGoneError):
                status, _ = await client.get("/health")
                if status == 200:
                    return
            await asyncio.sleep(0.2)
    raise UserError(f"{text!r} did not serve within {seconds:g} s: {_log_tail(log)}; give --start-seconds more")


def _stop(process: "subprocess.Popen[bytes]") -> None:
    """Terminate the server; kill it and its child processes if it does not end in time."""
    with suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_SECONDS)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _log_tail(log: IO[bytes]) -> str:
    log.seek(0)
    lines = [line.strip() for line in log.read().decode("utf-8", "replace").splitlines() if line.strip()]
    return " / ".join(lines[-3:]) or "it said nothing"


def _named_port(words: list[str]) -> int | None:
    for word, following in zip(words, [*words[1:], ""], strict=True):
        given = following if word == "--port" else word.removeprefix("--port=") if word.startswith("--port=") else ""
        if given.isdigit() and int(given) > 0:
            return int(given)
    return None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
