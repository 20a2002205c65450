"""A drafter that exists is taken up as it is, and EAGLE-3 becomes EAGLE-3.1 without starting over."""

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
    """The drafter in `folder` after `init_from_checkpoint`; the first token's states may be louder than they are."""

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
    """A drafter of random weights, norms included, on disk."""
    drafter = tiny.random_drafter(tiny.drafter_config(**flags), own_embedding=own_embedding, own_head=own_head)
    write_checkpoint(checkpoint_of(drafter), folder)
    return drafter


def scores_SMW(drafter: Drafter, target: Target) -> Tensor:
    """What it says at every depth."""
    batch = batch_of_text()
    aux_TX = LiveSource(target, drafter.config.aux_layer_ids or tiny.AUX_IDS)(batch).aux_TX
    attend = attention_for(batch, torch.float32, compiled=False)
    with torch.no_grad():
        return drafter.logits(unroll(drafter, batch, aux_TX, depths=DEPTHS, attend=attend))


@each("flags", [{}, {"fc_norm": True, "norm_output": True}, {"draft_vocab_size": 70}, {"norm_before_fc": True}])
def test_a_drafter_is_taken_up_as_it_is(tiny_target: Target, tmp_path: Path, flags: dict[str, Any]) -> None:
    drafter = stored(tmp_path / "drafter", **flags)
    same = {key: bool(flags.get(key)) for key in ("fc_norm", "norm_output")}
    again = taken_up(tiny_target, tmp_path / "drafter", **same)
    assert torch.equal(scores_SMW(again, tiny_target), scores_SMW(drafter, tiny_target))
    assert torch.equal(again.vocab().target_ids_W, drafter.vocab().target_ids_W)
    trainable = {name for name, p in again.named_parameters() if p.requires_grad}
    assert trainable == {name for name, _ in again.named_parameters()} - {"embed_tokens.weight"}


def test_what_was_the_targets_becomes_its_own_where_it_is_trained(tiny_target: Target, tmp_path: Path) -> None:
    drafter = stored(tmp_path / "drafter", own_embedding=False, own_head=False)
    drafter.share_target(tiny_target.embedding(), tiny_target.head())
    again = taken_up(tiny_target, tmp_path / "drafter", fc_norm=False, norm_output=False)
    assert torch.equal(scores_SMW(again, tiny_target), scores_SMW(drafter, tiny_target))
    assert again.shares_embedding
    assert not again.shares_head
    assert again.lm_head is not None
    assert again.lm_head.weight.requires_grad


def test_norm_output_folds_exactly_where_the_residual_is_normed(tiny_target: Target, tmp_path: Path) -> None:
    before = scores_SMW(stored(tmp_path / "drafter", norm_before_residual=True), tiny_target)
    upgraded = taken_up(tiny_target, tmp_path / "drafter", fc_norm=False)
    assert upgraded.config.norm_output
    torch.testing.assert_close(scores_SMW(upgraded, tiny_target), before, rtol=1e-3, atol=1e-3)


def test_norm_output_leaves_depth_zero_and_the_length_of_a_typical_state_alone(
    tiny_target: Target, tmp_path: Path
) -> None:
    drafter = stored(tmp_path / "drafter")
    upgraded = taken_up(tiny_target, tmp_path / "drafter", fc_norm=False)
    before, after = scores_SMW(drafter, tiny_target), scores_SMW(upgraded, tiny_target)
    torch.testing.assert_close(after[0], before[0], rtol=1e-3, atol=1e-3)
    # Deeper the residual's length differs token by token, so it is close and no longer the same.
    unfolded = _flags_only(drafter, norm_output=True)
    far = (scores_SMW(unfolded, tiny_target)[1:] - before[1:]).norm()
    assert 0 < float((after[1:] - before[1:]).norm()) < 0.5 * float(far)


@each("norm_before_fc", [False, True])
def test_fc_norm_takes_the_place_of_the_scale_that_fc_was_trained_with(
    tiny_target: Target, tmp_path: Path, norm_before_fc: bool
) -> None:
    drafter = stored(tmp_path / "drafter", norm_before_fc=norm_before_fc)
    upgraded = taken_up(tiny_target, tmp_path / "drafter", norm_output=False)
    assert upgraded.config.fc_norm
    assert not upgraded.config.norm_before_fc
    aux_TX = LiveSource(tiny_target, tiny.AUX_IDS)(batch_of_text()).aux_TX
    with torch.no_grad():
        before, after = drafter.fuse(aux_TX), upgraded.fuse(aux_TX)
    assert float((after - before).norm() / before.norm()) < 0.25


def test_a_few_enormous_states_do_not_set_the_scale(tiny_target: Target, tmp_path: Path) -> None:
    stored(tmp_path / "drafter")
    plain, loud = (taken_up(tiny_target, tmp_path / "drafter", louder=louder) for louder in (1.0, 1000.0))
    assert plain.fc_norm is not None
    assert loud.fc_norm is not None
    for ours, theirs in zip(plain.fc_norm, loud.fc_norm, strict=True):
        torch.testing.assert_close(ours.weight, theirs.weight, rtol=0.05, atol=0)


def _flags_only(drafter: Drafter, **flags: bool) -> Drafter:
    """What comes of writing the flags into config.json."""
    checkpoint = checkpoint_of(drafter)
    tensors = dict(checkpoint.tensors)
    if flags.get("fc_norm"):
        tensors |= {f"fc_norm.{i}.weight": torch.ones(tiny.HIDDEN) for i in range(3)}
    return build_drafter(replace(checkpoint, config=replace(checkpoint.config, **flags), tensors=tensors))


def train_state_with(target: Target, drafter: Drafter) -> TrainState:
    return TrainState("drafter", drafter, train_state_of(target).settings)


def more(target: Target, state: TrainState, folder: Path, steps: int) -> TrainState:
    """Train it on."""
    source = LiveSource(target, tiny.AUX_IDS)
    plan = loop_config_of(folder, length=RunLength(steps=steps), packs_per_step=1)
    train([state], packs_of(corpus_of(200), length=256), [], source, plan, observer=Diary())
    return state


def loss_and_length(target: Target, state: TrainState) -> tuple[float, float]:
    """On text that is not trained on."""
    source, held_out = LiveSource(target, tiny.AUX_IDS), packs_of(corpus_of(16, seed=9), length=256).epoch(0)
    loss, count = 0.0, 0
    for batch in (planned.build() for planned in held_out):
        loss += float(state.forward_loss(batch, source(batch), depths=DEPTHS).loss_S.sum())
        count += sum(batch.counts(DEPTHS))
    counts = estimate([state], held_out, source, depths=DEPTHS)[state.name]
    return loss / count, counts.acceptance_length


@pytest.mark.slow
def test_an_upgraded_drafter_keeps_what_it_knew_and_learns_on(tiny_target: Target, tmp_path: Path) -> None:
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


def test_a_run_upgrades_what_it_starts_from(
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
