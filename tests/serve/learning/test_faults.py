"""Faults while a server learns: the attempt is dropped, the reason is reported, and serving continues."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from eyas.drafter.checkpoint import checkpoint_of, write_checkpoint
from eyas.serve.access.policy import AccessRules
from eyas.serve.learning import learner as learner_module
from eyas.serve.learning import loop as loop_module
from eyas.serve.learning.adaptation_process import NICENESS
from eyas.serve.learning.loop import BASELINE_REQUESTS
from serve.learning.loop_server import ANSWERS, LearningServer, learning_server, noisy, write
from tiny import random_drafter

pytestmark = pytest.mark.slow

if TYPE_CHECKING:
    from eyas.drafter.model import Drafter
    from eyas.target.model import Target


@pytest.fixture
def good(tiny_drafter: Drafter, tmp_path: Path) -> str:
    return write(tiny_drafter, tmp_path / "good")


@pytest.fixture
def weak(tiny_drafter: Drafter, tmp_path: Path) -> str:
    return write(noisy(tiny_drafter, 0.4), tmp_path / "weak")


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"


def wait_for_end(pid: int) -> None:
    deadline = time.monotonic() + 10
    while is_alive(pid):
        assert time.monotonic() < deadline, "it outlives who started it"
        time.sleep(0.02)


async def begin(server: LearningServer) -> int:
    """Wait until an adaptation is under way; its process."""
    await server.until(lambda status: status["state"] == "adapting" or status["last"] is not None)
    pid = server.loop._learner.pid
    assert pid is not None, server.loop.status()
    return pid


async def assert_dropped(server: LearningServer, outcome: str, *words: str) -> dict[str, Any]:
    """Why the attempt came to nothing, that the next one waits, and that all else is as it was."""
    status = await server.until(lambda status: status["last"] is not None and status["state"] != "ready")
    assert status["last"]["outcome"] == outcome, status
    for word in words:
        assert word in status["last"]["reason"], status
    assert (status["failures"], status["drafter"]["number"]) == (1, 0)
    assert status["new_answers"] >= ANSWERS, "these answers are still to be learnt from"
    assert await server.changes() == []
    assert not (server.folder / "adaptation").exists()
    assert len(await server.ask(1)) == 1
    return status


def test_a_learner_that_is_killed_costs_the_attempt_alone(
    new_server: Any, target: Target, good: str, tmp_path: Path
) -> None:
    with learning_server(new_server, target, good, tmp_path / "kept", kept=ANSWERS, interval=60.0) as server:

        async def main() -> None:
            server.plan(sleep=60)
            os.kill(await begin(server), signal.SIGKILL)
            status = await assert_dropped(server, "failed", "killed by signal 9")
            assert status["state"] == "backing_off"
            assert status["not_before_seconds"] == 120, "twice the interval behind one failure"
            server.plan()
            server.clock.now += 119
            await server.loop.tick()
            assert server.loop.status()["attempts"] == 1
            server.clock.now += 2
            status = await server.until(lambda status: status["last"]["attempt"] == 2)
            assert (status["last"]["outcome"], status["failures"]) == ("not_better", 0)

        asyncio.run(main())


def test_an_adaptation_whose_drafter_an_operator_replaces_is_told_and_is_no_failure(
    new_server: Any, target: Target, weak: str, good: str, tmp_path: Path
) -> None:
    with learning_server(new_server, target, weak, tmp_path / "kept", kept=ANSWERS) as server:
        server.client.application.context.learning_loop._swaps.slot.allowed = [good]

        async def main() -> None:
            server.plan(sleep=60)
            pid = await begin(server)
            assert (await server.client.send("POST", "/v1/drafter", json={"model": good})).status == 200
            status = await server.until(lambda status: status["last"] is not None)
            wait_for_end(pid)
            assert (status["last"]["outcome"], status["failures"]) == ("superseded", 0)
            assert status["last"]["reason"] == "the drafter was changed by a request"

        asyncio.run(main())


@pytest.mark.parametrize("code", [1, 2, 130])
def test_an_adaptation_that_fails_is_told_with_its_code_and_its_words_in_the_log_alone(
    new_server: Any, target: Target, good: str, tmp_path: Path, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    with learning_server(new_server, target, good, tmp_path / "kept", kept=ANSWERS) as server:

        async def main() -> None:
            server.plan(code=code)
            await begin(server)
            await assert_dropped(server, "failed", f"code {code}")

        asyncio.run(main())
    assert "it cannot be done" in caplog.text


def test_a_full_disk_costs_the_attempt_alone(
    new_server: Any, target: Target, weak: str, good: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for place, attribute in ((learner_module, "copy_newest"), (Path, "rename")):
        folder = tmp_path / attribute / "kept"
        with learning_server(new_server, target, weak, folder, kept=ANSWERS) as server, monkeypatch.context() as patch:

            async def main(server: LearningServer = server, place: Any = place, attribute: str = attribute) -> None:
                server.plan(made=good)
                await server.ask(BASELINE_REQUESTS)
                patch.setattr(place, attribute, full)
                await assert_dropped(server, "failed", "No space left on device")

            asyncio.run(main())


def test_a_disk_that_fills_up_behind_a_swap_keeps_no_worse_drafter_at_work(
    new_server: Any, target: Target, good: str, tiny_drafter: Drafter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = write(noisy(tiny_drafter, 1.0), tmp_path / "random")

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with learning_server(new_server, target, good, tmp_path / "kept", kept=ANSWERS) as server:

        async def main() -> None:
            server.plan(made=random)
            await server.ask(2 * BASELINE_REQUESTS)
            await server.until(lambda status: status["state"] == "watching")
            monkeypatch.setattr(Path, "write_text", full)
            while server.loop.state == "watching":
                await server.ask(8)
                await server.loop.tick()
            assert [one["kind"] for one in await server.changes()] == ["swap", "rollback"]
            assert server.story(1)["state"] == "watching", "which could not be written, so its weights are gone"
            assert not list((server.folder / "drafters" / "0001").glob("*.safetensors"))

        asyncio.run(main())


@pytest.mark.parametrize(
    ("change", "outcome", "words"),
    [
        ({"target": {"fingerprint": "0123456789abcdef"}}, "refused", ["another target", "0123456789abcdef"]),
        ({"from": {"fingerprint": "f" * 64}}, "refused", ["another drafter"]),
        ({"drafter": {"fingerprint": "f" * 64}}, "refused", ["not those of its record"]),
        ({"changes": {}}, "refused", ["beyond the interval"]),
        ({"kept": False}, "failed", ["contradict"]),
        ({"schema": "eyas.adaptation/2"}, "failed", ["record cannot be read"]),
        ({"changes": {"traffic": 3}}, "failed", ["record cannot be read"]),
    ],
)
def test_a_drafter_whose_record_does_not_fit_is_not_served_with(
    new_server: Any,
    target: Target,
    weak: str,
    good: str,
    tmp_path: Path,
    change: dict[str, Any],
    outcome: str,
    words: list[str],
) -> None:
    """A target that was swapped under the server shows by its fingerprint."""
    with learning_server(new_server, target, weak, tmp_path / "kept", kept=ANSWERS) as server:

        async def main() -> None:
            server.plan(made=good, change=change)
            await begin(server)
            await assert_dropped(server, outcome, *words)

        asyncio.run(main())


def test_a_drafter_of_another_shape_is_refused(
    new_server: Any, target: Target, weak: str, tiny_drafter: Drafter, tmp_path: Path
) -> None:
    other = random_drafter(replace(tiny_drafter.config, norm_output=False))
    write_checkpoint(checkpoint_of(other), tmp_path / "other")
    with learning_server(new_server, target, weak, tmp_path / "kept", kept=ANSWERS) as server:

        async def main() -> None:
            server.plan(made=str(tmp_path / "other"))
            await server.ask(BASELINE_REQUESTS)
            await begin(server)
            await assert_dropped(server, "refused", "cannot take the place", "norm_output")
            assert server.story(1)["state"] == "rejected"

        asyncio.run(main())


def test_answers_of_another_target_never_reach_the_learner(
    new_server: Any, target: Target, good: str, tmp_path: Path
) -> None:
    seen = tmp_path / "seen.jsonl"
    with learning_server(new_server, target, good, tmp_path / "kept", kept=ANSWERS) as server:

        async def main() -> None:
            server.plan(seen=str(seen))
            (file,) = server.folder.glob("answers-*.jsonl")
            with file.open("a") as lines:
                for _ in range(5):
                    lines.write(json.dumps({"messages": [], "target_fingerprint": "another"}) + "\nno JSON\n")
            await server.until(lambda status: status["last"] is not None)
            assert len(seen.read_text().splitlines()) == ANSWERS

        asyncio.run(main())


def test_keys_that_did_not_opt_in_never_reach_the_learner(
    new_server: Any, target: Target, good: str, tmp_path: Path
) -> None:
    seen = tmp_path / "seen.jsonl"
    keys = AccessRules(api_keys=("yes", "no"), learn_keys=("yes",))
    with learning_server(new_server, target, good, tmp_path / "kept", keys=keys) as server:

        async def main() -> None:
            server.plan(seen=str(seen))
            await server.ask(ANSWERS, key="no", prompt="secretsecret", max_tokens=4)
            await server.ask(ANSWERS, key="yes", max_tokens=4)
            deadline = time.monotonic() + 20
            while not seen.exists():
                await server.loop.tick()
                await asyncio.sleep(0.01)
                assert time.monotonic() < deadline, server.loop.status()
            while server.loop.state == "adapting":
                await server.loop.tick()

        asyncio.run(main())
    records = [json.loads(line) for line in seen.read_text().splitlines()]
    assert len(records) == ANSWERS
    assert len({record["key"] for record in records}) == 1
    assert "secret" not in seen.read_text()


def test_jumps_of_the_wall_clock_change_nothing(
    new_server: Any, target: Target, weak: str, good: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, day = time.time, 86400.0
    with learning_server(new_server, target, weak, tmp_path / "kept", interval=100.0, kept=ANSWERS) as server:

        async def main() -> None:
            status = await server.until(lambda status: status["last"] is not None)
            assert status["last"]["outcome"] == "not_better"
            monkeypatch.setattr(time, "time", lambda: real() + day)
            await server.ask(ANSWERS, max_tokens=8)
            await server.settled(ANSWERS)
            for _ in range(3):
                await server.loop.tick()
            assert server.loop.status()["attempts"] == 1, "the interval is not over, whatever the wall clock says"
            server.plan(made=good)
            server.clock.now += 101
            await server.until(lambda status: status["state"] == "watching")
            monkeypatch.setattr(time, "time", lambda: real() - day)
            while server.loop.state == "watching":
                await server.ask(8)
                await server.loop.tick()
            assert server.story(1)["state"] == "confirmed"

        asyncio.run(main())


def test_a_server_that_stops_takes_its_learner_with_it(
    new_server: Any, target: Target, good: str, tmp_path: Path
) -> None:
    with learning_server(new_server, target, good, tmp_path / "kept", kept=ANSWERS) as server:
        server.plan(sleep=60)
        pid = asyncio.run(begin(server))
        if hasattr(os, "getpriority"):
            assert os.getpriority(os.PRIO_PROCESS, pid) >= NICENESS
    wait_for_end(pid)
    assert not (tmp_path / "kept" / "adaptation").exists(), "and no copy of answers is left"


def test_a_server_that_is_killed_takes_its_learner_with_it(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path\n"
        "from eyas.serve.learning.adaptation_process import AdaptationProcess\n"
        f"learner = AdaptationProcess(['sh', '-c', 'sleep 60 & echo $!; sleep 60'], Path({str(tmp_path / 'log')!r}))\n"
        "print(learner.pid, flush=True); time.sleep(60)\n"
    )
    server = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    pid = int(server.stdout.readline())
    deadline = time.monotonic() + 10
    while not (tmp_path / "log").read_text().strip():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    child = int((tmp_path / "log").read_text())
    assert is_alive(pid)
    assert is_alive(child)
    server.kill()
    server.wait()
    server.stdout.close()
    wait_for_end(pid)
    wait_for_end(child)


def test_an_adaptation_that_hangs_is_ended(
    new_server: Any, target: Target, good: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with learning_server(new_server, target, good, tmp_path / "kept", kept=ANSWERS) as server:

        async def main() -> None:
            server.plan(sleep=60)
            pid = await begin(server)
            server.clock.now += learner_module.MOST_SECONDS + 1
            await assert_dropped(server, "failed", "hours")
            wait_for_end(pid)

        asyncio.run(main())


def test_a_bug_costs_the_attempt_alone(
    new_server: Any, target: Target, good: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_module, "TICK_SECONDS", 0.01)
    with learning_server(new_server, target, good, tmp_path / "kept", kept=ANSWERS) as server:

        async def main() -> None:
            server.plan(sleep=60)
            pid = await begin(server)

            async def broken() -> None:
                raise ZeroDivisionError

            server.loop._await_attempt = broken  # type: ignore[method-assign]
            running = asyncio.create_task(server.loop.run())
            while server.loop.status()["failures"] == 0:
                await asyncio.sleep(0.01)
            wait_for_end(pid)
            assert not running.done()
            running.cancel()
            assert len(await server.ask(1)) == 1

        asyncio.run(main())


def test_a_parent_that_is_gone_does_not_keep_a_worse_drafter_at_work(
    new_server: Any, target: Target, good: str, tiny_drafter: Drafter, tmp_path: Path
) -> None:
    random = write(noisy(tiny_drafter, 1.0), tmp_path / "random")
    with learning_server(new_server, target, good, tmp_path / "kept", kept=ANSWERS) as server:

        async def main() -> None:
            server.plan(made=random)
            await server.ask(2 * BASELINE_REQUESTS)
            await server.until(lambda status: status["state"] == "watching")
            Path(good).rename(tmp_path / "elsewhere")
            while server.loop.state == "watching":
                await server.ask(8)
                await server.loop.tick()
            assert (await server.client.send("GET", "/v1/drafter")).json["drafter"] is None, "plain decoding, then"
            assert server.loop.state == "no_drafter"
            assert len(await server.ask(1, speculative={"mode": "auto"})) == 1

        asyncio.run(main())


def test_a_drafter_is_condemned_until_it_is_gone(
    new_server: Any, target: Target, good: str, tiny_drafter: Drafter, tmp_path: Path
) -> None:
    random = write(noisy(tiny_drafter, 1.0), tmp_path / "random")
    with learning_server(new_server, target, good, tmp_path / "kept", kept=ANSWERS) as server:

        async def main() -> None:
            server.plan(made=random)
            await server.ask(BASELINE_REQUESTS)
            await server.until(lambda status: status["state"] == "watching")
            real, calls = server.loop._swaps.swap, 0

            async def failing(*arguments: Any, **options: Any) -> bool:
                nonlocal calls
                calls += 1
                if calls <= 4:  # two drafters to go back to, twice
                    raise RuntimeError("out of memory")
                return await real(*arguments, **options)

            server.loop._swaps.swap = failing  # type: ignore[method-assign]
            while calls < 2:
                await server.ask(4)
                await server.loop.tick()
            assert server.loop.state == "watching"
            await server.loop.tick()
            await server.loop.tick()
            assert (calls, server.loop.status()["drafter"]["number"]) == (5, 0)

        asyncio.run(main())


def test_a_server_whose_last_good_drafter_is_broken_serves_with_the_one_that_is_named(
    new_server: Any, target: Target, weak: str, good: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with learning_server(new_server, target, weak, tmp_path / "kept", kept=ANSWERS) as server:

        async def main() -> None:
            server.plan(made=good)
            await server.ask(BASELINE_REQUESTS)
            await server.until(lambda status: status["state"] == "watching")

        asyncio.run(main())
    (tmp_path / "kept" / "drafters" / "0001" / "model.safetensors").write_bytes(b"broken")
    with learning_server(new_server, target, weak, tmp_path / "kept") as server:
        assert server.loop.status()["drafter"] == {"number": 0}
        assert len(asyncio.run(server.ask(1))) == 1
    assert "drafter 1, learnt here before, cannot be taken up: the weights in" in caplog.text
