"""Targets with latent attention (DeepSeek V2 and V3) answer as in transformers, with and without drafts."""

from dataclasses import asdict
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from each import each
from engine.common import OFF, Prompts, at_depth, request, tokens_of
from eyas.drafter.config import LatentSizes
from eyas.drafter.model import Drafter
from eyas.engine.config import EngineConfig
from eyas.engine.engine import Engine
from eyas.engine.output import RequestOutput
from eyas.engine.speculation.draft import Tree
from eyas.sampling import Sampling
from eyas.target.facts import facts_of
from eyas.target.model import Target
from tiny import Letters, drafter_config, language, target_config, trained_drafter, trained_target

SIZES = LatentSizes(kv_lora_rank=24, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10, q_lora_rank=16)
EXPERTS = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "n_shared_experts": 1}
NEW_TOKENS, END = 12, 1


@pytest.fixture(scope="module", params=["deepseek_v2", "deepseek_v3"])
def pair(request: pytest.FixtureRequest) -> tuple[Target, Drafter]:
    """Two of four layers have experts; the drafter has latent attention as well."""
    plain = target_config()
    shared = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "max_position_embeddings")
    shared += ("num_attention_heads", "bos_token_id", "eos_token_id", "tie_word_embeddings")
    config = AutoConfig.for_model(
        request.param,
        **{key: getattr(plain, key) for key in shared},
        **asdict(SIZES),
        **EXPERTS,
        num_key_value_heads=plain.num_attention_heads,
        moe_intermediate_size=32,
        first_k_dense_replace=2,
        initializer_range=0.08,
    )
    model: Any = trained_target(40, config=config)
    latent = drafter_config(
        fc_norm=True, norm_output=True, mla=SIZES, num_key_value_heads=2, head_dim=SIZES.qk_head_dim
    )
    target = Target(facts=facts_of(config, request.param), model=model, tokenizer=Letters())
    return target, trained_drafter(model, latent, steps=40)


@pytest.fixture(scope="module")
def seven() -> Prompts:
    rows = language(7, 47, torch.Generator().manual_seed(21)).tolist()
    return [tuple(row[: 3 + 6 * i]) for i, row in enumerate(rows)]


def answers(
    pair: tuple[Target, Drafter], prompts: Prompts, *, batch: int, sampling: Sampling, **how: Any
) -> tuple[list[RequestOutput], Engine]:
    target, drafter = pair
    speculation, tree = how.get("speculation", OFF), how.get("tree")
    config = EngineConfig(max_num_seqs=batch, max_model_len=128, max_num_batched_tokens=64, block_size=4, tree=tree)
    engine = Engine(target, drafter if speculation.mode != "off" else None, config=config)
    same: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "stop_ids": frozenset({END}), "speculation": speculation}
    asked = [request(prompt, sampling=sampling, seed=i, **same) for i, prompt in enumerate(prompts)]
    return engine.generate(asked), engine


@each("batch", [1, 7])
def test_plain_answers_are_those_of_transformers(pair: tuple[Target, Drafter], seven: Prompts, batch: int) -> None:
    ours, _ = answers(pair, seven, batch=batch, sampling=Sampling())
    model: Any = pair[0].model
    for prompt, output in zip(seven, ours, strict=True):
        theirs = model.generate(torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False)
        assert list(output.tokens) == theirs[0, len(prompt) :].tolist()


@pytest.mark.slow
@each(("batch", "tree"), [(1, None), (7, None), (7, Tree(depth=3, width=2, budget=6))])
@each("sampling", [Sampling(), Sampling(temperature=0.8, top_p=0.9)])
def test_drafts_change_nothing(
    pair: tuple[Target, Drafter], seven: Prompts, batch: int, sampling: Sampling, tree: Tree | None
) -> None:
    plain, _ = answers(pair, seven, batch=7, sampling=sampling)
    drafted, engine = answers(pair, seven, batch=batch, sampling=sampling, speculation=at_depth(4), tree=tree)
    assert tokens_of(drafted) == tokens_of(plain)
    assert engine.stats.accepted > 5


def test_blocks_hold_keys_and_values_of_every_head(pair: tuple[Target, Drafter]) -> None:
    engine = Engine(pair[0], None, config=EngineConfig(max_num_seqs=1, max_model_len=128, block_size=4))
    cache = engine.model_runner.cache
    numbers = 2 * (SIZES.qk_head_dim + SIZES.v_head_dim)  # two heads
    assert cache.bytes_per_block == 4 * 4 * numbers * 4  # layers, slots, numbers, bytes
