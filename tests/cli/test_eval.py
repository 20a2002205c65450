"""`eyas eval` measures, tells, writes, and says what is wrong before it starts."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tiny
from default_drafter import default_drafter_config
from eyas.drafter.checkpoint import checkpoint_of, write_checkpoint
from eyas.evaluate.decoders import Answer, EngineDecoders

pytestmark = pytest.mark.default
Run = Callable[..., Any]

ROWS: list[dict[str, Any]] = [
    {"turns": ["What is the capital of France?", "And of Spain?"], "category": "qa"},
    {"turns": ["Say hi."], "category": "chat"},
    {"messages": [{"role": "user", "content": "Count to 3."}, {"role": "assistant", "content": "1 2 3"}]},
]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "asked.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS)))
    return path


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Random ones: EAGLE-3 and EAGLE-3.1."""
    folder = tmp_path_factory.mktemp("drafters")
    for name, flag in (("eagle3", False), ("eagle31", True)):
        config = default_drafter_config(fc_norm=flag, norm_output=flag)
        drafter = tiny.random_drafter(config, own_embedding=False, own_head=True)
        write_checkpoint(checkpoint_of(drafter), folder / name)
    return [folder / "eagle3", folder / "eagle31"]


def arguments(file: Path, *drafters: Path) -> list[object]:
    given: list[object] = ["eval", file, "--max-tokens", 8, "--depth", 2, "--dtype", "float32"]
    return given + [word for drafter in drafters for word in ("--drafter", drafter)]


@pytest.mark.slow
def test_everything_is_measured_estimated_told_and_written(
    file: Path, drafters: list[Path], tmp_path: Path, run: Run
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 40)
    out = tmp_path / "result"
    words = [*arguments(file, *drafters), "--depth", 1, "--turns", 2, "--held-out", "--out", out]
    outcome = run(*words, "--prefix", text, "--prefix-tokens", 0, "--prefix-tokens", 40, "--json")
    assert outcome.code == 0, outcome
    record = json.loads(outcome.out)
    assert record == json.loads((out / "eval.json").read_text(encoding="utf-8"))
    assert (out / "eval.png").read_bytes().startswith(b"\x89PNG")
    assert record["whole"]
    assert record["versions"]["torch"]
    assert record["arguments"]["max_tokens"] == 8
    assert record["arguments"]["prompts"] == [str(file)]
    assert [group["prefix_tokens"] for group in record["groups"]] == [0, 40]
    for group in record["groups"]:
        assert [(asked["category"], asked["turn"]) for asked in group["asked"]] == [
            ("qa", 0),
            ("chat", 0),
            ("asked", 0),
            ("qa", 1),
        ]
        cells = {(cell["drafter"], cell["depth"]): cell for cell in group["measured"]}
        assert sorted(cells) == [("eagle3", 1), ("eagle3", 2), ("eagle31", 1), ("eagle31", 2)]
        for cell in cells.values():
            assert cell["identical"] == cell["answers"] == 4, "float32"
            assert cell["largest_margin"] is None
            assert cell["acceptance_length"] == 1 + sum(cell["accepted_at"]) / cell["rounds"]
            assert cell["rounds"] == sum(len(own["accepted"]) for own in cell["by_answer"])
            assert sorted(cell["by_category"]) == ["asked", "chat", "qa"]
            # Rounds agree; what the last one accepts past the end is the decoder's alone.
            assert cell["estimate"]["rounds"] == cell["rounds"]
    assert record["groups"][1]["prompt_tokens"] > record["groups"][0]["prompt_tokens"] + 4 * 35
    assert record["held_out"]["conversations"] == 1
    assert len(record["held_out"]["estimates"]) == 4


def test_people_get_tables(file: Path, drafters: list[Path], run: Run) -> None:
    outcome = run(*arguments(file, drafters[1]), "--limit", 2, "--no-estimate", "--device", "cpu")
    assert outcome.code == 0, outcome
    for part in ("acceptance length, 2 prompts", "by category, depth 2", "qa", "2 of 2", "accepted with all before"):
        assert part in outcome.out, (part, outcome.out)
    assert "eagle31, depth 2: 1." in outcome.err


def test_an_interruption_tells_what_was_measured(
    file: Path, drafters: list[Path], tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    speculatively = EngineDecoders.speculatively

    def answer_two(self: EngineDecoders, *given: Any) -> Iterator[Answer]:
        answers = speculatively(self, *given)
        yield next(answers)
        yield next(answers)
        raise KeyboardInterrupt

    monkeypatch.setattr(EngineDecoders, "speculatively", answer_two)
    outcome = run(*arguments(file, drafters[0]), "--out", tmp_path / "out", "--json")
    assert outcome.code == 130
    assert "stopped early" in outcome.err
    record = json.loads(outcome.out)
    assert not record["whole"]
    assert record["groups"][0]["measured"][0]["answers"] == 2
    assert (tmp_path / "out" / "eval.png").exists()


def test_what_cannot_be_measured_is_refused_at_once(
    file: Path, drafters: list[Path], tmp_path: Path, run: Run, save: Callable[..., Path]
) -> None:
    words = arguments(file, drafters[0])
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    run(*arguments(empty, drafters[0])).assert_refused("empty.jsonl holds no conversations")
    run(*arguments(tmp_path / "none.jsonl", drafters[0])).assert_refused("none.jsonl")
    run(*arguments(file)).assert_refused("--drafter")
    for depth in (0, -3):
        run(*words, "--depth", depth).assert_refused(f"--depth {depth} drafts nothing")
    run(*words, "--device", "abacus").assert_refused("device 'abacus' cannot be used here")
    run(*words, "--prefix-tokens", 40).assert_refused("--prefix names a text", "give both or neither")
    run(*words, "--prefix", file).assert_refused("give both or neither")
    run(*arguments(file, tmp_path / "nobody")).assert_refused("nobody does not exist")
    run(*arguments(file, save())).assert_refused("does not fit smollm2", "vocab_size 96")
    prompts_only = tmp_path / "prompts.jsonl"
    prompts_only.write_text(json.dumps({"prompt": "Hi"}))
    run(*arguments(prompts_only, drafters[0]), "--held-out").assert_refused("--held-out needs answers")
    for options, message in [
        (["--max-length", 9_999_999], "--max-length 9999999 is above the"),
        (["--max-length", 8], "--max-tokens 8 leaves no room for a prompt in --max-length 8"),
        (["--max-length", 12], "all 3 prompts have more than 4 tokens"),
        (["--prefix", file, "--prefix-tokens", 5000], "--prefix-tokens 5000 is above the"),
    ]:
        outcome = run(*words, *options)
        assert outcome.code == 2
        assert message in outcome.err, outcome.err
        assert outcome.out == ""
