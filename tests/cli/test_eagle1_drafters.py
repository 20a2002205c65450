"""An EAGLE-1 drafter by every command: told, converted, planned for, handed to vLLM by its method, run, or refused."""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING, Any

import pytest
import torch

from eyas.doctor.candidate import prepare_candidate
from eyas.drafter.checkpoint import checkpoint_of, read_checkpoint
from eyas.errors import UserError
from eyas.plan.resolve import DEFAULT_CONFIG
from eyas.target.facts import facts_of
from eyas.train.recipe import DrafterSettings
from eyas.train.upgrade import read_start
from published_eagle1 import publish
from tiny import HIDDEN, VOCAB, eagle1_config, random_drafter, target_config

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from eyas.drafter.model import Drafter

    Run = Callable[..., Any]


def default_shaped() -> Drafter:
    """For the default target."""
    keys = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
    sizes = {key: DEFAULT_CONFIG[key] for key in keys}
    sizes |= {"draft_vocab_size": sizes["vocab_size"], "target_hidden_size": sizes["hidden_size"]}
    return random_drafter(eagle1_config(**sizes, max_position_embeddings=8192), own_embedding=False)


@pytest.fixture
def published(tmp_path: Path) -> Path:
    drafter = random_drafter(eagle1_config(), own_embedding=False)
    return publish(drafter, torch.randn(VOCAB, HIDDEN), tmp_path / "published")


@pytest.fixture
def for_default(tmp_path: Path) -> Path:
    from eyas.drafter.checkpoint import write_checkpoint

    write_checkpoint(checkpoint_of(default_shaped()), tmp_path / "drafter")
    return tmp_path / "drafter"


def test_it_is_told_what_it_is(run: Run, published: Path, target: Path) -> None:
    outcome = run("check", published, "--target", target)
    assert outcome.code == 0
    said = dict(line.split(None, 1) for line in outcome.out.splitlines())
    assert said["drafter"].startswith("EAGLE-1/2 (vllm format)")
    assert "behind the target's last norm" in said["layers"]
    assert said["flags"] == "bias of fc no; fc_norm, norm_output, norm_before_fc, norm_before_residual do not apply"
    assert said["from"].split() == ["target", "head"]
    assert said["verdict"].startswith("works with")


def test_it_is_converted_from_the_published_files(run: Run, published: Path, tmp_path: Path) -> None:
    outcome = run("convert", published, "--out", tmp_path / "out", "--to", "vllm")
    assert (outcome.code, outcome.out) == (0, f"EAGLE-1/2 drafter, vllm -> vllm: {tmp_path / 'out'}\n")
    assert run("check", tmp_path / "out").code == 0
    run("convert", published, "--out", tmp_path / "no", "--to", "speculators").assert_refused(
        "EAGLE-1", "use --to vllm"
    )
    run("convert", published, "--out", tmp_path / "no", "--to", "vllm", "--quantize", "int8").assert_refused(
        "in 8 bits"
    )


def test_a_plan_counts_it_and_names_its_method(run: Run, for_default: Path) -> None:
    record = json.loads(run("plan", "smollm2", "--drafter", for_default, "--json").out)
    assert record["drafter"]["family"] == "EAGLE-1/2"
    eyas = next(shlex.split(line) for line in record["commands"] if line.startswith("eyas serve"))
    assert json.loads(eyas[eyas.index("--speculative-config") + 1])["method"] == "eagle"
    run("plan", "smollm2", "--drafter", for_default, "--train", "1M").assert_refused("EAGLE-1", "leave it out")


def test_vllm_is_told_its_method(run: Run, for_default: Path, tmp_path: Path) -> None:
    (tmp_path / "default").mkdir()
    (tmp_path / "default" / "config.json").write_text(json.dumps(dict(DEFAULT_CONFIG)))
    words = ("export", "vllm-command", tmp_path / "default", "--speculative-config")
    config = {"model": str(for_default), "num_speculative_tokens": 2}
    line = shlex.split(run(*words, json.dumps(config)).out)
    given = json.loads(line[line.index("--speculative-config") + 1])
    assert given == {"model": str(for_default), "method": "eagle", "num_speculative_tokens": 2}
    wrong = run(*words, json.dumps({**config, "method": "eagle3"}))
    assert wrong.code == 2
    assert "asks for method 'eagle3'" in wrong.err
    assert "of method 'eagle'; say that, or leave method out" in wrong.err


def test_a_server_is_not_started_for_another_method(run: Run, for_default: Path) -> None:
    wrong = run("serve", "--speculative-config", json.dumps({"model": str(for_default), "method": "eagle3"}))
    wrong.assert_refused("asks for method 'eagle3'", "of method 'eagle'")
    run("serve", "--speculative-config", '{"method": "eagle"}').assert_refused("method 'eagle'", "of method 'eagle3'")


def test_the_doctor_and_training_refuse_it_by_name(published: Path) -> None:
    target: Any = None  # nobody gets as far as that
    with pytest.raises(UserError, match=r"is an EAGLE-1 drafter; the doctor .* measure it with `eyas eval`"):
        prepare_candidate(read_checkpoint(str(published)), "it", target, source="it")
    with pytest.raises(UserError, match=r"an EAGLE-1 drafter, and eyas trains EAGLE-3 drafters"):
        read_start(DrafterSettings(init_from=str(published)), facts_of(target_config(), "tiny"))


@pytest.mark.default
def test_it_drafts_for_the_default_target_and_changes_no_answer(run: Run, for_default: Path) -> None:
    asked = ("generate", "Name a bird.", "--max-tokens", "12", "--seed", "3", "--temperature", "0.8", "--json")
    plain = json.loads(run(*asked, "--drafter", "none").out)
    outcome = run(*asked, "--drafter", for_default, "--tree", "3x2x6")
    assert outcome.code == 0, outcome.err
    assert json.loads(outcome.out)["answer"] == plain["answer"]
