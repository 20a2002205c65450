"""Drafts change nothing about what a target with 8- or 4-bit linears says, however many requests share a pass.

Here by torch, in the arithmetic of the GPU's kernels; on a GPU in `tests/gpu/test_quantised_engine_cuda.py`.
"""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch

from each import each
from engine.test_quantised_target import answers
from eyas.drafter.model import Drafter
from eyas.engine.config import EngineConfig
from eyas.engine.engine import Engine
from eyas.engine.request import Speculation
from eyas.engine.runner.fused_target import fused_target
from eyas.errors import UserError
from eyas.kernels.linear.w4a16_linear import W4A16Linear
from eyas.kernels.linear.w8a8_linear import W8A8Linear
from eyas.loading import load_target
from eyas.sampling import Sampling
from eyas.target.model import Target
from eyas.target.quantise import replace_linears
from tiny import LAYERS, language


@each(("kind", "linear"), [("fp8", W8A8Linear), ("int4", W4A16Linear)])
def test_drafts_change_nothing(kind: str, linear: type, tiny_target: Target, tiny_drafter: Drafter) -> None:
    target = replace(tiny_target, model=deepcopy(tiny_target.model))
    assert replace_linears(target.model, kind) == 7 * LAYERS
    assert type(target.model.get_output_embeddings()) is torch.nn.Linear, "the head stays as it is"
    assert isinstance(target.model.model.layers[0].mlp.up_proj, linear)
    fused = fused_target(target)
    assert fused is not None, "the fused pass must be the one that is tested"
    assert fused.phased
    rows = language(32, 40, torch.Generator().manual_seed(5)).tolist()
    prompts = [tuple(row[: 3 + index]) for index, row in enumerate(rows)]
    engine = Engine(target, tiny_drafter, config=EngineConfig(max_num_seqs=32, max_model_len=128))
    for sampling in (Sampling(), Sampling(temperature=0.9)):
        alone = [
            answers(engine, [prompt], Speculation(mode="off"), sampling, seed=seed)[0]
            for seed, prompt in enumerate(prompts)
        ]
        for count in (1, 7, 32):
            for speculation in (Speculation(mode="off"), Speculation(mode="fixed", depth=3)):
                assert answers(engine, prompts[:count], speculation, sampling) == alone[:count]
    assert engine.stats.accepted > 0


def test_what_a_cpu_does_not_do_is_refused() -> None:
    with pytest.raises(UserError, match="fp8 runs on a GPU only"):
        load_target("smollm2", dtype="auto", device="cpu", quantization="fp8")
