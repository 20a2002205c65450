"""A drafter grows and says what it said; what was added learns."""

from pathlib import Path
from typing import Any

import pytest
import torch

from eyas.drafter.checkpoint import load_drafter
from eyas.target.model import Target
from eyas.target.parts import TargetParts
from eyas.train.init import last_norm
from eyas.train.recipe import read_recipe
from train.test_cache import recipe_of, trained
from train.test_upgrade import _without_none, scores_SMW, stored, taken_up

EAGLE31: dict[str, Any] = {"fc_norm": True, "norm_output": True}


@pytest.mark.parametrize(
    "larger", [{"intermediate_size": 192}, {"layers": 3}, {"intermediate_size": 200, "layers": 2}], ids=str
)
@pytest.mark.parametrize("flags", [EAGLE31, {"mlp_bias": True, "attention_bias": True, **EAGLE31}], ids=["", "biases"])
def test_a_larger_drafter_begins_as_the_one_it_comes_from(
    tiny_target: Target, tmp_path: Path, flags: dict[str, Any], larger: dict[str, Any]
) -> None:
    drafter = stored(tmp_path / "drafter", draft_vocab_size=70, **flags)
    grown = taken_up(tiny_target, tmp_path / "drafter", **larger)
    assert grown.config.num_hidden_layers == larger.get("layers", 1)
    assert grown.config.intermediate_size == larger.get("intermediate_size", 128)
    torch.testing.assert_close(scores_SMW(grown, tiny_target), scores_SMW(drafter, tiny_target), rtol=1e-4, atol=1e-4)
    assert torch.equal(grown.vocab().target_ids_W, drafter.vocab().target_ids_W)


def test_tokens_that_stay_keep_their_rows_and_new_ones_get_the_targets(tiny_target: Target, tmp_path: Path) -> None:
    drafter = stored(tmp_path / "drafter", draft_vocab_size=70, **EAGLE31)
    assert drafter.lm_head is not None
    smaller = taken_up(tiny_target, tmp_path / "drafter", draft_vocab_size=40)
    stay = torch.isin(drafter.vocab().target_ids_W, torch.arange(40))
    assert smaller.lm_head is not None
    rows_W = torch.isin(torch.arange(40), drafter.vocab().target_ids_W)
    assert torch.equal(smaller.lm_head.weight[rows_W], drafter.lm_head.weight[stay])
    whole = taken_up(tiny_target, tmp_path / "drafter", draft_vocab_size=None)
    assert whole.d2t is None
    assert whole.lm_head is not None
    new_V = ~torch.isin(torch.arange(96), drafter.vocab().target_ids_W)
    target = TargetParts.of(tiny_target)
    norm_D = last_norm(target)
    assert norm_D is not None
    theirs = target.head.weight_VD[new_V] * norm_D
    torch.testing.assert_close(
        torch.nn.functional.cosine_similarity(whole.lm_head.weight[new_V], theirs), torch.ones(int(new_V.sum()))
    )


def test_a_run_trains_what_was_added(tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored(tmp_path / "drafter", draft_vocab_size=70, **EAGLE31)
    tables = recipe_of(tmp_path / "run").resolved()
    tables["drafter"] = {
        "init_from": str(tmp_path / "drafter"),
        "layers": 2,
        "intermediate_size": 160,
        "draft_vocab_size": 50,
    }
    tables["train"] |= {"steps": 2}
    outcome, _ = trained(monkeypatch, tiny_target, read_recipe(_without_none(tables)))
    finished = load_drafter(str(outcome.drafters["drafter"]))
    assert finished.config.draft_vocab_size == 50
    weights = finished.state_dict()
    assert weights["layers.0.mlp.down_proj.weight"][:, 128:].abs().max() > 0
    assert weights["layers.1.self_attn.o_proj.weight"].abs().max() > 0
