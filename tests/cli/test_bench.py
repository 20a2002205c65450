"""`eyas bench` as a user meets it: what it refuses, what it leaves behind, servers it starts, and two runs compared."""

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from each import each
from eyas.bench.report import render_report
from fake_openai import Behaviour, Fake
from reports.hostile import hostile
from reports.pages import assert_sound

Run = Callable[..., Any]
FAST = ["--users", "2", "--repetitions", "2", "--max-tokens", "8"]
SERVER = f"{sys.executable} {Path(__file__).parent.parent / 'fake_openai.py'}"


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    rows = [{"category": "ab"[i % 2], "turns": [f"Question {i}"]} for i in range(6)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "prompts.jsonl"


@each(
    ("arguments", "parts"),
    [
        ([], ["--workload", "--synthetic"]),
        (["--synthetic", "512"], ["'512'", "512:128"]),
        (["--workload", "missing.jsonl"], ["missing.jsonl", "check the path"]),
        (["--synthetic", "8:8", "--users", "1,x"], ["--users", "'x'"]),
        (["--synthetic", "8:8", "--users", "0"], ["0 users"]),
        (["--synthetic", "8:8", "--rate", "-1"], ["-1"]),
        (["--synthetic", "8:8", "--endpoint", "talk"], ["talk", "completions"]),
        (["--synthetic", "8:8", "--extra-body", "{"], ["--extra-body", "no JSON"]),
        (["--synthetic", "8:8", "--extra-body", '{"stream": false}'], ["'stream'", "bench's own"]),
        (["--synthetic", "8:8", "--url", "http://127.0.0.1:9"], ["no server at http://127.0.0.1:9", "start it"]),
        (["--synthetic", "8:8", "--url", "a=http://x", "--url", "a=http://y"], ["'a'", "name them apart"]),
        (
            ["--synthetic", "8:8", "--url", "a=http://x", "--url", "b=http://y", "--baseline-url", "http://z"],
            ["of which server", "a, b="],
        ),
        (["--synthetic", "8:8", "--serve", "no-such-program"], ["no-such-program", "check the command"]),
        (["--synthetic", "8:8", "--serve", "eyas 'serve"], ["quotes"]),
        (["--synthetic", "8:8", "--serve", f"{sys.executable} -c 'print(\"boo\")'"], ["code 0", "boo"]),
        (["compare", "missing.json", "other.json"], ["missing.json"]),
    ],
)
def test_what_cannot_be_measured_is_refused(run: Run, arguments: list[str], parts: list[str]) -> None:
    run("bench", *arguments).assert_refused(*parts)


def test_the_wrong_model_is_refused_with_the_right_one(run: Run) -> None:
    with Fake() as fake:
        run("bench", "--synthetic", "8:8", "--url", fake.url, "--model", "x").assert_refused("'x'", "--model m")


def test_a_run_leaves_a_table_a_page_and_a_record_that_compare(run: Run, prompts: Path, tmp_path: Path) -> None:
    with Fake(Behaviour(kind="eyas", drafts=True)) as fake:
        words = ["bench", "--url", f"ours={fake.url}", "--workload", prompts, *FAST, "--api-key", "sesame"]
        first = run(*words, "--out", tmp_path / "one")
        second = run(*words, "--out", tmp_path / "two", "--json")
    assert first.code == second.code == 0, first.err
    for part in ("ours, speculative, 2 users", "ours, plain, 2 users", "0.70 0.50", "12 of 12", "the client used"):
        assert part in first.out
    record = json.loads((tmp_path / "one" / "bench.json").read_text())
    assert record["schema"] == "eyas.bench/1"
    assert record["whole"] is True
    assert json.loads(second.out)["workload"] == record["workload"]
    assert [(row["mode"], row["users"]) for row in record["rows"]] == [("speculative", 2), ("plain", 2)]
    assert record["command"].startswith("eyas bench --url ours=")
    assert "--api-key ***" in record["command"]
    page = (tmp_path / "one" / "bench.html").read_text()
    assert page.startswith("<!doctype html>")
    assert page.count("<svg") >= 6
    assert_sound(page)
    assert "Drafting seems to give" in page
    assert "too few repetitions to know the spread; at least 3" in page
    assert "sesame" not in page + json.dumps(record)
    assert_sound(render_report(hostile(record)))
    compared = run("bench", "compare", tmp_path / "one" / "bench.json", tmp_path / "two" / "bench.json")
    assert compared.code == 0
    assert "12 of 12 answers have the same text" in compared.out
    assert "mind" not in compared.out
    found = json.loads(run("bench", "compare", *[tmp_path / "one" / "bench.json"] * 2, "--json").out)
    assert [row["tokens_per_second"]["ratio"] for row in found["rows"]] == [1.0, 1.0]


def test_a_server_that_dies_leaves_what_was_measured(run: Run, prompts: Path, tmp_path: Path) -> None:
    words = ["--workload", prompts, *FAST, "--no-prefill", "--warmup", "0", "--out", tmp_path / "out"]
    with Fake(Behaviour(dies_after=9)) as fake:
        outcome = run("bench", "--url", f"s={fake.url}", *words)
    assert outcome.code == 2
    assert "died at 2 users in repetition 2" in outcome.err
    assert f"until then is in {tmp_path / 'out'}" in outcome.err.splitlines()[-1]
    record = json.loads((tmp_path / "out" / "bench.json").read_text())
    assert (record["whole"], record["rows"][0]["repetitions"]) == (False, 1)
    assert "Not whole" in (tmp_path / "out" / "bench.html").read_text()


def test_half_a_file_is_measured_and_the_rest_told(run: Run, prompts: Path, tmp_path: Path) -> None:
    prompts.write_text(prompts.read_text() + '{"turns": ["cut')
    with Fake() as fake:
        outcome = run("bench", "--url", fake.url, "--workload", prompts, *FAST, "--out", tmp_path / "out")
    assert outcome.code == 0
    assert "1 of 7 records left out" in outcome.out
    assert "prompts.jsonl:7" in outcome.out


def test_a_server_is_started_and_stopped(run: Run, prompts: Path, tmp_path: Path) -> None:
    outcome = run(
        "bench",
        "--serve",
        f"mine=SOME_API_KEY=sesame {SERVER}",
        "--workload",
        prompts,
        *FAST,
        "--out",
        tmp_path / "out",
    )
    assert outcome.code == 0, outcome.err
    (server,) = json.loads((tmp_path / "out" / "bench.json").read_text())["servers"]
    assert (server["name"], server["command"]) == ("mine", f"SOME_API_KEY=*** {SERVER}")
    run("bench", "--url", server["url"], "--workload", prompts, *FAST).assert_refused("no server at")


@pytest.mark.slow
@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_keeps_what_was_measured_and_stops_the_server(
    prompts: Path, tmp_path: Path, kind: signal.Signals
) -> None:
    words = ["--serve", f"PAUSE=0.05 {SERVER}", "--workload", str(prompts), "--repetitions", "50", "--users", "2"]
    words += ["--out", str(tmp_path / "out"), "--warmup", "0", "--no-prefill"]
    process = subprocess.Popen(
        [sys.executable, "-m", "eyas", "bench", *words],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(kind, signal.SIG_DFL),  # a shell's background jobs are born deaf to Ctrl-C
    )
    try:
        deadline = time.monotonic() + 30
        while not (tmp_path / "out" / "bench.json").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(kind)
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 130, err
    assert "interrupted; this is what was measured until then" in err
    record = json.loads((tmp_path / "out" / "bench.json").read_text())
    assert record["stopped"] == "interrupted"
    assert record["rows"][0]["requests"] >= 6
    assert "as served, 2 users" in out
    port = int(record["servers"][0]["url"].rpartition(":")[2])
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0  # nobody listens any more


def test_no_model_code_is_loaded_for_a_bench() -> None:
    rooms = ("experiment", "record", "report", "compare", "process", "workload")
    check = (
        "import sys; " + "; ".join(f"import eyas.bench.{room}" for room in rooms) + "; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", check], check=True, capture_output=True, text=True)
    assert done.stdout == "False\n"
