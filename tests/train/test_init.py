"""An untrained drafter starts from its target, is a checkpoint that servers load, and is not overconfident."""

import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedTokenizerBase

import tiny
from each import each
from eyas.drafter.check import check
from eyas.drafter.checkpoint import checkpoint_of, load_drafter, read_checkpoint, tensor_problems, write_checkpoint
from eyas.drafter.config import DrafterConfig
from eyas.drafter.model import Drafter
from eyas.errors import UserError
from eyas.target.facts import facts_of
from eyas.target.model import Target
from eyas.target.parts import TargetParts, read_head, score_scale
from eyas.train.init import MAX_INITIAL_LOGIT_STD, SCALE_STEP, Start, StartMeasure, config_for, init_drafter, scale_down
from eyas.train.recipe import DrafterSettings
from eyas.train.sources.live import LiveSource
from target.test_parts import target_of
from train.test_loop import corpus_of, packs_of

KEPT = torch.arange(1, 80, 2)
FLAGS = {"fc_norm": True, "norm_output": True}


def config_of(target: Target, *, dtype: str = "float32", **settings: Any) -> DrafterConfig:
    defaults: dict[str, Any] = {
        "aux_layer_ids": (1, 2, 3),
        "draft_vocab_size": None,
        "fc_norm": False,
        "norm_output": False,
    }
    return config_for(TargetParts.of(target), DrafterSettings(**{**defaults, **settings}), dtype=dtype)


def born(target: Target, kept: torch.Tensor = KEPT, *, seed: int = 0, **choice: Any) -> Drafter:
    size = len(kept) if len(kept) < target.facts.vocab_size else None
    config = config_of(target, draft_vocab_size=size, **choice)
    return init_drafter(TargetParts.of(target), config, kept, seed=seed)


def llama(**changes: Any) -> Target:
    """Target of odd shape without weights."""
    with torch.device("meta"):
        model = LlamaForCausalLM(tiny.target_config(**changes))
    return Target(facts=facts_of(model.config, "odd"), model=model, tokenizer=PreTrainedTokenizerBase())


