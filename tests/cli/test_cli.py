"""The commands: what they print, how they exit, and that help costs nothing."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from each import each
from eyas import __version__

Run = Callable[..., Any]
Save = Callable[..., Path]


@pytest.mark.slow
def test_help_imports_nothing_heavy() -> None:
    script = (
        "import sys; sys.argv = ['eyas', *sys.argv[1:]]\n"
        "from eyas.cli.app import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    code = end.code\n"
        "heavy = {'torch', 'transformers', 'numpy', 'safetensors', 'huggingface_hub'} & sys.modules.keys()\n"
        "sys.exit(f'imported {heavy}' if heavy else code)\n"
    )
    for arguments in (["--help"], ["check", "--help"], ["serve", "-h"], ["--version"]):
        done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
    # The shell is named: `--show-completion` asks the parent process, which need not be a shell that completes.
    asked = os.environ | {"_EYAS_COMPLETE": "source_bash"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, env=asked)
    assert (done.returncode, done.stderr) == (0, "")
    assert "complete -o default -F _eyas_completion eyas" in done.stdout
    # The control: the script does tell.
    control = [sys.executable, "-c", "import numpy\n" + script, "--version"]
    done = subprocess.run(control, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "imported {'numpy'}\n")


def test_the_installed_command_answers() -> None:
    command = Path(sys.executable).with_name("eyas")
    done = subprocess.run([command, "--help"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert all(name in done.stdout for name in ("generate", "check", "convert", "fetch"))


def test_no_command_prints_the_help(run: Run) -> None:
    alone, asked = run(), run("--help")
    assert (alone.code, asked.code) == (0, 0)
    assert alone.out.split() == asked.out.split()
    assert "convert" in alone.out


COMMANDS = [
    *("demo", "generate", "serve", "plan", "check", "convert", "fetch", "train", "eval", "doctor"),
    *("bench", "bench compare", "data", "data answer", "data show", "adapt", "export vllm-command"),
]


@each("command", ["", *COMMANDS])
def test_every_level_has_help_and_a_version(run: Run, command: str) -> None:
    for flag in ("--version", "-V"):
        outcome = run(*command.split(), flag)
        assert (outcome.code, outcome.out, outcome.err) == (0, f"{__version__}\n", "")
    long, short = run(*command.split(), "--help"), run(*command.split(), "-h")
    assert (short.code, short.out, short.err) == (0, long.out, "")
    assert "-h, --help" in short.out


@each("command", ["", *COMMANDS])
def test_help_fits_a_narrow_terminal(run: Run, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = run(*command.split(), "--help").out.splitlines()
    assert max(map(len, lines)) <= 80
    # Words have room: the column of names takes at most 30 of the 80.
    words = [len(line) - len(line.lstrip()) for line in lines if line.startswith("   ")]
    assert max(words, default=0) <= 32


def test_options_are_shown_in_groups(run: Run) -> None:
    groups: dict[str, list[str]] = {}
    for line in run("serve", "--help").out.splitlines():
        if line.endswith(":") and not line.startswith(" "):
            rows = groups.setdefault(line[:-1], [])
        elif line.startswith("  -"):
            rows.append(line.split()[0])
    assert list(groups)[:2] == ["Arguments", "Common"]
    assert groups["Common"][:4] == ["--speculative-config", "--host", "--port", "--api-key"]
    assert len(groups["Common"]) == 10
    assert groups["Network"][:2] == ["--ssl-certfile", "--ssl-keyfile"]
    assert "--admin-key" in groups["Access"]
    assert groups["Options"] == ["-V,", "-h,"]  # nothing else is without a group
    assert list(groups)[-1] == "Options"


def test_a_flag_is_not_shown_as_if_it_took_a_value(run: Run) -> None:
    (line,) = [line for line in run("check", "--help").out.splitlines() if "--json" in line]
    assert line.split()[:2] == ["--json", "Print"]


@each(
    ("arguments", "part"),
    [
        (["nonsense"], "nonsense"),
        (["--nonsense"], "--nonsense"),
        (["check"], "drafter"),
        (["check", "a", "--nonsense"], "--nonsense"),
        (["check", "a", "b"], "b"),
        (["convert", "a", "--out", "b"], "--to"),
        (["convert", "a", "--out", "b", "--quantize", "int4"], "'none', 'int8', 'fp8'"),
        (["convert", "a", "--out", "b", "--to", "gguf"], "'vllm', 'sglang', 'speculators'"),
        (["convert", "a", "--out", "b", "--to", "vllm", "--from", "gguf"], "'vllm', 'sglang', 'speculators'"),
        (["generate", "hello", "--depth", "-1"], "--depth"),
        (["generate", "hello", "--max-tokens", "many"], "--max-tokens"),
    ],
)
def test_wrong_usage_is_one_line(run: Run, arguments: list[str], part: str) -> None:
    run(*arguments).assert_refused(part)


# --- check -----------------------------------------------------------------------------------------------------


def test_check_says_what_a_drafter_is(run: Run, save: Save) -> None:
    folder = save(fc_norm=True, norm_output=True, draft_vocab_size=32)
    outcome = run("check", folder)
    assert (outcome.code, outcome.err) == (0, "")
    rows = {line.split(maxsplit=1)[0]: line for line in outcome.out.splitlines()}
    assert f"EAGLE-3.1 (vllm format), {folder}" in rows["drafter"]
    assert "1 of width 64" in rows["layers"]
    assert "after layers 1, 2, 3" in rows["layers"]
    assert "32 of 96" in rows["vocabulary"]
    assert "fc_norm yes, norm_output yes, norm_before_fc no, norm_before_residual no" in rows["flags"]
    assert "embeddings" in rows["from"]
    assert "works by itself (pass --target to check the pair)" in rows["verdict"]
    assert "error" not in rows


def test_check_with_a_target_judges_the_pair(run: Run, save: Save, target: Path) -> None:
    outcome = run("check", save(), "--target", target)
    assert (outcome.code, outcome.err) == (0, "")
    assert f"works with {target}" in outcome.out


def test_check_prints_json_for_programs(run: Run, save: Save, target: Path) -> None:
    good = run("check", save(), "--target", target, "--json")
    assert (good.code, good.err) == (0, "")
    report = json.loads(good.out)
    assert (report["ok"], report["family"], report["findings"]) == (True, "EAGLE-3", [])
    bad = run("check", save("other", vocab_size=95, draft_vocab_size=95), "--target", target, "--json")
    assert (bad.code, bad.err) == (2, "")
    report = json.loads(bad.out)
    assert report["ok"] is False
    assert report["findings"][0]["severity"] == "error"


def test_a_warning_does_not_fail_a_check(run: Run, save: Save) -> None:
    folder = save()
    raw = json.loads((folder / "config.json").read_text())
    del raw["norm_output"]
    (folder / "config.json").write_text(json.dumps(raw))
    outcome = run("check", folder)
    assert outcome.code == 0
    assert "warning" in outcome.out
    assert "works by itself" in outcome.out


# --- convert ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["vllm", "sglang", "speculators"])
def test_convert_writes_a_drafter_that_checks(
    run: Run, save: Save, tmp_path: Path, contents: Callable[[Path], dict[str, bytes]], layout: str
) -> None:
    source = save(fc_norm=True, norm_output=True)
    before = contents(source)
    outcome = run("convert", source, "--out", tmp_path / "out", "--to", layout)
    assert outcome.code == 0
    assert ("--target" in outcome.err) == (layout == "speculators")
    assert outcome.out == f"EAGLE-3.1 drafter, vllm -> {layout}: {tmp_path / 'out'}\n"
    assert contents(source) == before
    assert {path.name for path in tmp_path.iterdir()} == {"drafter", "out"}
    assert f"EAGLE-3.1 ({layout} format)" in run("check", tmp_path / "out").out


def test_a_speculators_export_names_the_target_it_is_told(run: Run, save: Save, tmp_path: Path) -> None:
    outcome = run("convert", save(), "--out", tmp_path / "out", "--to", "speculators", "--target", "org/model")
    assert (outcome.code, outcome.err) == (0, "")
    raw = json.loads((tmp_path / "out" / "config.json").read_text())
    assert raw["speculators_config"]["verifier"]["name_or_path"] == "org/model"
    assert run("convert", tmp_path / "out", "--out", tmp_path / "again", "--to", "vllm").code == 0
    again = run("convert", tmp_path / "again", "--out", tmp_path / "back", "--to", "speculators")
    assert (again.code, again.err) == (0, "")
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == raw


def test_a_target_is_refused_where_the_format_cannot_name_one(run: Run, save: Save, tmp_path: Path) -> None:
    outcome = run("convert", save(), "--out", tmp_path / "out", "--to", "vllm", "--target", "org/model")
    assert outcome.code == 2
    assert "org/model" in outcome.err
    assert not (tmp_path / "out").exists()


def test_convert_quantises_and_back(run: Run, save: Save, tmp_path: Path) -> None:
    source, small, back = save(layout="speculators"), tmp_path / "small", tmp_path / "back"
    outcome = run("convert", source, "--out", small, "--quantize", "int8")
    assert outcome.code == 0
    assert "speculators -> speculators, int8 (compressed-tensors)" in outcome.out, "the format stays unless told"
    assert "MB of weights instead of" in outcome.out
    outcome = run("check", small)
    assert outcome.code == 0
    assert "int8 (compressed-tensors)" in outcome.out
    assert json.loads(run("check", small, "--json").out)["quantization"] == "int8 (compressed-tensors)"
    assert run("convert", small, "--out", back, "--quantize", "none", "--to", "sglang").code == 0
    assert "float32" in run("check", back).out
    again = tmp_path / "again"
    run("convert", small, "--out", again, "--quantize", "fp8").assert_refused(
        "quantised already", "leave --quantize out"
    )
    run("convert", source, "--out", again, "--quantize", "int8", "--to", "sglang").assert_refused(
        "SGLang", "--quantize none"
    )
    run("convert", source, "--out", again, "--quantize", "none").assert_refused("not quantised")
    run("convert", source, "--out", again, "--quantize", "int8", "--target", "t").assert_refused("--to speculators")
    run("convert", source, "--out", again).assert_refused("nothing to convert", "--to", "--quantize")
    assert not again.exists()


def test_convert_takes_the_sources_format_from_the_user(run: Run, save: Save, tmp_path: Path) -> None:
    source = save()
    raw = json.loads((source / "config.json").read_text())
    del raw["eagle_aux_hidden_state_layer_ids"]
    (source / "config.json").write_text(json.dumps(raw))
    ids = []
    for number, extra in enumerate(([], ["--from", "sglang"])):
        out = tmp_path / f"out{number}"
        assert run("convert", source, "--out", out, "--to", "vllm", *extra).code == 0
        ids.append(json.loads((out / "config.json").read_text())["eagle_aux_hidden_state_layer_ids"])
    assert ids == [[1, 2, 3], [2, 3, 4]]


def test_convert_replaces_a_destination_only_by_force(
    run: Run, save: Save, tmp_path: Path, contents: Callable[[Path], dict[str, bytes]]
) -> None:
    source, old = save(fc_norm=True), save("old")
    before = contents(old)
    run("convert", source, "--out", old, "--to", "vllm").assert_refused(str(old), "exists", "--force")
    assert contents(old) == before
    assert run("convert", source, "--out", old, "--to", "vllm", "--force").code == 0
    assert contents(old) == contents(source)
    assert {path.name for path in tmp_path.iterdir()} == {"drafter", "old"}


@pytest.mark.parametrize("inside", [".", "sub", "sub/../sub/deeper"])
@pytest.mark.parametrize("force", [[], ["--force"]])
def test_convert_never_writes_into_its_source(
    run: Run, save: Save, contents: Callable[[Path], dict[str, bytes]], inside: str, force: list[str]
) -> None:
    source = save()
    before = contents(source)
    outcome = run("convert", source, "--out", source / inside, "--to", "sglang", *force)
    outcome.assert_refused("lies in the source", "choose a destination outside")
    assert contents(source) == before


@pytest.mark.parametrize("force", [[], ["--force"]])
def test_convert_never_replaces_a_folder_that_holds_its_source(
    run: Run, save: Save, tmp_path: Path, contents: Callable[[Path], dict[str, bytes]], force: list[str]
) -> None:
    source = save("outer/inner")
    before = contents(tmp_path)
    outcome = run("convert", source, "--out", tmp_path / "outer", "--to", "sglang", *force)
    outcome.assert_refused("holds the source", "choose another")
    assert contents(tmp_path) == before


def test_convert_through_a_link_to_the_source_is_refused(run: Run, save: Save, tmp_path: Path) -> None:
    source = save()
    link = tmp_path / "link"
    link.symlink_to(source)
    run("convert", source, "--out", link, "--to", "sglang", "--force").assert_refused("lies in the source")
    assert link.is_symlink()


def test_an_interruption_is_no_traceback(run: Run, save: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("eyas.drafter.check.read_unchecked", interrupt)
    outcome = run("check", save())
    assert outcome.code == 130
    assert "Traceback" not in outcome.err


def test_a_bug_is_not_hidden(run: Run, save: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("eyas.drafter.check.read_unchecked", fail)
    with pytest.raises(ZeroDivisionError):
        run("check", save())


def test_a_closed_pipe_is_no_traceback() -> None:
    command = [sys.executable, "-c", "from eyas.cli.app import main; main()", "--help"]
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    finally:
        os.close(writer)
    assert "Traceback" not in done.stderr
