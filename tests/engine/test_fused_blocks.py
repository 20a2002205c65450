"""Targets with every kind of fused block answer as transformers' `generate` does, in batches and beyond windows."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import tiny
from each import each
from engine.common import OFF, at_depth, options, requests
from eyas.engine.engine import Engine
from eyas.engine.kv_cache.cache import KVCache
from eyas.engine.runner.fused_target import fused_target
from eyas.engine.runner.model_runner import ModelRunner
from eyas.kernels.attention.metadata import AttentionMetadata, AttentionRow
from eyas.kernels.linear.packed_linear import pack_linears
from eyas.kernels.llama.packed_experts import pack_experts
from kernels.test_recognise import plain, sizes_of_panels
from tiny import Letters

NEW_TOKENS = 12


@pytest.mark.slow
@each(
    "block",
    [
        *("mistral with a window", "qwen2 with windows", "qwen3", "phi3 partly rotated", "gemma2", "gemma3"),
        *("mixtral", "qwen3 experts", "qwen3 experts here and there", "gpt-oss"),
    ],
)
@each("packed", [False, True])
def test_answers_are_transformers_own(block: str, packed: bool) -> None:
    target = replace(plain(block, **(sizes_of_panels(block) if packed else {})), tokenizer=Letters())
    model: Any = target.model
    model.generation_config.eos_token_id = None
    if packed:
        pack_linears(model)
        pack_experts(model)
    assert fused_target(target) is not None
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(3, 80, (length,), generator=generator).tolist() for length in (3, 14, 70)]
    engine = Engine(target, config=options(max_num_batched_tokens=32))  # the long one is read in chunks
    answers = engine.generate(requests(prompts, max_new_tokens=NEW_TOKENS))
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.no_grad():
            ids = model.generate(torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False)
        assert list(answer.tokens) == ids[0, len(prompt) :].tolist()


@each("block", ["mixtral", "qwen3 experts", "gpt-oss"])
def test_drafts_do_not_change_what_experts_answer(block: str) -> None:
    target = replace(plain(block), tokenizer=Letters())
    assert fused_target(target) is not None
    config = tiny.drafter_config(vocab_size=80, draft_vocab_size=80, hidden_size=32, target_hidden_size=32)
    drafter = tiny.random_drafter(replace(config, aux_layer_ids=(1, 2, 3)))
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(3, 80, (length,), generator=generator).tolist() for length in (3, 14, 40)]
    answers = []
    for how in (OFF, at_depth(3)):
        engine = Engine(target, drafter, config=options())
        asked = requests(prompts, max_new_tokens=NEW_TOKENS, speculation=how)
        answers.append([list(answer.tokens) for answer in engine.generate(asked)])
    assert answers[0] == answers[1]


@each("packed", [False, True])
@each("block", ["qwen3", "gemma2"])
@each("keep", [None, [1, 4]])
def test_logits_are_written_to_the_given_buffer(block: str, packed: bool, keep: list[int] | None) -> None:
    target = plain(block, **(sizes_of_panels(block) if packed else {}))
    if packed:
        pack_linears(target.model)
    runner = ModelRunner(target, KVCache(blocks=2, block_size=16))
    layout = AttentionMetadata.of(
        [AttentionRow(blocks=(0, 1), base=0, count=5)], block_size=16, device=torch.device("cpu")
    )
    ids_N, keep_M = torch.arange(3, 8), None if keep is None else torch.tensor(keep)
    with torch.inference_mode():
        expected_MV, _ = runner.run(ids_N, layout, keep_M, ())
        room_SV = torch.full((9, expected_MV.shape[1]), torch.nan, dtype=runner.logits_dtype)
        logits_MV, _ = runner.run(ids_N, layout, keep_M, (), room_SV[: len(expected_MV)])
    assert logits_MV.data_ptr() == room_SV.data_ptr(), "no copy"
    assert torch.equal(logits_MV, expected_MV)
    assert room_SV[len(expected_MV) :].isnan().all()
