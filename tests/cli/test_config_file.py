"""`eyas serve --config`: options from a file."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from eyas.cli.app import app

Run = Callable[..., Any]


def parsed(*arguments: str) -> dict[str, Any]:
    """What `serve` would be called with."""
    command = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    return dict(command.make_context("serve", list(arguments)).params)


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], str]:
    def to(text: str) -> str:
        (tmp_path / "eyas.yaml").write_text(text)
        return str(tmp_path / "eyas.yaml")

    return to


def test_keys_are_options_with_dashes_or_underscores(write: Any) -> None:
    file = write(
        "model: org/name\nmax-num-seqs: 16\nmax_model_len: 2048\nhost: 0.0.0.0\nno-page: true\n"
        "api-key: [one, two]\nspeculative-config: {model: d, num_speculative_tokens: 3}\nlog_level: warning\n"
        "request-seconds: 30\nmemory_gib:\n"
    )
    found = parsed("--config", file)
    assert (found["target"], found["max_num_seqs"], found["max_model_len"]) == ("org/name", 16, 2048)
    assert (found["host"], found["page"], found["log_level"]) == ("0.0.0.0", False, "warning")
    assert list(found["api_key"]) == ["one", "two"]
    assert found["speculative_config"] == '{"model": "d", "num_speculative_tokens": 3}'
    assert (found["request_seconds"], found["memory_gib"], found["port"]) == (30.0, None, 8000)


def test_the_command_line_wins_wherever_it_stands(write: Any) -> None:
    file = write("max-num-seqs: 16\nport: 9000\ntarget: a\n")
    for words in (["b", "--port", "1", "--config", file], ["--config", file, "--port", "1", "b"]):
        found = parsed(*words)
        assert (found["target"], found["port"], found["max_num_seqs"]) == ("b", 1, 16)


def test_an_environment_variable_wins_too(write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EYAS_API_KEY", "secret")
    assert list(parsed("--config", write("api-key: other\n"))["api_key"]) == ["secret"]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("max-num-seq: 16\n", ["max-num-seq", "did you mean max-num-seqs?"]),
        ("zzz: 1\n", ["zzz", "--help"]),
        ("config: x.yaml\n", ["config"]),
        ("max-num-seqs: many\n", ["--max-num-seqs", "integer"]),
        ("max-num-seqs: 0\n", ["--max-num-seqs", "greater than or equal to 1"]),
        ("max-num-seqs: [1, 2]\n", ["max-num-seqs", "2 values"]),
        ("port: 1\nmax-num-seqs: 1\nmax_num_seqs: 2\n", ["twice"]),
        ("- port\n", ["list", "option: value"]),
        ("port: [\n", ["no YAML"]),
    ],
)
def test_wrong_files_are_refused(run: Run, write: Any, text: str, parts: list[str]) -> None:
    run("serve", "--config", write(text)).assert_refused(*parts)


def test_a_missing_file_is_refused(run: Run, tmp_path: Path) -> None:
    run("serve", "--config", tmp_path / "none.yaml").assert_refused("none.yaml", "No such file")
