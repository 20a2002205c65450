"""A newborn drafter begins no worse than guessing evenly, at any depth, whatever its target's last norm is like."""

import logging
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from each import each
from eyas.drafter.model import Drafter
from eyas.target.model import Target
from eyas.target.parts import TargetParts
from eyas.train.init import config_for, init_drafter
from eyas.train.recipe import DrafterSettings
from eyas.train.sources.live import LiveSource
from eyas.train.start import SCALE_STEP, Start, StartMeasure, quieten
from target.test_head import target_of
from train.test_loop import corpus_of, packs_of

DEPTHS = 4
WIDTH = 80


@torch.no_grad()
def heavy_tailed() -> Target:
    """A target whose last norm has a few channels a hundred times as loud as the others, as Gemma's."""
    target: Any = target_of("llama")
    weight = target.model.model.norm.weight
    weight.fill_(1.0)
    weight[::9] = 100.0
    return target


def newborn(target: Target, **flags: Any) -> Drafter:
    settings = DrafterSettings(aux_layer_ids=(1, 2, 3), draft_vocab_size=WIDTH, **flags)
    parts = TargetParts.of(target)
    return init_drafter(parts, config_for(parts, settings, dtype="float32"), torch.arange(WIDTH), seed=0)


def measured(target: Target, drafter: Drafter, depths: int = DEPTHS) -> StartMeasure:
    corpus = corpus_of(10)
    corpus = replace(corpus, ids=corpus.ids % WIDTH)
    batch = packs_of(corpus, length=240).epoch(0)[0].build()
    return StartMeasure(drafter, batch, LiveSource(target, (1, 2, 3))(batch), depths=depths)


def settled(target: Target, drafter: Drafter) -> Start:
    quieten(drafter, measured(target, drafter).steps_down())
    return measured(target, drafter).at(0)


@pytest.mark.slow
@each(
    "flags",
    [
        {},
        {"fc_norm": False, "norm_output": False},
        {"fc_norm": False},
        {"layers": 3},
        {"norm_before_residual": True},
    ],
)
@each("kind", ["heavy-tailed", "llama", "gemma3_text"])
def test_no_depth_starts_worse_than_uniform(kind: str, flags: dict[str, Any]) -> None:
    target = heavy_tailed() if kind == "heavy-tailed" else target_of(kind)
    start = settled(target, newborn(target, **flags))
    assert start.uniform == math.log(WIDTH)
    assert len(start.loss) == DEPTHS
    assert start.worse == ()


def test_the_weights_of_a_heavy_tailed_norm_do_not_go_round() -> None:
    target = heavy_tailed()
    drafter = newborn(target)
    assert drafter.lm_head is not None
    with torch.no_grad():
        ours = measured(target, drafter).at(0)
        # As it was: the norm in its place, its weights fed back to be multiplied by themselves.
        weight = torch.ones(target.facts.hidden_size)
        weight[::9] = 100.0
        drafter.norm.weight.copy_(weight)
        drafter.lm_head.weight.div_(weight)
    fed_back = measured(target, drafter).at(0)
    assert ours.loss[0] == pytest.approx(fed_back.loss[0], rel=1e-4)  # the first depth says the same
    assert max(ours.loss[1:]) < min(fed_back.loss[1:])


def test_a_drafter_that_is_sure_of_nothing_is_made_quieter_and_a_modest_one_left_alone() -> None:
    target = target_of("llama")
    drafter = newborn(target)
    assert drafter.lm_head is not None
    modest = measured(target, drafter).steps_down()
    with torch.no_grad():
        drafter.lm_head.weight.mul_(SCALE_STEP**-4)
    loud = measured(target, drafter)
    assert loud.steps_down() == modest + 4
    # Not a step further than needed: a quiet drafter learns slower.
    assert loud.at(modest + 3).worse


def test_depths_that_the_pack_does_not_reach_are_left_out() -> None:
    target = target_of("llama")
    assert len(measured(target, newborn(target), depths=40).at(0).loss) == 19


def test_a_bad_start_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        Start(loss=(3.0, 4.0), uniform=4.4).report("fine")
        assert "fine starts at 3.00, 4.00 nats by depth; guessing evenly has 4.40" in caplog.text
        assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
        Start(loss=(3.0, 31.0, float("nan")), uniform=9.7).report("bad")
    assert "bad starts worse than guessing evenly at depth 2, 3" in caplog.text
