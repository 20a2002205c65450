"""`check` describes a drafter, and finds faults that servers would load silently."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from drafter_folders import edit
from each import each
from eyas.drafter.check import CheckReport, check
from eyas.drafter.checkpoint import checkpoint_of, write_checkpoint
from eyas.drafter.eagle1_model import new_drafter
from eyas.drafter.layer_json import IDS_KEY, NORM_FLAGS
from eyas.errors import UserError
from eyas.target.facts import TargetFacts, read_embedding
from tiny import drafter_config, random_drafter


def save(folder: Path, *, layout: str = "vllm", shipped: bool = False, **changes: Any) -> str:
    drafter = random_drafter(drafter_config(**changes), own_embedding=shipped)
    write_checkpoint(checkpoint_of(drafter), folder, layout=layout)
    return str(folder)


def target(**changes: Any) -> TargetFacts:
    facts = {
        "source": "the-target",
        "model_type": "llama",
        "num_hidden_layers": 8,
        "hidden_size": 64,
        "vocab_size": 96,
        "max_position_embeddings": 512,
    }
    return TargetFacts(**{**facts, **changes})


def only_finding(report: CheckReport, severity: str, text: str) -> None:
    assert [finding.severity for finding in report.findings] == [severity]
    assert text in report.findings[0].message
    assert report.ok == (severity != "error")


@each("layout", ["vllm", "sglang", "speculators"])
@each("changes", [{}, {"fc_norm": True, "norm_output": True}, {"draft_vocab_size": 32}])
def test_a_clean_drafter_has_no_findings(tmp_path: Path, layout: str, changes: dict[str, Any]) -> None:
    report = check(save(tmp_path / "it", layout=layout, **changes), target=target(), target_embedding=lambda: None)
    assert report.findings == ()
    assert report.ok
    assert report.layout == layout


def test_the_report_states_the_facts(tmp_path: Path) -> None:
    source = save(tmp_path / "it", fc_norm=True, norm_output=True, draft_vocab_size=32)
    report = check(source, target=target())
    config = report.config
    assert (report.source, report.target, report.family) == (source, "the-target", "EAGLE-3.1")
    assert config == drafter_config(fc_norm=True, norm_output=True, draft_vocab_size=32)
    assert report.parameters == sum(weight.numel() for weight in new_drafter(config).parameters())
    assert report.bytes == 4 * report.parameters + 8 * 32 + 96  # float32 weights, int64 d2t, bool t2d
    assert report.kv_bytes_per_token == 2 * 32 * 4
    assert (report.ships_embedding, report.ships_head) == (False, True)
    as_json = json.loads(json.dumps(report.as_json()))
    assert as_json["ok"] is True
    assert as_json["config"]["aux_layer_ids"] == [1, 2, 3]


def test_the_report_says_what_comes_from_the_target(tmp_path: Path) -> None:
    drafter = random_drafter(drafter_config(), own_embedding=True, own_head=False)
    write_checkpoint(checkpoint_of(drafter), tmp_path / "it")
    report = check(str(tmp_path / "it"))
    assert (report.ships_embedding, report.ships_head, report.target) == (True, False, None)


@each("value", ["absent", None])
@each("flag", NORM_FLAGS)
def test_a_missing_flag_is_a_warning(tmp_path: Path, flag: str, value: str | None) -> None:
    source = save(tmp_path / "it")
    edit(source, drop=(flag,), **({} if value == "absent" else {flag: None}))
    only_finding(check(source), "warning", f"{flag} is not written in config.json and counts as false")


def test_nested_only_ids_are_a_warning_that_names_both_readings(tmp_path: Path) -> None:
    source = save(tmp_path / "it")
    edit(source, drop=(IDS_KEY,))
    only_finding(check(source), "warning", "[1, 2, 3] stand only in eagle_config")
    assert "[2, 3, 4] finished layers" in check(source).findings[0].message


def test_a_missing_number_of_states_is_an_error_unless_it_is_three(tmp_path: Path) -> None:
    five = save(tmp_path / "five", num_aux_hidden_states=5, aux_layer_ids=(0, 1, 2, 3, 4))
    edit(five, drop=("num_aux_hidden_states", "eagle_config"))
    only_finding(check(five), "error", "num_aux_hidden_states is not written and is 5 here; vLLM would assume 3")
    three = save(tmp_path / "three")
    edit(three, drop=("num_aux_hidden_states", "eagle_config"))
    assert check(three).findings == ()


def test_a_tied_flag_beside_a_head_is_a_warning(tmp_path: Path) -> None:
    source = save(tmp_path / "it")
    edit(source, tie_word_embeddings=True)
    only_finding(check(source), "warning", "tie_word_embeddings is true beside a shipped lm_head")


@each(
    ("facts", "severity", "text"),
    [
        ({"vocab_size": 97}, "error", "vocab_size 96 is not the target's 97; this drafter was trained for another"),
        ({"hidden_size": 128}, "error", "target_hidden_size 64 is not the target's hidden_size 128"),
        ({"num_hidden_layers": 2}, "error", "auxiliary layer id 3 is outside the target's 0..2"),
        ({"max_position_embeddings": 513}, "warning", "max_position_embeddings 512 is below the target's 513"),
    ],
)
def test_a_drafter_of_another_target_is_found(tmp_path: Path, facts: dict[str, Any], severity: str, text: str) -> None:
    only_finding(check(save(tmp_path / "it"), target=target(**facts)), severity, text)


@each("facts", [{"num_hidden_layers": 3}, {"max_position_embeddings": 512}, {"max_position_embeddings": None}])
def test_the_limits_themselves_are_allowed(tmp_path: Path, facts: dict[str, Any]) -> None:
    assert check(save(tmp_path / "it"), target=target(**facts)).findings == ()


def test_absent_ids_are_noted_with_what_servers_assume(tmp_path: Path) -> None:
    source = save(tmp_path / "it", aux_layer_ids=None)
    only_finding(check(source, target=target()), "note", "servers assume [2, 4, 5]")
    assert check(source).findings == ()


def test_absent_ids_of_another_number_are_an_error(tmp_path: Path) -> None:
    source = save(tmp_path / "it", aux_layer_ids=None, num_aux_hidden_states=2)
    only_finding(check(source, target=target()), "error", "num_aux_hidden_states is 2; servers would assume the 3 ids")


@each(("stale", "found"), [(False, 0), (True, 1)])
@each("name", ["model.embed_tokens.weight", "transformer.wte.weight"])
def test_a_stale_copy_of_the_embeddings_is_a_warning(tmp_path: Path, stale: bool, found: int, name: str) -> None:
    drafter = random_drafter(drafter_config())
    assert drafter.embed_tokens is not None
    write_checkpoint(checkpoint_of(drafter), tmp_path / "it")
    theirs = torch.randn(96, 64) if stale else drafter.embed_tokens.weight.bfloat16()
    folder = tmp_path / "target"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    save_file({"lm_head.weight": torch.zeros(1), name: theirs}, folder / "model.safetensors")
    report = check(str(tmp_path / "it"), target=target(), target_embedding=lambda: read_embedding(str(folder)))
    assert len(report.findings) == found
    if found:
        only_finding(report, "warning", "embed_tokens differs from the target's (median cosine 0.0")


def test_the_targets_embeddings_are_not_read_when_none_are_shipped(tmp_path: Path) -> None:
    def never() -> None:
        raise AssertionError("read for nothing")

    assert check(save(tmp_path / "it"), target=target(), target_embedding=never).ok


def test_a_damaged_target_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"garbage")
    with pytest.raises(UserError, match=r"cannot read the target's .*model.safetensors .*again"):
        read_embedding(str(tmp_path))


def test_the_embedding_of_a_target_on_the_hub_is_not_read() -> None:
    assert read_embedding("org/somewhere-else") is None


def test_every_problem_is_reported_and_not_only_the_first(tmp_path: Path) -> None:
    source = save(tmp_path / "it", fc_norm=True)
    edit(source, fc_norm=False, vocab_size=95, draft_vocab_size=95)
    report = check(source, target=target())
    errors = [finding.message for finding in report.findings if finding.severity == "error"]
    assert sum("fc_norm is false" in message for message in errors) == 3
    assert any("lm_head.weight is [96, 64], expected [95, 64]" in message for message in errors)
    assert any("vocab_size 95 is not the target's 96" in message for message in errors)
    assert not report.ok
