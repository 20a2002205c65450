"""The process of vLLM: it is waited for, watched, started again, and never outlives eyas."""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
import sys
import textwrap
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from eyas.errors import UserError
from eyas.serve.vllm import process as process_module
from eyas.serve.vllm import supervisor as supervisor_module
from eyas.serve.vllm.process import VLLMProcess, require_started
from eyas.serve.vllm.supervisor import VLLMSupervisor
from eyas.serve.vllm.version import require_version

if TYPE_CHECKING:
    from collections.abc import Callable

STAND_IN = '''
"""Listens as vLLM does, with a child that would outlive it; /health?code=N ends it, FAIL ends it at once."""
import http.server, os, subprocess, sys, urllib.parse

print("INFO reading weights", flush=True)
if os.environ.get("FAIL"):
    print("(EngineCore) ERROR 11-17 [core.py:1] RuntimeError: no room for it", flush=True)
    print("(APIServer) ERROR 11-17 [api.py:1] RuntimeError: the engine failed, see above", flush=True)
    sys.exit(3)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
with open(os.environ["CHILDREN"], "a") as file:
    print(child.pid, file=file)


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        code = urllib.parse.parse_qs(urllib.parse.urlparse(self.path).query).get("code")
        if code:
            print("(EngineCore) ERROR 11-17 [core.py:1] ValueError: told to end", flush=True)
            os._exit(int(code[0]))
        self.send_response(int(os.environ.get("HEALTH", "200")))
        self.end_headers()

    def log_message(self, *_):
        pass


http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
'''


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], VLLMProcess]:
    """Starts something that is called vllm and listens."""
    package = tmp_path / "site" / "vllm" / "entrypoints" / "cli"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").touch()
    (package / "main.py").write_text(STAND_IN)
    name_version(tmp_path / "site", "0.32.1")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    monkeypatch.setenv("CHILDREN", str(tmp_path / "children"))
    monkeypatch.setattr(process_module, "STOP_SECONDS", 5.0)
    return lambda: VLLMProcess(sys.executable, lambda port: ["vllm", "serve", "--port", str(port)], tmp_path / "log")


def name_version(site: Path, version: str) -> None:
    for old in site.glob("vllm-*.dist-info"):
        (old / "METADATA").unlink()
        old.rmdir()
    folder = site / f"vllm-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def until(condition: Callable[[], Any], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.05)


def children(tmp_path: Path) -> list[int]:
    return [int(line) for line in (tmp_path / "children").read_text().split()]


def test_it_ends_with_all_that_it_started(stand_in: Any, tmp_path: Path) -> None:
    process = stand_in()
    require_started(process, 60, lambda line: None)
    assert all(map(alive, [process.pid, *children(tmp_path)]))
    process.stop()
    until(lambda: not any(map(alive, [process.pid, *children(tmp_path)])))


def test_a_start_that_fails_shows_the_first_error_and_the_log(stand_in: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAIL", "1")
    process, shown = stand_in(), list[str]()
    with pytest.raises(UserError, match="ended with code 3 before it served: RuntimeError: no room for it") as error:
        require_started(process, 60, shown.append)
    assert str(process.log) in str(error.value)
    assert any("reading weights" in line for line in shown)
    process.stop()


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (
            "pydantic_core.ValidationError: 1 validation error\n  Value error, --x needs y [type=x]\nFor further",
            "Value error, --x needs y [type=x]",
        ),
        (
            "(APIServer pid=1) usage: vllm\n(APIServer pid=1) vllm serve: error: no option --x",
            "vllm serve: error:",
        ),
        ("reading\nOSError: no file", "OSError: no file"),
        ("killed", "killed"),
        ("", "it said nothing"),
    ],
    ids=["an option's value", "an option", "an exception", "anything", "nothing"],
)
def test_the_reason_is_the_line_that_tells_it(stand_in: Any, said: str, reason: str) -> None:
    process = stand_in()
    process.stop()
    process.log.write_text(said)
    assert process.reason().startswith(reason)


def test_one_that_ends_is_started_again_and_what_it_started_is_gone(stand_in: Any, tmp_path: Path) -> None:
    first = stand_in()
    require_started(first, 60, lambda line: None)
    ends: list[int] = []
    supervisor = VLLMSupervisor(first, stand_in, start_seconds=60, on_end=lambda: ends.append(1), look_seconds=0.05)
    try:
        with pytest.raises(http.client.RemoteDisconnected):
            urllib.request.urlopen(f"{first.url}/health?code=7", timeout=10)
        until(lambda: supervisor.restarts == 1)
        assert supervisor.unavailable is None
        assert supervisor.process is not first
        assert ends == [1]
        assert "code 7: ValueError: told to end" in supervisor.notices[0][1]
        orphan, child = children(tmp_path)
        assert not alive(orphan)
        assert alive(child)
    finally:
        supervisor.close()
    until(lambda: not alive(child))


def test_one_whose_engine_is_dead_is_started_again(stand_in: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "HEALTH_SECONDS", 0.1)
    first = stand_in()
    require_started(first, 60, lambda line: None)
    first.health = lambda: 503
    supervisor = VLLMSupervisor(first, stand_in, start_seconds=60, look_seconds=0.05)
    until(lambda: supervisor.restarts == 1)
    supervisor.close()


def test_one_that_keeps_failing_is_given_up(stand_in: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first = stand_in()
    require_started(first, 60, lambda line: None)
    monkeypatch.setenv("FAIL", "1")
    supervisor = VLLMSupervisor(first, stand_in, start_seconds=60, look_seconds=0.05)
    os.kill(first.pid, signal.SIGKILL)
    until(lambda: supervisor.failure is not None)
    assert "3 times in a row" in str(supervisor.failure)
    supervisor.close()


def test_it_does_not_outlive_an_eyas_that_is_killed(stand_in: Any, tmp_path: Path) -> None:
    code = """
        import sys, time
        from pathlib import Path
        from eyas.serve.vllm.process import VLLMProcess, require_started
        words = lambda port: ["vllm", "serve", "--port", str(port)]
        process = VLLMProcess(sys.executable, words, Path(sys.argv[1]))
        require_started(process, 60, lambda line: None)
        print(process.pid, flush=True)
        time.sleep(600)
    """
    source = str(Path(process_module.__file__).parents[3])
    eyas = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "log")],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{os.environ['PYTHONPATH']}:{source}"},
    )
    assert eyas.stdout is not None
    pid = int(eyas.stdout.readline())
    started = [pid, *children(tmp_path)]
    assert all(map(alive, started))
    eyas.kill()
    eyas.wait()
    until(lambda: not any(map(alive, started)))


def test_another_version_is_refused_by_name(stand_in: Any, tmp_path: Path) -> None:
    assert require_version(sys.executable) == (sys.executable, "0.32.1")
    name_version(tmp_path / "site", "0.33.0")
    with pytest.raises(UserError, match=r"has vLLM 0\.33\.0, and eyas speaks with 0\.32"):
        require_version(sys.executable)
    with pytest.raises(UserError, match="needs --vllm-python"):
        require_version(None)
    with pytest.raises(UserError, match="cannot be run"):
        require_version(str(tmp_path / "nothing"))
