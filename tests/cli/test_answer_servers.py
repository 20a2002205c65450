"""Servers that answer give the file that the engine gives, whatever happens to them."""

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from chat_targets import FAMILIES, save_target

pytestmark = pytest.mark.slow

Run = Callable[..., Any]
LIMITS = ["--max-tokens", 24, "--max-thinking-tokens", 30, "--max-length", 300]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextmanager
def serving(folder: Path, port: int, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """`eyas serve` in a process of its own, ready."""
    command = [sys.executable, "-m", "eyas", "serve", str(folder), "--port", str(port), "--served-model-name", "t"]
    command += ["--dtype", "float32", "--device", "cpu", "--max-model-len", "300", *options]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            deadline = time.monotonic() + 300
            while not _ready(port):
                assert server.poll() is None, "the server ended"
                assert time.monotonic() < deadline, "the server is not ready"
                time.sleep(0.1)
            yield server
        finally:
            server.kill()


def _ready(port: int) -> bool:
    try:
        return httpx2.get(f"http://127.0.0.1:{port}/health", timeout=5).status_code == 200
    except httpx2.HTTPError:
        return False


@pytest.fixture(scope="module", name="folder")
def folder_fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(FAMILIES["qwen3"], tmp_path_factory.mktemp("served") / "t")


@pytest.fixture(scope="module", name="port")
def port_fixture(folder: Path) -> Iterator[int]:
    port = free_port()
    with serving(folder, port):
        yield port


def write_prompts(path: Path, count: int) -> Path:
    kwargs: list[dict[str, Any]] = [{}, {"enable_thinking": True}, {"enable_thinking": False}]
    asked = [["say " + "abcdefghijklmnopqrstuvwxyz"[i % 26] * (i // 26 + 1), "and more"] for i in range(count)]
    path.write_text(
        "\n".join(json.dumps({"turns": turns, "chat_template_kwargs": kwargs[i % 3]}) for i, turns in enumerate(asked))
    )
    return path


def rows(out: Path) -> dict[int, Any]:
    found = {row["id"]: row for row in map(json.loads, out.read_text(encoding="utf-8").splitlines())}
    for row in found.values():
        row.pop("target_fingerprint", None)
    return found


def test_a_servers_file_is_the_engines_greedy_and_drawn(folder: Path, port: int, tmp_path: Path, run: Run) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", 26)
    url, cut = f"http://127.0.0.1:{port}/v1", list[int]()
    for name, options in {"greedy": ["--temperature", 0], "drawn": ["--seed", 3], "stop": ["--stop", "e"]}.items():
        common = ["data", "answer", prompts, "--target", folder, *LIMITS, *options, "--json"]
        by_server = run(*common, "--out", tmp_path / f"{name}.s", "--server", url)
        assert by_server.code == 0, by_server
        by_engine = run(*common, "--out", tmp_path / f"{name}.e", "--dtype", "float32", "--device", "cpu")
        assert by_engine.code == 0, by_engine
        assert rows(tmp_path / f"{name}.s") == rows(tmp_path / f"{name}.e")
        counts, expected = json.loads(by_server.out), json.loads(by_engine.out)
        assert {**counts, "seconds": 0} == {**expected, "seconds": 0}
        assert counts["written"] > 20
        cut += [counts["cut_answer"], counts["cut_thinking"]]
    assert all(cut[2:4]), cut
    refused = run(*common, "--out", tmp_path / "stop.e", "--server", url)
    assert "stop.e was begun with dtype 'float32' and this run has None" in refused.err


def test_a_servers_prompts_are_the_engines(folder: Path, port: int, tmp_path: Path, run: Run) -> None:
    common = ["data", "prompts", 20, "--target", folder, "--max-tokens", 12, "--json"]
    by_server = run(*common, "--out", tmp_path / "s", "--server", f"http://127.0.0.1:{port}")
    assert by_server.code == 0, by_server
    by_engine = run(*common, "--out", tmp_path / "e", "--dtype", "float32", "--device", "cpu")
    assert by_engine.code == 0, by_engine
    assert rows(tmp_path / "s") == rows(tmp_path / "e")
    assert len(rows(tmp_path / "s")) > 3


@pytest.mark.slow
def test_a_server_that_is_killed_and_started_again_costs_time_and_nothing_else(
    folder: Path, tmp_path: Path, run: Run
) -> None:
    prompts, out, other = write_prompts(tmp_path / "p.jsonl", 60), tmp_path / "killed", tmp_path / "whole"
    common = ["data", "answer", prompts, "--target", folder, *LIMITS, "--json"]
    assert run(*common, "--out", other, "--dtype", "float32", "--device", "cpu").code == 0
    port, written = free_port(), list[int]()
    ready, done = threading.Event(), threading.Event()

    def live_twice() -> None:
        with serving(folder, port, "--max-num-seqs", "1"):
            ready.set()
            _wait_for_lines(out, 2)
        written.append(len(out.read_text().splitlines()))
        with serving(folder, port):
            done.wait(300)

    life = threading.Thread(target=live_twice)
    life.start()
    assert ready.wait(300)
    outcome = run(*common, "--out", out, "--server", f"http://127.0.0.1:{port}", "--slots", 20)
    done.set()
    life.join()
    assert outcome.code == 0, outcome
    assert 2 <= written[0] < len(rows(other))
    assert f"http://127.0.0.1:{port} is away" in outcome.err
    assert f"http://127.0.0.1:{port} is there again" in outcome.err
    assert json.loads(outcome.out)["failed"] == 0
    assert rows(out) == rows(other)


@pytest.mark.slow
def test_ctrl_c_keeps_what_is_done_and_the_same_command_goes_on(
    folder: Path, port: int, tmp_path: Path, run: Run
) -> None:
    prompts, out, other = write_prompts(tmp_path / "p.jsonl", 60), tmp_path / "broken", tmp_path / "whole"
    url = f"http://127.0.0.1:{port}"
    common = ["data", "answer", str(prompts), "--target", str(folder), *map(str, LIMITS), "--server", url]
    assert run(*common, "--out", other).code == 0
    command = [sys.executable, "-m", "eyas", *common, "--out", str(out), "--slots", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as answering:
        _wait_for_lines(out, 2)
        answering.send_signal(signal.SIGINT)
        _, told = answering.communicate(timeout=300)
    assert answering.returncode == 130, told
    written = rows(out)
    assert f"{len(written)} of 60 conversations are in {out}; the same command goes on" in told
    assert 2 <= len(written) < len(rows(other))
    outcome = run(*common, "--out", out, "--json")
    assert outcome.code == 0, outcome
    assert json.loads(outcome.out)["earlier"] == len(written)
    assert rows(out) == rows(other)


def _wait_for_lines(out: Path, count: int) -> None:
    deadline = time.monotonic() + 300
    while not out.exists() or len(out.read_bytes().splitlines()) < count:
        assert time.monotonic() < deadline, "nothing is written"
        time.sleep(0.01)


def test_what_servers_cannot_do_is_refused(folder: Path, port: int, tmp_path: Path, run: Run) -> None:
    prompts, url = write_prompts(tmp_path / "p.jsonl", 2), f"http://127.0.0.1:{port}"
    common = ["data", "answer", prompts, "--out", tmp_path / "out", "--target", folder]
    run(*common, "--server", "nowhere").assert_refused("'nowhere' is no address of a server")
    run(*common, "--server", f"http://127.0.0.1:{free_port()}").assert_refused("no server answers", "no connection")
    run(*common, "--server", url, "--server", url).assert_refused("2 servers are given, 1 of them distinct")
    run(*common, "--server", url, "--model", "other").assert_refused("does not serve 'other'", "--model t")
    run(*common, "--server", url, "--dtype", "float32").assert_refused("--dtype float32", "leave it out")
    run(*common, "--server", url, "--drafter", "none").assert_refused("--drafter none", "leave it out")
    outcome = run(*common, "--server", url, "--max-length", 400)
    assert outcome.code == 2
    assert "--max-length 400 is above the 300 tokens that" in outcome.err
    outcome = run("data", "answer", prompts, "--out", tmp_path / "out", "--server", url)
    assert outcome.code == 2
    assert "'t'" in outcome.err  # what the server calls its model is no target here
    assert not (tmp_path / "out").exists()
