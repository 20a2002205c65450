"""`eyas train`: what it prints, how it exits, how it is interrupted, and what it refuses."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

import eyas
from chat_tokenizer import CHATML, chat_tokenizer
from eyas.cli.stop import StopRequest, children_of
from eyas.cli.train import TrainScreen
from eyas.drafter.checkpoint import load_drafter
from eyas.kernels.linear.quantised_linear import load_quantised
from eyas.train.recipe_file import load_recipe
from eyas.train.run import TrainResult
from eyas.train.schedule import RunLength
from tiny import AUX_IDS, target_config
from train.test_journal import counts_of, metrics_at

Run = Callable[..., Any]
CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello there"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small target with a tokenizer."""
    folder = tmp_path_factory.mktemp("models") / "target"
    torch.manual_seed(0)
    LlamaForCausalLM(target_config(vocab_size=260)).save_pretrained(folder)
    chat_tokenizer(CHATML).save_pretrained(folder)
    return folder


@pytest.fixture
def recipe(model: Path, tmp_path: Path) -> Path:
    (tmp_path / "data.jsonl").write_text(f"{json.dumps({'messages': CHAT})}\n" * 4)
    path = tmp_path / "recipe.toml"
    path.write_text(
        f'[target]\nsource = "{model}"\n'
        f'[data]\nfiles = ["{tmp_path / "data.jsonl"}"]\nworkers = 1\nmax_length = 512\n'
        f"[drafter]\naux_layer_ids = {list(AUX_IDS)}\n"
        f'[train]\nsteps = 2\ndepths = 1\n[output]\nfolder = "{tmp_path / "run"}"\n'
    )
    return path


Fake = Callable[..., TrainResult]


@pytest.fixture
def instead(monkeypatch: pytest.MonkeyPatch) -> Callable[[Fake], None]:
    """Put something else in the place of the training itself."""

    def put(fake: Fake) -> None:
        monkeypatch.setattr("eyas.train.load_target.open_training_target", lambda *_: nullcontext((None, None, dict)))
        monkeypatch.setattr("eyas.train.run.run", fake)

    return put


def test_a_dry_run_prints_a_recipe_that_loads_again(run: Run, recipe: Path, tmp_path: Path) -> None:
    outcome = run("train", recipe, "--dry-run", "--set", "train.lr=3e-4", "--set", "drafter.draft_vocab_size=64")
    assert (outcome.code, outcome.err) == (0, "")
    again = tmp_path / "again.toml"
    again.write_text(outcome.out)
    assert load_recipe(again) == load_recipe(recipe, ["train.lr=3e-4", "drafter.draft_vocab_size=64"])
    assert load_recipe(again).train.lr == 3e-4
    assert not (tmp_path / "run").exists()


def test_the_command_line_says_what_the_target_is_quantised_as(run: Run, recipe: Path) -> None:
    assert 'quantization = "none"' in run("train", recipe, "--dry-run").out
    assert 'quantization = "gguf"' in run("train", recipe, "--dry-run", "--quantization", "gguf").out
    outcome = run("train", recipe, "--dry-run", "--quantization", "int3")
    assert outcome.code != 0
    assert "target.quantization" in outcome.err
    outcome = run("train", recipe, "--dry-run", "--quantization", "int8", "--set", "target.spread=true")
    assert "target.spread" in outcome.err


@pytest.mark.slow
def test_a_drafter_is_trained_on_a_quantised_target(run: Run, recipe: Path, tmp_path: Path) -> None:
    if load_quantised()[0] is None:
        pytest.skip("no compiler here for integer products")
    outcome = run("train", recipe, "--quantization", "int8", "--set", "target.device=cpu")
    assert outcome.code == 0, outcome.err
    assert "matrices stay quantised (int8" in outcome.err
    assert load_drafter(str(tmp_path / "run" / "drafter")).fc.weight.isfinite().all()


