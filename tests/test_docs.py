"""Every command and every Python example in README and docs/ runs."""

import json
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from eyas.cli.app import main

ROOT = Path(__file__).parent.parent
PROMPTS = ["Name a bird.", "Name a tree.", "Say hello.", "What is rain?"]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


QWEN3 = ROOT / "docs" / "qwen3.md"
"""A walk-through with its own target."""


def blocks(language: str, pages: Sequence[Path] = tuple(page for page in PAGES if page != QWEN3)) -> list[str]:
    """Fenced blocks of a language, in reading order: later ones may use what earlier ones made."""
    return [
        block
        for page in pages
        for block in re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.S | re.M)
    ]


def commands(*pages: Path) -> list[list[str]]:
    given = blocks("sh", pages) if pages else blocks("sh")
    lines = "\n".join(given).replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def test_the_documents_hold_commands() -> None:
    assert len(commands()) > 10
    assert blocks("python")


def test_every_documented_goal_is_in_the_makefile() -> None:
    goals = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    for words in [*commands(), *commands(QWEN3)]:
        assert words[0] in ("eyas", "make"), f"nothing runs {words[0]!r}: use eyas or make"
        if words[0] == "make":
            assert words[1] in goals


def test_links_between_documents_exist() -> None:
    for page in [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]:
        for link in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            assert link.startswith("https://") or (page.parent / link).exists(), f"{page.name}: {link}"


def test_files_that_documents_name_exist() -> None:
    package = ROOT / "src" / "eyas"
    homes = (ROOT, package, package / "engine", package / "kernels")
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        for name in re.findall(r"`([a-z_]+/[a-z_/]+\.(?:py|c|h))`", page.read_text(encoding="utf-8")):
            assert any((home / name).exists() for home in homes), f"{page.name}: {name}"


def console_commands() -> list[list[str]]:
    """Commands of eyas in console blocks, also behind a launcher or an assignment."""
    lines = "\n".join(blocks("console", PAGES)).replace("\\\n", " ").splitlines()
    typed = [line.removeprefix("$ ") for line in lines if re.match(r"\$ (\w+=\S+ )*(eyas|torchrun) ", line)]
    return [shlex.split(re.sub(r"^.*?\beyas ", "eyas ", line)) for line in typed]


def test_options_of_commands_that_cannot_run_here_exist() -> None:
    """These commands may need a server or eight GPUs, so only their options are checked."""
    from typer.main import get_command

    from eyas.cli.app import app

    found = console_commands()
    assert len(found) > 15
    for words in found:
        command: Any = get_command(app)
        rest = words[1:]
        while rest and rest[0] in getattr(command, "commands", ()):
            command = command.commands[rest.pop(0)]
        taken = {name for option in command.params for name in (*option.opts, *option.secondary_opts)} | {"--help"}
        said = list(takewhile(lambda word: word != "--", rest))
        asked = {word.partition("=")[0] for word in said if word.startswith("--")}
        assert asked <= taken, f"{shlex.join(words)}: {asked - taken}"


def run(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 0, shlex.join(words)


@pytest.mark.slow
def test_a_drafter_for_qwen3_by_the_documented_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with the name of the hub id takes precedence over the hub; it holds a tiny Qwen3."""
    import tiny_qwen3

    tiny_qwen3.save(tmp_path / "Qwen" / "Qwen3-8B")
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    (tmp_path / "qwen3.toml").write_text(blocks("toml", [QWEN3])[0])
    monkeypatch.chdir(tmp_path)
    for words in commands(QWEN3):
        run(words, monkeypatch)
    trained = load_file(tmp_path / "runs" / "qwen3" / "drafter" / "model.safetensors")
    assert all(tensor.isfinite().all() for tensor in trained.values())


@pytest.mark.slow(minutes=4)
@pytest.mark.default
def test_every_documented_command_and_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tiny
    from default_drafter import default_drafter_config
    from eyas.drafter.checkpoint import checkpoint_of, write_checkpoint

    drafter = tiny.random_drafter(
        default_drafter_config(fc_norm=True, norm_output=True), own_embedding=False, own_head=True
    )
    write_checkpoint(checkpoint_of(drafter), tmp_path / "my-drafter")
    answer = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    (tmp_path / "conversations.jsonl").write_text(json.dumps({"messages": answer}))
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    (tmp_path / "recipe.toml").write_text(blocks("toml", [ROOT / "docs" / "training.md"])[0])
    shutil.copy(ROOT / "docs" / "plan-cpu.json", tmp_path / "measured.json")
    monkeypatch.chdir(tmp_path)
    for words in commands():
        if words[0] == "eyas":
            run(words, monkeypatch)
    for block in blocks("python"):
        exec(compile(block, "example", "exec"), {})
