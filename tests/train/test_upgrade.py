"""A run starts from an existing drafter as it is, EAGLE-3 becomes EAGLE-3.1, and drafters grow."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import tiny
from each import each
from eyas.drafter.checkpoint import build_drafter, checkpoint_of, load_drafter, write_checkpoint
from eyas.drafter.model import Drafter
from eyas.errors import UserError
from eyas.target.model import Target
from eyas.target.parts import TargetParts
from eyas.train.attention import attention_for
from eyas.train.batch import TrainingBatch
from eyas.train.features import Features
from eyas.train.loop import estimate, train
from eyas.train.recipe import DrafterSettings
from eyas.train.recipe_file import read_recipe
from eyas.train.run import _text_reader
from eyas.train.schedule import RunLength
from eyas.train.sources.live import LiveSource
from eyas.train.state import TrainState
from eyas.train.unroll import unroll
from eyas.train.upgrade import init_from_checkpoint
from train.test_cache import recipe_of, trained
from train.test_loop import Diary, corpus_of, loop_config_of, packs_of, train_state_of

DEPTHS = 3


def batch_of_text() -> TrainingBatch:
    return packs_of(corpus_of(10, seed=4), length=240).epoch(0)[0].build()


def taken_up(target: Target, folder: Path, *, louder: float = 1.0, **choice: Any) -> Drafter:
    """Drafter in `folder` after `init_from_checkpoint`; `louder` scales the states of first tokens."""

    def read_text(aux_layer_ids: Sequence[int]) -> tuple[TrainingBatch, Features]:
        batch = batch_of_text()
        features = LiveSource(target, aux_layer_ids)(batch)
        aux_TX = features.aux_TX.clone()
        aux_TX[batch.position_T == 0] *= louder
        return batch, replace(features, aux_TX=aux_TX)

    return init_from_checkpoint(
        TargetParts.of(target),
        DrafterSettings(init_from=str(folder), **choice),
        dtype="float32",
        seed=5,
        read_text=read_text,
        choose_vocabulary=lambda size: torch.arange(size or 96),
    )


def stored(folder: Path, *, own_embedding: bool = True, own_head: bool = True, **flags: Any) -> Drafter:
    """Save a drafter with random weights, norms included."""
    drafter = tiny.random_drafter(tiny.drafter_config(**flags), own_embedding=own_embedding, own_head=own_head)
    write_checkpoint(checkpoint_of(drafter), folder)
    return drafter


def scores_SMW(drafter: Drafter, target: Target) -> Tensor:
    """Logits at every depth."""
    batch = batch_of_text()
    aux_TX = LiveSource(target, drafter.config.aux_layer_ids or tiny.AUX_IDS)(batch).aux_TX
    attend = attention_for(batch, torch.float32, compiled=False)
    with torch.no_grad():
        return drafter.logits(unroll(drafter, batch, aux_TX, depths=DEPTHS, attend=attend))


@each("flags", [{}, {"fc_norm": True, "norm_output": True}, {"draft_vocab_size": 70}, {"norm_before_fc": True}])
def test_a_drafter_is_loaded_unchanged(tiny_target: Target, tmp_path: Path, flags: dict[str, Any]) -> None:
    drafter = stored(tmp_path / "drafter", **flags)
    same = {key: bool(flags.get(key)) for key in ("fc_norm", "norm_output")}
    again = taken_up(tiny_target, tmp_path / "drafter", **same)
    assert torch.equal(scores_SMW(again, tiny_target), scores_SMW(drafter, tiny_target))
    assert torch.equal(again.vocab().target_ids_W, drafter.vocab().target_ids_W)
    trainable = {name for name, p in again.named_parameters() if p.requires_grad}
    assert trainable == {name for name, _ in again.named_parameters()} - {"embed_tokens.weight"}


def test_a_shared_head_becomes_the_drafters_own(tiny_target: Target, tmp_path: Path) -> None:
    drafter = stored(tmp_path / "drafter", own_embedding=False, own_head=False)
    drafter.share_target(tiny_target.embedding(), tiny_target.head())
    again = taken_up(tiny_target, tmp_path / "drafter", fc_norm=False, norm_output=False)
    assert torch.equal(scores_SMW(again, tiny_target), scores_SMW(drafter, tiny_target))
    assert again.shares_embedding
    assert not again.shares_head
    assert again.lm_head is not None
    assert again.lm_head.weight.requires_grad


def test_norm_output_folds_exactly_with_norm_before_residual(tiny_target: Target, tmp_path: Path) -> None:
    before = scores_SMW(stored(tmp_path / "drafter", norm_before_residual=True), tiny_target)
    upgraded = taken_up(tiny_target, tmp_path / "drafter", fc_norm=False)
    assert upgraded.config.norm_output
    torch.testing.assert_close(scores_SMW(upgraded, tiny_target), before, rtol=1e-3, atol=1e-3)


def test_norm_output_keeps_depth_zero_and_typical_lengths(tiny_target: Target, tmp_path: Path) -> None:
    drafter = stored(tmp_path / "drafter")
    upgraded = taken_up(tiny_target, tmp_path / "drafter", fc_norm=False)
    before, after = scores_SMW(drafter, tiny_target), scores_SMW(upgraded, tiny_target)
    torch.testing.assert_close(after[0], before[0], rtol=1e-3, atol=1e-3)
    # Deeper, the residual's length differs between tokens, so scores are close and not equal.
    unfolded = _flags_only(drafter, norm_output=True)
    far = (scores_SMW(unfolded, tiny_target)[1:] - before[1:]).norm()
    assert 0 < float((after[1:] - before[1:]).norm()) < 0.5 * float(far)


@each("norm_before_fc", [False, True])
def test_fc_norm_keeps_the_typical_input_of_fc(tiny_target: Target, tmp_path: Path, norm_before_fc: bool) -> None:
    drafter = stored(tmp_path / "drafter", norm_before_fc=norm_before_fc)
    upgraded = taken_up(tiny_target, tmp_path / "drafter", norm_output=False)
    assert upgraded.config.fc_norm
    assert not upgraded.config.norm_before_fc
    aux_TX = LiveSource(tiny_target, tiny.AUX_IDS)(batch_of_text()).aux_TX
    with torch.no_grad():
        before, after = drafter.fuse(aux_TX), upgraded.fuse(aux_TX)
    assert float((after - before).norm() / before.norm()) < 0.25


def test_outliers_do_not_set_the_scale(tiny_target: Target, tmp_path: Path) -> None:
    stored(tmp_path / "drafter")
    plain, loud = (taken_up(tiny_target, tmp_path / "drafter", louder=louder) for louder in (1.0, 1000.0))
    assert plain.fc_norm is not None
    assert loud.fc_norm is not None
    for ours, theirs in zip(plain.fc_norm, loud.fc_norm, strict=True):
        torch.testing.assert_close(ours.weight, theirs.weight, rtol=0.05, atol=0)


def _flags_only(drafter: Drafter, **flags: bool) -> Drafter:
    """Drafter with flags set in its config and no weights changed."""
    checkpoint = checkpoint_of(drafter)
    tensors = dict(checkpoint.tensors)
    if flags.get("fc_norm"):
        tensors |= {f"fc_norm.{i}.weight": torch.ones(tiny.HIDDEN) for i in range(3)}
    return build_drafter(replace(checkpoint, config=replace(checkpoint.config, **flags), tensors=tensors))


def train_state_with(target: Target, drafter: Drafter) -> TrainState:
    return TrainState("drafter", drafter, train_state_of(target).settings)


def more(target: Target, state: TrainState, folder: Path, steps: int) -> TrainState:
    """Train for some steps."""
    source = LiveSource(target, tiny.AUX_IDS)
    plan = loop_config_of(folder, length=RunLength(steps=steps), packs_per_step=1)
    train([state], packs_of(corpus_of(200), length=256), [], source, plan, observer=Diary())
    return state


def loss_and_length(target: Target, state: TrainState) -> tuple[float, float]:
    """Loss and acceptance length on held-out text."""
    source, held_out = LiveSource(target, tiny.AUX_IDS), packs_of(corpus_of(16, seed=9), length=256).epoch(0)
    loss, count = 0.0, 0
    for batch in (planned.build() for planned in held_out):
        loss += float(state.forward_loss(batch, source(batch), depths=DEPTHS).loss_S.sum())
        count += sum(batch.counts(DEPTHS))
    counts = estimate([state], held_out, source, depths=DEPTHS)[state.name]
    return loss / count, counts.acceptance_length


@pytest.mark.slow
def test_an_upgraded_drafter_keeps_its_accuracy_and_learns(tiny_target: Target, tmp_path: Path) -> None:
    old = more(tiny_target, train_state_of(tiny_target, fc_norm=False), tmp_path / "old", 60)
    write_checkpoint(checkpoint_of(old.drafter), tmp_path / "drafter")
    upgraded = train_state_with(tiny_target, taken_up(tiny_target, tmp_path / "drafter"))
    assert upgraded.drafter.config.family == "EAGLE-3.1"
    naive = _flags_only(old.drafter, fc_norm=True, norm_output=True).requires_grad_(True)
    naive.share_target(tiny_target.embedding(), tiny_target.head())
    fresh = train_state_of(tiny_target)
    was, length = loss_and_length(tiny_target, old)
    now, upgraded_length = loss_and_length(tiny_target, upgraded)
    assert now < 1.05 * was
    assert upgraded_length > 0.95 * length
    assert loss_and_length(tiny_target, train_state_with(tiny_target, naive))[0] > now
    assert loss_and_length(tiny_target, fresh)[0] > 1.3 * was
    after, _ = loss_and_length(tiny_target, more(tiny_target, upgraded, tmp_path / "upgraded", 25))
    scratch, _ = loss_and_length(tiny_target, more(tiny_target, fresh, tmp_path / "fresh", 25))
    assert after < was
    assert after < 0.85 * scratch


def test_a_run_upgrades_its_starting_point(
    tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = stored(tmp_path / "drafter", draft_vocab_size=70)
    tables = recipe_of(tmp_path / "run").resolved()
    tables["drafter"] = {"init_from": str(tmp_path / "drafter")}
    tables["train"] |= {"steps": 2}
    outcome, _ = trained(monkeypatch, tiny_target, read_recipe(_without_none(tables)))
    finished = load_drafter(str(outcome.drafters["drafter"]))
    assert finished.config.family == "EAGLE-3.1"
    assert torch.equal(finished.vocab().target_ids_W, drafter.vocab().target_ids_W)


def _without_none(tables: dict[str, Any]) -> dict[str, Any]:
    return {
        name: _without_none(value) if isinstance(value, dict) else value
        for name, value in tables.items()
        if value is not None
    }


@each(
    ("flags", "choice", "message"),
    [
        ({"fc_norm": True}, {"fc_norm": False}, r"drafter\.fc_norm is false.*not taken away"),
        ({"norm_output": True}, {"norm_output": False}, r"drafter\.norm_output is false.*not taken away"),
        ({}, {"norm_before_residual": True}, r"drafter\.norm_before_residual is true.*leave"),
        ({"norm_before_fc": True}, {"norm_before_fc": True}, r"takes the place of that norm"),
        ({}, {"aux_layer_ids": (1, 2, 4)}, r"aux_layer_ids is \[1, 2, 4\].*layers \[1, 2, 3\].*leave"),
        ({"aux_layer_ids": (1, 2, 9)}, {}, r"reads layer 9 but tiny has 4"),
        ({"aux_layer_ids": None, "num_aux_hidden_states": 2}, {"aux_layer_ids": (1, 2, 3)}, r"reads 2 target states"),
        ({}, {"intermediate_size": 64}, r"drafter\.intermediate_size is 64 but .* has 128, and .* grow, not shrink"),
        ({"num_hidden_layers": 3}, {"layers": 2}, r"drafter\.layers is 2 but .* has 3, and .* grow, not shrink"),
        ({}, {"model_type": "qwen3"}, r"drafter\.model_type is qwen3 but .* has llama"),
        ({"vocab_size": 90, "draft_vocab_size": 90}, {}, r"90 tokens in its vocabulary but tiny has 96"),
        ({"target_hidden_size": 32}, {}, r"32 channels but tiny has 64"),
    ],
)
def test_a_drafter_that_does_not_fit_is_refused(
    tiny_target: Target, tmp_path: Path, flags: dict[str, Any], choice: dict[str, Any], message: str
) -> None:
    stored(tmp_path / "drafter", **flags)
    with pytest.raises(UserError, match=message):
        taken_up(tiny_target, tmp_path / "drafter", **choice)


def test_an_upgrade_measures_on_a_pack_that_teaches(tiny_target: Target) -> None:
    corpus = corpus_of(6)
    corpus = replace(corpus, mask=corpus.mask & (np.arange(corpus.tokens) >= 5 * 24))
    batch, features = _text_reader(packs_of(corpus, length=24), partial(LiveSource, tiny_target))(tiny.AUX_IDS)
    assert len(batch.row_M)
    assert len(features.aux_TX) == len(batch.ids_T) == 24


EAGLE31: dict[str, Any] = {"fc_norm": True, "norm_output": True}


@each("larger", [{"intermediate_size": 192}, {"layers": 3}, {"intermediate_size": 200, "layers": 2}])
@each("flags", [EAGLE31, {"mlp_bias": True, "attention_bias": True, **EAGLE31}])
def test_a_grown_drafter_starts_with_the_same_scores(
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
def test_a_drafter_with_more_states_starts_with_the_same_scores(
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


def test_layers_cannot_be_removed(tiny_target: Target, tmp_path: Path) -> None:
    stored(tmp_path / "drafter", **EAGLE31)
    with pytest.raises(UserError, match=r"layers can be added, not taken away; .* or add \[2, 3\]"):
        taken_up(tiny_target, tmp_path / "drafter", aux_layer_ids=(1, 4))
    with pytest.raises(UserError, match=r"auxiliary layer id 9 is outside"):
        taken_up(tiny_target, tmp_path / "drafter", aux_layer_ids=(1, 2, 3, 9))


def test_kept_tokens_keep_their_rows(tiny_target: Target, tmp_path: Path) -> None:
    drafter = stored(tmp_path / "drafter", draft_vocab_size=70, **EAGLE31)
    smaller = taken_up(tiny_target, tmp_path / "drafter", draft_vocab_size=40)
    assert drafter.lm_head is not None
    assert smaller.lm_head is not None
    stay_W = torch.isin(drafter.vocab().target_ids_W, torch.arange(40))
    kept = smaller.lm_head.weight[torch.isin(torch.arange(40), drafter.vocab().target_ids_W)]
    assert torch.equal(kept, drafter.lm_head.weight[stay_W])


def test_rows_of_new_tokens_follow_the_linear_map_of_the_others(tiny_target: Target, tmp_path: Path) -> None:
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
def test_a_run_trains_added_weights(tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