@pytest.mark.slow
def test_several_processes_share_a_run_as_the_documents_say(recipe: Path, tmp_path: Path) -> None:
    """`torchrun ... -m eyas train`, by the module that torchrun is."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "eyas"]
    options = ["train", str(recipe), "--set", "train.packs_per_step=2", "--set", "data.pack_length=64"]
    environment = {**os.environ, "PYTHONPATH": str(Path(eyas.__file__).parent.parent), "OMP_NUM_THREADS": "1"}
    options += ["--set", "data.max_length=64"]
    done = subprocess.run([*command, *options], check=True, env=environment, timeout=300, capture_output=True)
    assert done.stderr.count(b"2 steps, each step 2 x 64 tokens") == 1, "the other process logs nothing"
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    assert (record["step"], record["processes"]) == (2, 2)
    load_drafter(str(tmp_path / "run" / "drafter"))


# --- faults ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("[train\nlr = 1", ("recipe.toml is not TOML", "line 1", "mend it")),
        ("[trian]\nlr = 1", ("trian", "train")),
        ("LEAST[train]\nlrr = 1e-3", ("lrr", "[train]", "'lr'")),
        ("LEAST[train]\nlr = 'fast'", ("train.lr", "'fast'")),
        ("LEAST[train]\nlr = 7", ("train.lr is 7", "at most 1")),
        ("[data]\nfiles = []\n[output]\nfolder = 'x'", ("data.files is empty", "at least one")),
        ("[data]\nfiles = ['a']", ("output.folder",)),
        ("\0", ("recipe.toml is not TOML",)),
    ],
)
def test_a_recipe_that_cannot_be_is_one_line(run: Run, recipe: Path, text: str, parts: tuple[str, ...]) -> None:
    recipe.write_text(text.replace("LEAST", "[data]\nfiles = ['a']\n[output]\nfolder = 'x'\n"))
    run("train", recipe).assert_refused(*parts)


def test_a_recipe_that_is_nowhere_is_one_line(run: Run, tmp_path: Path) -> None:
    run("train", tmp_path / "none.toml").assert_refused("none.toml", "No such file", "check the path")
    run("train", tmp_path).assert_refused(str(tmp_path), "Is a directory")


def test_an_override_that_cannot_be_is_one_line(run: Run, recipe: Path) -> None:
    run("train", recipe, "--set", "train.lrr=1").assert_refused("lrr", "'lr'")
    run("train", recipe, "--set", "train").assert_refused("train")
    run("train", recipe, "--set", "target.device=tpu").assert_refused("target.device is 'tpu'", "cuda")


GOOD = json.dumps({"messages": CHAT})


@pytest.mark.parametrize(
    ("lines", "parts"),
    [
        (
            [GOOD, GOOD, '{"messages": [', '{"messages": [{"role": "asistant", "content": "x"}]}'],
            (
                "2 of 4 records are bad",
                "data.max_bad_share",
                "data.jsonl:3: it is not JSON",
                "data.jsonl:4",
                "'asistant'",
            ),
        ),
        (['{"text": "x"}'], ("none of 1 records", "data.jsonl:1", "['text']", "messages (OpenAI)")),
        ([GOOD, '{"text": "x"}'], ("1 conversation cannot be split",)),
        (['{"prompt": "Hi"}'], ("of 1 conversations none", "1 unanswered", "let the target answer")),
        ([], ("data.jsonl holds no conversations", "at least one line")),
        (None, ("cannot read", "data.jsonl", "No such file", "; check")),
        ([GOOD], ("1 conversation cannot be split", "data.held_out")),
    ],
)
def test_data_that_cannot_be_trained_on_is_said_in_the_last_line(
    run: Run, recipe: Path, tmp_path: Path, lines: list[str] | None, parts: tuple[str, ...]
) -> None:
    if lines is None:
        (tmp_path / "data.jsonl").unlink()
    else:
        (tmp_path / "data.jsonl").write_text("".join(line + "\n" for line in lines))
    assert_fails(run("train", recipe), *parts)
    assert not (tmp_path / "run" / "recipe.toml").exists()


def assert_fails(outcome: Any, *parts: str) -> None:
    """The recipe is printed before the work begins, so the fault is the last line."""
    last = outcome.err.splitlines()[-1]
    assert (outcome.code, outcome.out) == (2, ""), outcome
    assert last.startswith("eyas: "), outcome.err
    assert "Traceback" not in outcome.err
    for part in parts:
        assert part in last, (part, last)


def test_a_tokenizer_without_a_chat_template_is_refused(run: Run, recipe: Path, model: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    LlamaForCausalLM.from_pretrained(model).save_pretrained(bare)
    tokenizer = chat_tokenizer(CHATML)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(bare)
    assert_fails(run("train", recipe, "--set", f"target.source={bare}"), "no chat template", "--raw", "chat_template")


def test_other_faults_of_the_recipe_show_once_the_target_is_known(run: Run, recipe: Path, tmp_path: Path) -> None:
    for override, parts in (
        (f"target.source={tmp_path / 'none'}", ("none", "check the path")),
        ("drafter.draft_vocab_size=300", ("draft_vocab_size 300", "target's 260", "choose less")),
        ("drafter.aux_layer_ids=[1, 2, 5]", ("drafter.aux_layer_ids", "auxiliary layer id 5", "0..4")),
        ("data.max_length=4", ("too long for data.max_length 4",)),
        ("data.max_length=600", ("data.max_length 600 exceeds the context", "512 tokens", "512 or less")),
    ):
        assert_fails(run("train", recipe, "--set", override), *parts)
    assert_fails(run("train", recipe, "--resume"), "no checkpoint", "leave out --resume")
    (tmp_path / "taken").write_text("a file")
    outcome = run("train", recipe, "--set", f"output.folder={tmp_path / 'taken'}")
    assert_fails(outcome, "cannot write", str(tmp_path / "taken"))


# --- stopping --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_and_a_later_one_ends_it(
    number: signal.Signals, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[int] = []
    monkeypatch.setattr("eyas.cli.stop._end", lambda grace, code: ended.append(code))
    before = signal.getsignal(number)
    with StopRequest() as stop:
        stop.saves_from_now_on()
        assert not stop.asked()
        os.kill(os.getpid(), number)
        assert stop.asked()
        os.kill(os.getpid(), number)  # as `timeout` does: to the process and at once to its group
        assert capfd.readouterr().err == "saving after this step; once more stops at once\n"
        monkeypatch.setattr(StopRequest, "MOMENT", 0.0)
        with pytest.raises(SystemExit) as left:
            os.kill(os.getpid(), number)
    assert left.value.code == 128 + number
    assert ended == [128 + number], "and what holds it up is ended"
    assert signal.getsignal(number) == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_before_the_first_step_a_signal_ends_it_at_once(
    run: Run, recipe: Path, instead: Callable[[Fake], None], number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eyas.cli.stop._end", lambda grace, code: None)

    def encoding(*_: Any, **__: Any) -> TrainResult:
        os.kill(os.getpid(), number)
        raise AssertionError

    instead(encoding)
    outcome = run("train", recipe)
    assert (outcome.code, outcome.out) == (128 + number, "")
    assert outcome.err.splitlines()[-1] == "stopped before the first step, there is nothing to save yet"


def test_a_stopped_run_says_how_to_go_on_and_exits_130(run: Run, recipe: Path, instead: Callable[[Fake], None]) -> None:
    def interrupted(*_: Any, stop: Callable[[], bool], on_first_step: Callable[[], None], **__: Any) -> TrainResult:
        on_first_step()
        assert not stop()
        os.kill(os.getpid(), signal.SIGINT)
        assert stop()
        return TrainResult(step=2, length=RunLength(steps=4), finished=False, drafters={})

    instead(interrupted)
    outcome = run("train", recipe)
    assert (outcome.code, outcome.out) == (130, "")
    assert outcome.err.splitlines()[-1] == "stopped at step 2 of 4 steps; `eyas train ... --resume` goes on from there"


HELD_UP = """
import signal, subprocess, sys, time
from eyas.cli.stop import StopRequest
StopRequest.GRACE = 0.2
with StopRequest():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    print(child.pid, flush=True)
    try:
        time.sleep(100)
    finally:
        time.sleep(100)  # a compiler, say, that does not let go
