"""Whatever layers a drafter has, the engine says what the target says alone, and its drafts are the model's."""

from typing import Any

import pytest

from each import each
from eyas.drafter.config import LatentSizes
from eyas.drafter.model import Drafter
from eyas.engine.config import EngineConfig
from eyas.engine.engine import Engine
from eyas.engine.output import RequestOutput
from eyas.engine.request import Request, Speculation
from eyas.engine.speculation.draft import Tree
from eyas.sampling import Sampling
from eyas.target.model import Target
from oracle.dense import DenseTarget, EagleDraft
from oracle.reference import Chain, decode_speculatively
from oracle.rejection import SeededDraws
from tiny import drafter_config, trained_drafter

V31 = {"fc_norm": True, "norm_output": True}
LATENT = LatentSizes(kv_lora_rank=24, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10, q_lora_rank=16)
LAYERS: dict[str, dict[str, Any]] = {
    "qwen3": {"qk_norm": True},
    "deepseek_v2": {"mla": LATENT, "num_key_value_heads": 2, "head_dim": LATENT.qk_head_dim},
}
NEW_TOKENS, DEPTH = 14, 4


@pytest.fixture(scope="module", params=[*LAYERS, "eagle1"])
def drafter(request: pytest.FixtureRequest, target: Target) -> Drafter:
    model: Any = target.model
    if request.param == "eagle1":
        drafter: Drafter = request.getfixturevalue("tiny_eagle1")
        return drafter
    return trained_drafter(model, drafter_config(**V31, **LAYERS[request.param]), steps=120)


def answers(
    target: Target, drafter: Drafter | None, prompts: list[tuple[int, ...]], sampling: Sampling, **options: Any
) -> tuple[list[RequestOutput], Engine]:
    speculation = Speculation(mode="off") if drafter is None else Speculation(mode="fixed", depth=DEPTH)
    config = EngineConfig(max_num_seqs=5, max_model_len=128, max_num_batched_tokens=64, block_size=4, **options)
    engine = Engine(target, drafter, config=config)
    asked = [
        Request(prompt=x, sampling=sampling, max_new_tokens=NEW_TOKENS, speculation=speculation, seed=i)
        for i, x in enumerate(prompts)
    ]
    return engine.generate(asked), engine


@each("tree", [None, Tree(depth=3, width=2, budget=6)])
@each("sampling", [Sampling(), Sampling(temperature=0.8, top_p=0.9)])
def test_answers_are_those_of_plain_decoding(
    target: Target, drafter: Drafter, prompts: list[tuple[int, ...]], sampling: Sampling, tree: Tree | None
) -> None:
    plain, _ = answers(target, None, prompts, sampling)
    drafted, engine = answers(target, drafter, prompts, sampling, tree=tree)
    assert [one.tokens for one in drafted] == [one.tokens for one in plain]
    assert engine.stats.accepted > 0


def test_the_engine_accepts_what_the_reference_accepts(
    target: Target, drafter: Drafter, prompts: list[tuple[int, ...]]
) -> None:
    outputs, _ = answers(target, drafter, prompts[:6], Sampling())
    dense, eagle = DenseTarget(target, drafter.config), EagleDraft(drafter)
    for prompt, output in zip(prompts, outputs, strict=False):
        reference = decode_speculatively(
            dense, eagle, prompt, shape=Chain(depth=DEPTH), draws=SeededDraws(0), max_new_tokens=NEW_TOKENS
        )
        rebuilt = [0]
        for round_ in reference.rounds:
            rebuilt += [*range(1, round_.accepted + 1), 0]
        # The engine drafts no further than the answer may get, the reference does.
        assert list(output.depths[: NEW_TOKENS - DEPTH]) == rebuilt[: NEW_TOKENS - DEPTH]
