"""Drafts do not change the answers of a target with 8- or 4-bit linears on a GPU, in captured rounds."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from transformers import LlamaForCausalLM

from eyas.drafter.model import Drafter
from eyas.engine.config import EngineConfig
from eyas.engine.engine import Engine
from eyas.engine.request import Request, Speculation
from eyas.engine.runner.fused_target import fused_target
from eyas.sampling import Sampling
from eyas.target.facts import facts_of
from eyas.target.model import Target
from eyas.target.quantise import quantise_on_gpu
from tiny import Letters, language, target_config

pytestmark = pytest.mark.gpu
NEW = 16


def answers(engine: Engine, prompts: Sequence[tuple[int, ...]], depth: int) -> list[list[int]]:
    speculation = Speculation(mode="fixed", depth=depth) if depth else Speculation(mode="off")
    said: dict[int, list[int]] = {}
    for seed, prompt in enumerate(prompts):
        key = engine.submit(
            Request(prompt=prompt, sampling=Sampling(), max_new_tokens=NEW, speculation=speculation, seed=seed)
        )
        said[key] = []
    while engine.busy:
        for piece in engine.step():
            said[piece.key] += piece.tokens
    return list(said.values())


@pytest.mark.parametrize("kind", ["fp8", "int4"])
def test_drafts_change_nothing(kind: str, target: Target, drafter: Drafter) -> None:
    """Up to near-ties: attention and the head round differently with other numbers of rows."""
    quantised = replace(target, model=deepcopy(target.model).bfloat16())
    quantise_on_gpu(quantised.model, kind, "tiny")
    fused = fused_target(quantised)
    assert fused is not None, "the fused pass must be the one that is tested"
    assert fused.phased
    assert type(fused).__name__ == "TritonLlama"
    rows = language(32, 40, torch.Generator().manual_seed(5)).tolist()
    prompts = [tuple(row[: 3 + index]) for index, row in enumerate(rows)]
    engine = Engine(quantised, deepcopy(drafter).bfloat16(), config=EngineConfig(max_num_seqs=32, max_model_len=128))
    alone = [answers(engine, [prompt], 0)[0] for prompt in prompts]
    for depth in (0, 3):
        together = [(answers(engine, prompts[:count], depth), alone[:count]) for count in (1, 7, 32)]
        same = sum(a == b for ours, expected in together for a, b in zip(ours, expected, strict=True))
        assert same >= 36, f"at depth {depth} {same} of 40 answers are the same"
    assert engine.stats.accepted > 0


@pytest.mark.parametrize("kind", ["fp8", "int4"])
def test_wide_layers_pass_their_trial(kind: str) -> None:
    """Where a layer's output is longer than its residual, fp8 states diverge at once."""
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 4, "head_dim": 128}
    config = target_config(**sizes, num_attention_heads=32, num_key_value_heads=8)
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).cuda().bfloat16().eval().requires_grad_(False)
    quantise_on_gpu(model, kind, "wide")
    made = Target(facts=facts_of(config, "wide"), model=model, tokenizer=Letters())
    assert type(fused_target(made)).__name__ == "TritonLlama"


@pytest.mark.parametrize("kind", ["fp8", "int4"])
def test_a_captured_decode_pass_gives_every_row_the_same_in_any_company(kind: str, target: Target) -> None:
    """Bitwise, through a layer's products without attention."""
    quantised = replace(target, model=deepcopy(target.model).bfloat16())
    quantise_on_gpu(quantised.model, kind, "tiny")
    fused = fused_target(quantised)
    assert fused is not None
    torch.manual_seed(0)
    for block in fused.blocks:
        for product in (block.qkv, block.output, block.mlp.gate_up, block.mlp.down):
            linear = product.linear
            x = torch.randn(128, linear.in_features, device="cuda", dtype=torch.bfloat16)
            whole = product.decode(x)
            for rows in (1, 2, 4, 7, 16, 32, 64):
                assert torch.equal(product.decode(x[:rows].clone()), whole[:rows])
