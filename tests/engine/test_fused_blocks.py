"""Targets of every fused block answer as transformers' `generate` does, in one batch and beyond their windows."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.test_engine import options, request
from eyas.engine.engine import Engine
from eyas.engine.runner.fused_target import fused_target
from eyas.kernels.linear.packed_linear import pack_linears
from kernels.test_recognise import plain
from tiny import Letters

NEW_TOKENS = 12


@pytest.mark.parametrize(
    "block", ["mistral with a window", "qwen2 with windows", "qwen3", "phi3 partly rotated", "gemma2", "gemma3"]
)
@pytest.mark.parametrize("packed", [False, True])
def test_answers_are_transformers_own(block: str, packed: bool) -> None:
    target = replace(plain(block), tokenizer=Letters())
    model: Any = target.model
    model.generation_config.eos_token_id = None
    if packed:
        pack_linears(model)
    assert fused_target(target) is not None
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(3, 80, (length,), generator=generator).tolist() for length in (3, 14, 70)]
    engine = Engine(target, config=options(max_num_batched_tokens=32))  # the long one is read in chunks
    answers = engine.generate([request(prompt, max_new_tokens=NEW_TOKENS) for prompt in prompts])
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.no_grad():
            ids = model.generate(torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False)
        assert list(answer.tokens) == ids[0, len(prompt) :].tolist()
