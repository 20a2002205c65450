"""`eyas data answer` writes what the target says, goes on where it was, and refuses to mix."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from eyas.engine.engine import Engine
from eyas.target.model import Target
from eyas.target.parts import fingerprint
from oracle.plain import generate_plainly

pytestmark = pytest.mark.default
Run = Callable[..., Any]

PROMPTS = ["What is the capital of France?", "Say hi.", "word " * 200]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": prompt, "category": "qa"}) for prompt in PROMPTS))
    return path


@pytest.mark.slow
def test_the_targets_answers_are_written_and_gone_on_with(
    file: Path, tmp_path: Path, run: Run, default_target: Target
) -> None:
    out = tmp_path / "answers.jsonl"
    arguments = ["data", "answer", file, "--out", out, "--max-tokens", 8, "--max-length", 64, "--dtype", "float32"]
    outcome = run(*arguments, "--limit", 1, "--json")
    assert outcome.code == 0, outcome
    assert json.loads(outcome.out)["written"] == 1
    outcome = run(*arguments)
    assert outcome.code == 0, outcome
    counts = dict(line.split() for line in outcome.out.splitlines())
    assert {name: counts[name] for name in ("total", "earlier", "written", "unfit")} == {
        "total": "3",
        "earlier": "1",
        "written": "1",
        "unfit": "1",
    }
    found = {row["id"]: row for row in map(json.loads, out.read_text(encoding="utf-8").splitlines())}
    assert sorted(found) == [0, 1]
    for number, row in found.items():
        asked, answered = row["messages"]
        assert (asked, row["category"]) == ({"role": "user", "content": PROMPTS[number]}, "qa")
        ids = generate_plainly(default_target, default_target.encode_chat([asked]), max_new_tokens=8)
        assert answered == {"role": "assistant", "content": default_target.decode(ids)}
        assert row["finished"] == (ids[-1] in default_target.stop_ids())
        assert row["samples"] == [{"prompt_token_ids": default_target.encode_chat([asked]), "token_ids": list(ids)}]
        assert (row["target"], row["target_fingerprint"]) == ("smollm2", fingerprint(default_target.model))
    outcome = run(*arguments, "--seed", 1)
    assert outcome.code == 2
    assert "was begun with seed 0 and this run has 1" in outcome.err


def test_what_cannot_be_done_is_refused(file: Path, tmp_path: Path, run: Run) -> None:
    out = tmp_path / "answers.jsonl"
    run("data", "answer", tmp_path / "none.jsonl", "--out", out).assert_refused("none.jsonl")
    run("data", "answer", file).assert_refused("--out")
    outcome = run("data", "answer", file, "--out", out, "--max-length", 9_999_999)
    assert outcome.code == 2
    assert "--max-length 9999999 is above the" in outcome.err
    assert not out.exists()


def test_an_interrupted_run_says_how_to_go_on(
    file: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve = Engine.serve

    def serve_one(self: Engine, *arguments: Any, **options: Any) -> Iterator[Any]:
        yield next(serve(self, *arguments, **options))
        raise KeyboardInterrupt

    monkeypatch.setattr(Engine, "serve", serve_one)
    out = tmp_path / "answers.jsonl"
    outcome = run("data", "answer", file, "--out", out, "--max-tokens", 1, "--slots", 1, "--dtype", "float32")
    assert outcome.code == 130
    assert f"1 of 3 conversations are in {out}; the same command goes on\n" in outcome.err
    assert len(out.read_text(encoding="utf-8").splitlines()) == 1


@pytest.mark.slow
def test_a_drawn_answer_does_not_depend_on_its_company_or_on_a_drafter(file: Path, tmp_path: Path, run: Run) -> None:
    found = []
    for slots, drafter in ((1, []), (2, ["--drafter", "smollm2-eagle3.1"])):
        out = tmp_path / f"by{slots}.jsonl"
        arguments = ["data", "answer", file, "--out", out, "--max-tokens", 6, "--max-length", 64, "--temperature", 1]
        outcome = run(*arguments, "--seed", 5, "--slots", slots, "--dtype", "float32", *drafter)
        assert outcome.code == 0, outcome
        rows = map(json.loads, out.read_text(encoding="utf-8").splitlines())
        found.append({row["id"]: row["messages"][-1]["content"] for row in rows})
    assert found[0] == found[1]
    assert len(found[0]) == 2


@pytest.mark.parametrize(("drafter", "drafts"), [(["--drafter", "smollm2-eagle3.1"], True), ([], False)])
def test_on_a_processor_only_a_drafter_that_is_named_drafts(
    file: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, drafter: list[str], drafts: bool
) -> None:
    engines, serve = list[Engine](), Engine.serve

    def noted(self: Engine, *arguments: Any, **options: Any) -> Any:
        engines.append(self)
        return serve(self, *arguments, **options)

    monkeypatch.setattr(Engine, "serve", noted)
    outcome = run("data", "answer", file, "--out", tmp_path / "a.jsonl", "--max-tokens", 24, "--limit", 1, *drafter)
    assert outcome.code == 0, outcome
    (engine,) = engines
    assert (engine.stats.drafted > 0) == drafts
