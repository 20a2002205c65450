"""`make attack` in a few seconds: a sound server passes it, and one that is hurt does not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from serve.test_sockets import running

pytestmark = pytest.mark.slow

ATTACK = Path(__file__).parents[2] / "benchmarks" / "attack.py"


def attack(url: str, out: Path, only: str) -> tuple[int, dict[str, Any], str]:
    """Its exit code, its record and what it printed."""
    words = [sys.executable, str(ATTACK), "--url", url, "--out", str(out), "--only", only]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert out.exists(), done.stderr
    return done.returncode, json.loads(out.read_text()), done.stdout


def test_a_correct_server_passes(new_server: Any, tmp_path: Path) -> None:
    with new_server() as client, running(client) as server:
        code, record, printed = attack(server.url, tmp_path / "attack.json", "length")
        assert (code, set(record["bars"].values())) == (0, {True}), printed
        assert len(record["attacks"]) == 4
        assert record["health_seconds"]["probes"] > 0
        client.all_back()


def test_a_server_that_answers_with_a_bug_does_not_pass(new_server: Any, tmp_path: Path) -> None:
    with new_server() as client, running(client) as server:
        asked = client.application.context.model_info.require

        def require(name: str) -> None:
            if len(name) > 1000:
                raise ZeroDivisionError
            asked(name)

        client.application.context.model_info.require = require
        code, record, printed = attack(server.url, tmp_path / "attack.json", "a name of a megabyte")
        assert code == 1
        assert [bar for bar, holds in record["bars"].items() if not holds] == ["answers"], printed
        assert "status 500" in printed
