"""`make soak` in a few seconds: a sound server passes it, and one that fails on the way does not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from each import each
from eyas.serve.model_info import ServerLimits
from serve.test_sockets import running

pytestmark = pytest.mark.slow

SOAK = Path(__file__).parents[2] / "benchmarks" / "soak.py"
FIRST = ("JSON", "slow reader", "hangs up at once", "hangs up in a stream", "broken JSON", "unknown field", "too long")


def soak(url: str, out: Path, **options: Any) -> tuple[int, dict[str, Any], str]:
    """Its exit code, its record and what it printed."""
    asked = {
        "url": url,
        "out": out,
        "minutes": 0.02,
        "clients": 24,
        "attackers": 0,
        "questions": 5,
        "patience": 60,
    } | options
    words = [word for name, value in asked.items() for word in (f"--{name}", str(value))]
    done = subprocess.run([sys.executable, str(SOAK), *words], capture_output=True, text=True, timeout=120, check=False)
    assert out.exists(), done.stderr
    return done.returncode, json.loads(out.read_text()), done.stdout


def test_a_correct_server_passes_the_soak(new_server: Any, tmp_path: Path) -> None:
    with new_server(limits=ServerLimits(queue=4)) as client, running(client) as server:
        code, record, printed = soak(server.url, tmp_path / "soak.json")
        assert (code, set(record["bars"].values())) == (0, {True}), printed
        assert set(record["bars"]) == {"answers", "health", "outcomes", "idle", "log", "again", "books"}
        outcomes = record["fire"]["outcomes"]
        assert {*FIRST} < set(outcomes)  # what the clients choose to begin with depends on the seed alone
        assert all(sum(told.get(name, 0) for told in outcomes.values()) for name in ("right", "left", "full"))
        client.all_back()


def test_a_server_that_fails_a_step_does_not_pass(new_server: Any, tmp_path: Path) -> None:
    with new_server() as client, running(client) as server:
        step, steps, failed = client.engine.step, 0, 0

        def fail_at_times() -> Any:
            nonlocal steps, failed
            steps += 1
            # Under fire, a reference being two at most; and more than once, since clients who leave do not hear of it.
            if len(client.engine.scheduler.running) > 2 and failed < 4 and steps % 8 == 0:
                failed += 1
                raise RuntimeError("boom")
            return step()

        client.engine.step = fail_at_times
        code, record, printed = soak(server.url, tmp_path / "soak.json")
        assert code == 1
        assert [bar for bar, holds in record["bars"].items() if not holds] == ["answers", "log"], printed
        assert "engine_failed" in printed


@each(
    ("events", "why"),
    [
        (['{"index": 0, "text": "a", "finish_reason": "stop"}', "[DONE]", "[DONE]"], "ends with"),
        (['{"index": 0, "text": "a", "finish_reason": "stop"}'], "ends with"),
        (['{"index": 0, "text": "a", "finish_reason": null}', "[DONE]"], r"\[0\] have no end"),
        (['{"index": 0, "text": "a", "finish_reason": "stop"}'] * 2 + ["[DONE]"], "goes on after its end"),
    ],
)
def test_a_stream_that_ends_twice_or_never_is_wrong(
    monkeypatch: pytest.MonkeyPatch, events: list[str], why: str
) -> None:
    monkeypatch.syspath_prepend(str(SOAK.parent))
    from soak_clients import WrongAnswerError, understood  # type: ignore[import-not-found]

    told = [event if event == "[DONE]" else f'{{"choices": [{event}]}}' for event in events]
    with pytest.raises(WrongAnswerError, match=why):
        understood([event.encode() for event in told])
