"""`eyas data show` prints what is trained on, and counts."""

import json
import sys
from pathlib import Path

import pytest

from eyas.cli.app import main

pytestmark = pytest.mark.default

ROWS = [
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]},
    {"prompt": "Why?"},
]


def run(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    monkeypatch.setattr(sys, "argv", ["eyas", "data", "show", *map(str, words)])
    with pytest.raises(SystemExit) as exit_:
        main()
    return int(exit_.value.code or 0)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS)))
    return path


def test_counts_and_mask_come_as_json(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, file, "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["conversations"], shown["unanswered"], shown["turns"], shown["rows"]) == (2, 1, 3, 1)
    (row,) = shown["sample"]
    assert shown["trained on"] == sum(row["mask"]) == 2  # "Hello" and the end of the turn
    assert shown["tokens"] == len(row["ids"]) == len(row["mask"])


def test_the_sample_is_printed_as_the_target_reads_it(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, file) == 0
    out = capsys.readouterr().out
    assert "<|im_start|>assistant\nHello<|im_end|>" in out
    assert "trained on" in out


def test_rows_of_one_conversation_are_printed_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    samples = [{"prompt_token_ids": [k, 10], "token_ids": [11, 2]} for k in (3, 4)]
    (tmp_path / "said.jsonl").write_text(json.dumps({**ROWS[0], "samples": samples}))
    assert run(monkeypatch, tmp_path / "said.jsonl") == 0
    out = capsys.readouterr().out
    assert "row 1 of 2" in out
    assert "row 2 of 2" in out


def test_a_conversation_without_answers_says_so(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, file, "--sample", 2) == 0
    assert "nobody answers in conversation 2" in capsys.readouterr().out


def test_a_sample_beyond_the_file_is_refused(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, file, "--sample", 3) == 2
    assert capsys.readouterr().err == "eyas: --sample 3 is beyond the 2 conversations read; choose less\n"


def test_a_count_that_stops_early_says_so(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, file, "--limit", 1) == 0
    assert "first 1 conversations" in capsys.readouterr().err
    assert run(monkeypatch, file, "--limit", 2) == 0
    assert "first" not in capsys.readouterr().err


def test_data_alone_prints_its_help(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["eyas", "data"])
    with pytest.raises(SystemExit) as exit_:
        main()
    output = capsys.readouterr()
    assert (exit_.value.code, output.err) == (0, "")
    assert "show" in output.out


def test_what_is_bad_is_counted_and_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    refused = {**ROWS[0], "chat_template_kwargs": {"messages": []}}
    (tmp_path / "data.jsonl").write_text("\n".join([json.dumps(ROWS[0]), "{", json.dumps(refused)]))
    assert run(monkeypatch, tmp_path / "data.jsonl", "--json") == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["conversations"] == 1
    assert "2 of 3 records are bad and skipped" in shown.err
    assert "data.jsonl:2: it is not JSON" in shown.err
    assert "refused by the chat template, as" in shown.err
    assert run(monkeypatch, tmp_path / "data.jsonl", "--sample", 2) == 2