@each("family", ["llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "mixtral", "granite"])
def test_the_last_norm_is_the_targets_in_every_architecture(family: str) -> None:
    target = target_of(family)
    drafter = born(target)
    states = torch.randn(5, target.facts.hidden_size, generator=torch.Generator().manual_seed(0)) * 3
    decoder: Any = target.model.get_decoder()
    with torch.no_grad():
        ours, theirs = drafter.norm(states), decoder.norm(states)
    # Large heads make it smaller, by the same factor in every channel.
    torch.testing.assert_close(ours, theirs * float(ours.norm() / theirs.norm()), rtol=1e-4, atol=1e-4)
    assert float(ours.norm()) <= float(theirs.norm()) * 1.0001


@each("model_type", ["qwen3", "deepseek_v2"])
def test_a_drafter_has_the_layers_that_the_recipe_asks_for(tmp_path: Path, model_type: str) -> None:
    target = target_of("llama")
    drafter = born(target, model_type=model_type, **FLAGS)
    write_checkpoint(checkpoint_of(drafter), tmp_path / "drafter")
    report = check(str(tmp_path / "drafter"), target=target.facts)
    assert (report.ok, report.layers) == (True, model_type)


def test_latent_sizes_and_rope_are_those_of_a_latent_target() -> None:
    rope = {"rope_type": "yarn", "rope_theta": 5e4, "factor": 4.0, "original_max_position_embeddings": 64}
    scales = {"mscale": 1.0, "mscale_all_dim": 1.0}
    shape = tiny.latent_target_config()
    shape.rope_parameters = {**rope, **scales, "truncate": True}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape)
    target = Target(facts=facts_of(model.config, "latent"), model=model, tokenizer=PreTrainedTokenizerBase())
    config = config_of(target, model_type="deepseek_v2")
    assert config.mla == tiny.latent_sizes()
    assert (config.num_key_value_heads, config.head_dim) == (2, 96)
    assert config.rope_parameters == {**rope, **scales}


def test_the_scale_of_a_mean_subtracting_norm_is_used_but_not_one_with_bias() -> None:
    cohere: Any = target_of("cohere")
    ours, theirs = born(cohere).norm.weight.data, cohere.model.model.norm.weight
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    for family in ("phi", "gpt2"):
        assert bool((born(target_of(family)).norm.weight == 1).all())


def test_scores_of_an_untrained_drafter_are_bounded() -> None:
    target: Any = target_of("llama")
    quiet = born(target).norm.weight.data
    target.model.lm_head.weight *= 1000
    drafter = born(target)
    states = torch.randn(2000, target.facts.hidden_size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        spread = drafter.logits(drafter.norm(states)).std()
    assert float(spread) == pytest.approx(MAX_INITIAL_LOGIT_STD, rel=0.1)
    torch.testing.assert_close(
        drafter.norm.weight.data / quiet, torch.full_like(quiet, float(drafter.norm.weight.data[0] / quiet[0]))
    )


@each("family", ["llama", "gemma2", "granite", "cohere", "phi", "gpt2"])
def test_the_head_has_the_targets_rows_and_scale(family: str) -> None:
    target = target_of(family)
    drafter = born(target)
    assert drafter.lm_head is not None
    states = torch.randn(5, target.facts.hidden_size, generator=torch.Generator().manual_seed(0))
    plain = replace(read_head(target), cap=None, bias_V=None).only(KEPT)
    with torch.no_grad():
        torch.testing.assert_close(drafter.logits(states), plain.scores(states), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(drafter.lm_head.weight.data, target.head()[KEPT] * score_scale(target.model.config))
    assert drafter.vocab().target_ids_W.tolist() == KEPT.tolist()
    assert drafter.shares_embedding


@each("family", ["llama", "gemma3_text", "cohere", "phi", "phi3", "gpt2", "qwen3_moe"])
@each("kept", [KEPT, torch.arange(80)])
def test_an_untrained_drafter_passes_the_check_and_reloads(family: str, kept: torch.Tensor, tmp_path: Path) -> None:
    target = target_of(family)
    drafter = born(target, kept, layers=2, **FLAGS)
    checkpoint = checkpoint_of(drafter)
    assert tensor_problems(checkpoint.config, checkpoint.tensors) == []
    write_checkpoint(checkpoint, tmp_path / "it")
    report = check(str(tmp_path / "it"), target=target.facts)
    assert report.findings == ()
    assert report.family == "EAGLE-3.1"
    assert read_checkpoint(str(tmp_path / "it")).config == drafter.config
    again = load_drafter(str(tmp_path / "it"))
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in checkpoint.tensors.items())


def test_the_last_state_passes_through_fc() -> None:
    target = target_of("llama")
    size = target.facts.hidden_size
    weight = born(target).fc.weight.data
    assert float(weight[:, -size:].diagonal().mean()) == pytest.approx(1, abs=0.1)
    assert float(weight[:, :-size].abs().max()) < 0.5


def test_the_seed_determines_weights_and_leaves_the_global_rng_alone() -> None:
    target = target_of("llama")
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    one, same, other = born(target), born(target), born(target, seed=1)
    assert torch.equal(torch.rand(1), expected)
    assert torch.equal(one.fc.weight, same.fc.weight)
    assert not torch.equal(one.fc.weight, other.fc.weight)


def test_weights_have_the_requested_type() -> None:
    target = target_of("llama")
    config = config_of(target, draft_vocab_size=40, dtype="bfloat16")
    drafter = init_drafter(TargetParts.of(target), config, KEPT, seed=0)
    assert {p.dtype for p in drafter.parameters()} == {torch.bfloat16}


@each(
    ("rope", "expected"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, {"rope_type": "default"}),
        (
            {"rope_type": "longrope", "short_factor": [1.0] * 16, "long_factor": [2.0] * 16, "factor": 4.0},
            {"rope_type": "default"},
        ),
        ({"rope_type": "linear", "factor": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        (
            {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 16.0},
            {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 16.0},
        ),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, {"rope_type": "default"}),
    ],
)
def test_the_rope_is_the_targets_or_its_base(rope: dict[str, Any], expected: dict[str, Any]) -> None:
    target = llama(rope_parameters={**rope, "rope_theta": 5e5})
    config = config_of(target)
    assert dict(config.rope_parameters) == {**expected, "rope_theta": 5e5}
    Drafter(config)


def test_the_rope_of_full_attention_is_used() -> None:
    target = target_of("gemma3_text")
    theirs = target.model.config.rope_parameters
    assert theirs["full_attention"]["rope_theta"] != theirs["sliding_attention"]["rope_theta"]
    ours = config_of(target).rope_parameters
    assert ours["rope_theta"] == theirs["full_attention"]["rope_theta"]


@each(
    ("shape", "expected"),
    [
        ({"num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 20}, (16, 2, 20)),
        ({"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": None}, (4, 4, 16)),
        ({"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 64}, (8, 1, 64)),
    ],
)
def test_heads_are_those_of_the_target(shape: dict[str, Any], expected: tuple[int, int, int]) -> None:
    config = config_of(llama(**shape))
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == expected
    assert (config.hidden_size, config.target_hidden_size, config.intermediate_size) == (64, 64, 128)


def test_the_recipe_overrides_the_target() -> None:
    config = config_of(
        llama(num_hidden_layers=9), aux_layer_ids=None, intermediate_size=40, layers=3, norm_before_residual=True
    )
    assert (config.intermediate_size, config.num_hidden_layers, config.norm_before_residual) == (40, 3, True)
    assert (config.aux_layer_ids, config.draft_vocab_size) == ((2, 4, 6), tiny.VOCAB)
    with pytest.raises(UserError, match=r"has 4 layers.*name three ascending ids"):
        config_of(llama(), aux_layer_ids=None)


DEPTHS = 4
WIDTH = 80


@torch.no_grad()
def heavy_tailed() -> Target:
    """Target whose last norm has a few channels a hundred times as large as the others, as Gemma's."""
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
    scale_down(drafter, measured(target, drafter).steps_down())
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


def test_norm_weights_are_not_fed_back() -> None:
    target = heavy_tailed()
    drafter = newborn(target)
    assert drafter.lm_head is not None
    with torch.no_grad():
        ours = measured(target, drafter).at(0)
        # Without folding: the norm keeps its weights, which are fed back and multiplied again.
        weight = torch.ones(target.facts.hidden_size)
        weight[::9] = 100.0
        drafter.norm.weight.copy_(weight)
        drafter.lm_head.weight.div_(weight)
    fed_back = measured(target, drafter).at(0)
    assert ours.loss[0] == pytest.approx(fed_back.loss[0], rel=1e-4)  # the first depth is the same
    assert max(ours.loss[1:]) < min(fed_back.loss[1:])


def test_only_an_overconfident_drafter_is_scaled_down() -> None:
    target = target_of("llama")
    drafter = newborn(target)
    assert drafter.lm_head is not None
    modest = measured(target, drafter).steps_down()
    with torch.no_grad():
        drafter.lm_head.weight.mul_(SCALE_STEP**-4)
    loud = measured(target, drafter)
    assert loud.steps_down() == modest + 4
    # Not a step further than needed, since smaller scores learn more slowly.
    assert loud.at(modest + 3).worse


def test_depths_that_the_pack_does_not_reach_are_left_out() -> None:
    target = target_of("llama")
    assert len(measured(target, newborn(target), depths=40).at(0).loss) == 19


def test_a_bad_start_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        Start(loss=(3.0, 4.0), uniform=4.4).report("fine")
        assert "fine starts at 3.00, 4.00 nats by depth; a uniform guess has 4.40" in caplog.text
        assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
        Start(loss=(3.0, 31.0, float("nan")), uniform=9.7).report("bad")
    assert "bad starts worse than a uniform guess at depth 2, 3" in caplog.text
