"""`eyas features serve` becomes the vLLM that hands out states, or says why not; `eyas train` learns from it."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

import eyas
from chat_tokenizer import CHATML, chat_tokenizer
from eyas.drafter.checkpoint import load_drafter
from eyas.target.model import Target
from tiny import AUX_IDS, target_config
from train.states_server import StatesServer

Run = Callable[..., Any]
CHATS = [
    [{"role": "user", "content": f"What is {i}?"}, {"role": "assistant", "content": f"It is {i}, " * 3}]
    for i in range(12)
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small target with a tokenizer."""
    folder = tmp_path_factory.mktemp("models") / "target"
    torch.manual_seed(0)
    LlamaForCausalLM(target_config(vocab_size=260)).save_pretrained(folder)
    chat_tokenizer(CHATML).save_pretrained(folder)
    return folder


def interpreter(folder: Path, version: str) -> Path:
    """Something like an interpreter with a vLLM of this version: it writes down how it was called."""
    path = folder / f"python-{version or 'none'}"
    path.write_text(
        f"""#!{sys.executable}
import json, os, sys
if sys.argv[1] == "-c":
    sys.exit("no such package") if not "{version}" else print("{version}")
else:
    said = {{"words": sys.argv[1:], "path": os.environ["PYTHONPATH"]}}
    open("{folder / "called.json"}", "w").write(json.dumps(said))
"""
    )
    path.chmod(0o755)
    return path


def test_a_dry_run_prints_the_command(run: Run, model: Path, tmp_path: Path) -> None:
    options = ["--aux-layer-ids", "1,2", "--max-length", "64", "--states-folder", tmp_path / "states", "--dry-run"]
    outcome = run("features", "serve", model, *options, "--", "--enforce-eager")
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.startswith("PYTHONPATH=")
    assert "[1, 2, 4]" in outcome.out
    assert "--max-model-len 65" in outcome.out
    assert outcome.out.rstrip().endswith("--enforce-eager")
    assert not (tmp_path / "states").exists()


def test_it_becomes_vllm_with_the_connector_alone_on_its_path(model: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "eyas", "features", "serve", str(model), "--aux-layer-ids", "1,2,3"]
    command += ["--vllm-python", str(interpreter(tmp_path, "0.32.0+cpu")), "--states-folder", str(tmp_path / "states")]
    environment = {**os.environ, "PYTHONPATH": str(Path(eyas.__file__).parent.parent)}
    subprocess.run(command, check=True, env=environment, timeout=300)
    called = json.loads((tmp_path / "called.json").read_text())
    assert called["words"][:4] == ["-m", "vllm.entrypoints.cli.main", "serve", str(model)]
    assert [path.name for path in Path(called["path"]).glob("*.py") if path.name != "__init__.py"] == ["eyas_states.py"]
    assert (tmp_path / "states").is_dir()


def test_another_vllm_is_refused_by_name(run: Run, model: Path, tmp_path: Path) -> None:
    asked = ("features", "serve", model, "--aux-layer-ids", "1,2", "--vllm-python")
    run(*asked, interpreter(tmp_path, "0.31.4")).assert_refused("vLLM 0.31.4", "0.32.x only", "install vLLM 0.32.0")
    run(*asked, interpreter(tmp_path, "")).assert_refused("has no vLLM")
    run(*asked, tmp_path / "nowhere").assert_refused("nowhere cannot be run")


def test_a_target_that_attends_by_mla_is_refused_by_name(run: Run, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "deepseek_v3", "num_hidden_layers": 8, "hidden_size": 64, "vocab_size": 96})
    )
    run("features", "serve", tmp_path).assert_refused("deepseek_v3", "MLA", 'features.source = "live"')


def test_layers_that_are_no_numbers_are_refused(run: Run, model: Path) -> None:
    run("features", "serve", model, "--aux-layer-ids", "1,b").assert_refused("'1,b'", "2,15,27")
    run("features", "serve", model, "--aux-layer-ids", "1,9").assert_refused("9 is outside 0..4")


@pytest.mark.slow
def test_a_run_from_a_server_ends_in_a_drafter_and_prints_the_command_it_needs(model: Path, tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text("".join(f"{json.dumps({'messages': chat})}\n" for chat in CHATS))
    server = StatesServer(Target.load(str(model)), tmp_path / "states", AUX_IDS).start()
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        f'[target]\nsource = "{model}"\n'
        f'[data]\nfiles = ["{tmp_path / "data.jsonl"}"]\nworkers = 1\nmax_length = 128\npack_length = 256\n'
        "held_out_share = 0.2\n"
        f'[features]\nsource = "served"\nservers = ["{server.url}"]\nstates_folder = "{server.folder}"\n'
        f"[drafter]\naux_layer_ids = {list(AUX_IDS)}\n"
        f'[train]\nsteps = 2\ndepths = 1\n[output]\nfolder = "{tmp_path / "run"}"\n'
    )
    # As a process: how it ends counts, with threads that still ask for packs which nobody will take.
    environment = {**os.environ, "PYTHONPATH": str(Path(eyas.__file__).parent.parent)}
    done = subprocess.run(
        [sys.executable, "-m", "eyas", "train", str(recipe)],
        env=environment,
        timeout=300,
        capture_output=True,
        text=True,
    )
    server.stop()
    assert done.returncode == 0, done.stderr
    assert "such a server is started by: PYTHONPATH=" in done.stderr
    assert "[1, 2, 3, 4]" in done.stderr
    load_drafter(str(tmp_path / "run" / "drafter"))
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    assert record["served"]["failed"] == 0
    assert record["served"]["documents"] > 0
    assert list(server.folder.iterdir()) == []
