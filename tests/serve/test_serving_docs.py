"""The examples of docs/serving.md, Python and curl, run against a small server."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from eyas.serve.transport.server import Server, listen, url_of

PAGE = (Path(__file__).parent.parent.parent / "docs" / "serving.md").read_text(encoding="utf-8")
DOCUMENTED = "http://127.0.0.1:8000"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.S | re.M)


@pytest.fixture
def url(new_server: Any) -> Any:
    with new_server() as client:
        listener = listen("127.0.0.1", 0)
        server = Server(client.application)
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        yield url_of(listener)
        server.handle_exit(15, None)
        thread.join(30)


def test_the_python_on_the_page_runs(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = blocks("py")
    exec(compile(block.replace(DOCUMENTED, url).replace('"smollm2"', '"tiny"'), "example", "exec"), {})
    assert "acceptance_length" in capsys.readouterr().out


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl here")
def test_every_curl_on_the_page_succeeds(url: str) -> None:
    lines = [line.removeprefix("$ ") for block in blocks("console") for line in block.splitlines()]
    commands = [shlex.split(line.replace(DOCUMENTED, url)) for line in lines if line.startswith("curl")]
    assert len(commands) >= 9
    for command in commands:
        assert subprocess.run([*command, "--fail"], check=True, capture_output=True, timeout=30).stdout


def test_every_metric_on_the_page_exists(client: Any) -> None:
    client.complete(speculative={"mode": "fixed", "depth": 2}, max_tokens=24)
    told = client.get("/metrics").text
    for name in re.findall(r"eyas_[a-z_0-9]+[a-z]", PAGE):
        assert name in told, name
    for name in re.findall(r"`(_[a-z_]+)", PAGE):
        assert f"eyas_spec_decode{name}" in told, name
