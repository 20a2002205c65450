"""A drafter grows and says what it said; what was added learns."""

from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from each import each
from eyas.drafter.checkpoint import checkpoint_of, load_drafter, write_checkpoint
from eyas.errors import UserError
from eyas.target.model import Target
from eyas.target.parts import TargetParts
from eyas.train.recipe_file import read_recipe
from train.test_cache import recipe_of, trained
from train.test_upgrade import _without_none, scores_SMW, stored, taken_up

EAGLE31: dict[str, Any] = {"fc_norm": True, "norm_output": True}


@each("larger", [{"intermediate_size": 192}, {"layers": 3}, {"intermediate_size": 200, "layers": 2}])
@each("flags", [EAGLE31, {"mlp_bias": True, "attention_bias": True, **EAGLE31}])
def test_a_larger_drafter_begins_as_the_one_it_comes_from(
    tiny_target: Target, tmp_path: Path, flags: dict[str, Any], larger: dict[str, Any]
) -> None:
    drafter = stored(tmp_path / "drafter", draft_vocab_size=70, **flags)
    grown = taken_up(tiny_target, tmp_path / "drafter", **larger)
    assert grown.config.num_hidden_layers == larger.get("layers", 1)
    assert grown.config.intermediate_size == larger.get("intermediate_size", 128)
    torch.testing.assert_close(scores_SMW(grown, tiny_target), scores_SMW(drafter, tiny_target), rtol=1e-4, atol=1e-4)
    assert torch.equal(grown.vocab().target_ids_W, drafter.vocab().target_ids_W)


@each("flags", [EAGLE31, {}, {"norm_before_fc": True}])
@each("fc_norm", [True, False])
def test_a_drafter_that_reads_more_states_begins_as_it_was(
    tiny_target: Target, tmp_path: Path, flags: dict[str, Any], fc_norm: bool
) -> None:
    stored(tmp_path / "drafter", **flags)
    if not fc_norm and "norm_before_fc" in flags:
        with pytest.raises(UserError, match=r"one norm over all of them \(norm_before_fc\)"):
            taken_up(tiny_target, tmp_path / "drafter", aux_layer_ids=(1, 2, 3, 4), fc_norm=False)
        return
    choice: dict[str, Any] = {"fc_norm": fc_norm or "fc_norm" in flags}
    as_it_is = taken_up(tiny_target, tmp_path / "drafter", **choice)
    more = taken_up(tiny_target, tmp_path / "drafter", aux_layer_ids=(0, 1, 2, 3, 4), **choice)
    assert more.config.aux_layer_ids == (0, 1, 2, 3, 4)
    assert more.config.num_aux_hidden_states == 5
    torch.testing.assert_close(scores_SMW(more, tiny_target), scores_SMW(as_it_is, tiny_target), rtol=1e-4, atol=1e-4)


def test_states_that_a_drafter_knows_are_not_taken_from_it(tiny_target: Target, tmp_path: Path) -> None:
    stored(tmp_path / "drafter", **EAGLE31)
    with pytest.raises(UserError, match=r"layers can be added, not taken away; .* or add \[2, 3\]"):
        taken_up(tiny_target, tmp_path / "drafter", aux_layer_ids=(1, 4))
    with pytest.raises(UserError, match=r"auxiliary layer id 9 is outside"):
        taken_up(tiny_target, tmp_path / "drafter", aux_layer_ids=(1, 2, 3, 9))


def test_tokens_that_stay_keep_their_rows(tiny_target: Target, tmp_path: Path) -> None:
    drafter = stored(tmp_path / "drafter", draft_vocab_size=70, **EAGLE31)
    smaller = taken_up(tiny_target, tmp_path / "drafter", draft_vocab_size=40)
    assert drafter.lm_head is not None
    assert smaller.lm_head is not None
    stay_W = torch.isin(drafter.vocab().target_ids_W, torch.arange(40))
    kept = smaller.lm_head.weight[torch.isin(torch.arange(40), drafter.vocab().target_ids_W)]
    assert torch.equal(kept, drafter.lm_head.weight[stay_W])


def test_rows_of_new_tokens_are_to_the_targets_as_the_others_are(tiny_target: Target, tmp_path: Path) -> None:
    drafter = tiny.random_drafter(tiny.drafter_config(draft_vocab_size=70, **EAGLE31), own_embedding=False)
    assert drafter.lm_head is not None
    theirs_VE = TargetParts.of(tiny_target).head.weight_VD
    moved_VD = theirs_VE @ torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        drafter.lm_head.weight.copy_(moved_VD[drafter.vocab().target_ids_W])
    write_checkpoint(checkpoint_of(drafter), tmp_path / "drafter")
    whole = taken_up(tiny_target, tmp_path / "drafter", draft_vocab_size=None)
    assert whole.d2t is None
    assert whole.lm_head is not None
    torch.testing.assert_close(whole.lm_head.weight, moved_VD, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_a_run_trains_what_was_added(tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored(tmp_path / "drafter", draft_vocab_size=70, **EAGLE31)
    tables = recipe_of(tmp_path / "run").resolved()
    tables["drafter"] = {
        "init_from": str(tmp_path / "drafter"),
        "layers": 2,
        "intermediate_size": 160,
        "draft_vocab_size": 50,
        "aux_layer_ids": [0, 1, 2, 3, 4],
    }
    tables["train"] |= {"steps": 2}
    outcome, _ = trained(monkeypatch, tiny_target, read_recipe(_without_none(tables)))
    finished = load_drafter(str(outcome.drafters["drafter"]))
    assert finished.config.draft_vocab_size == 50
    weights = finished.state_dict()
    assert weights["layers.0.mlp.down_proj.weight"][:, 128:].abs().max() > 0
    assert weights["fc.weight"][:, -64:].abs().max() > 0
    assert not torch.equal(weights["fc_norm.0.weight"], weights["fc_norm.4.weight"])
    assert weights["layers.1.self_attn.o_proj.weight"].abs().max() > 0