"""


def _is_gone(process: int) -> bool:
    """Whether a process has ended, whoever its parent is by now and whether that has noticed."""
    stat = Path(f"/proc/{process}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="children are found in /proc")
def test_what_holds_up_the_end_is_ended_with_its_children() -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(eyas.__file__).parent.parent)}
    held_up = subprocess.Popen([sys.executable, "-c", HELD_UP], env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert held_up.stdout is not None
        child = int(held_up.stdout.readline())
        assert children_of(held_up.pid) == [child]
        held_up.send_signal(signal.SIGTERM)
        assert held_up.wait(timeout=60) == 143
        for _ in range(100):
            if _is_gone(child):
                break
            time.sleep(0.05)
        assert _is_gone(child)
    finally:
        held_up.kill()
        held_up.wait()


# --- what it prints --------------------------------------------------------------------------------------------


def test_progress_goes_to_stderr_and_results_to_stdout(
    run: Run, recipe: Path, model: Path, tmp_path: Path, instead: Callable[[Fake], None]
) -> None:
    record = json.dumps({"held_out": {"old": {"acceptance_length": 1.7}}})

    def trained(*_: Any, observers: list[TrainScreen], resuming: bool, cache: Path, **__: Any) -> TrainResult:
        assert resuming
        assert cache == tmp_path
        for observer in observers:
            observer.estimated(1, counts_of("old"))
            observer.progressed(metrics_at(2, "old", "new"))
            observer.saved(2, Path("place"))
        (tmp_path / "run").mkdir(exist_ok=True)
        (tmp_path / "run" / "record.json").write_text(record)
        return TrainResult(
            step=4,
            length=RunLength(steps=4),
            finished=True,
            drafters={name: tmp_path / "run" / name for name in ("old", "new")},
        )

    instead(trained)
    (tmp_path / "run" / "checkpoints" / "step-000002").mkdir(parents=True)
    outcome = run("train", recipe, "--resume", "--cache", tmp_path)
    folder = tmp_path / "run"
    assert outcome.code == 0
    assert outcome.out.splitlines() == [
        f"old: {folder / 'old'}, acceptance length 1.70 held out",
        f"new: {folder / 'new'}",
        f"log, plot and record: {folder}",
        f"measure it: eyas eval PROMPTS.jsonl --target {model} --drafter {folder / 'old'}",
        f"serve it: eyas serve {model} --speculative-config "
        f"""'{{"model": "{folder / "old"}", "method": "eagle3"}}'""",
    ]
    assert outcome.err.startswith("[target]")
    assert outcome.err.splitlines()[-4:] == [
        "step 1  old: estimated acceptance length 1.700 on held-out text",
        "step 2/9  12 tokens/s  0 min 3 s left  old: loss 2.0000  accuracy 0.500 0.500  length 1.700",
        "step 2/9  12 tokens/s  0 min 3 s left  new: loss 2.0000  accuracy 0.500 0.500",
        "saved place",
    ]
    assert run("train", recipe, "--resume", "--cache", tmp_path, "--json").out == record + "\n"


def test_on_a_terminal_a_table_is_drawn(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with TrainScreen(shown=True) as screen:
        screen.estimated(1, counts_of("old"))
        screen.progressed(metrics_at(2, "old"))
        screen.saved(2, Path("place"))
    shown = capfd.readouterr()
    assert shown.out == ""
    assert "accuracy by depth" in shown.err
    assert "length 1.700" in shown.err
