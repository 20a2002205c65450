"""The commands on targets with latent attention: DeepSeek V2 and V3, and Kimi's name for the latter."""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from chat_tokenizer import letter_tokenizer
from each import each
from eyas.drafter.checkpoint import checkpoint_of, write_checkpoint
from eyas.drafter.config import LatentSizes
from tiny import drafter_config, random_drafter

Run = Callable[..., Any]
SIZES = LatentSizes(kv_lora_rank=24, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10, q_lora_rank=16)


def save_pair(folder: Path, family: str) -> tuple[Path, Path]:
    """A random target with experts and a random drafter, both with latent attention."""
    tokenizer = letter_tokenizer()
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "deepseek_v3" if family == "kimi_k2" else family,
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=256,
        **asdict(SIZES),
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        n_shared_experts=1,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        initializer_range=0.2,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "target")  # type: ignore[no-untyped-call]
    tokenizer.save_pretrained(folder / "target")
    if family == "kimi_k2":
        path = folder / "target" / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "model_type": family}))
    latent = replace(
        drafter_config(vocab_size=len(tokenizer), draft_vocab_size=len(tokenizer), fc_norm=True, norm_output=True),
        mla=SIZES,
        num_key_value_heads=2,
        head_dim=SIZES.qk_head_dim,
        max_position_embeddings=256,
    )
    drafter = random_drafter(latent, own_embedding=False)
    write_checkpoint(checkpoint_of(drafter), folder / "drafter", layout="vllm")
    return folder / "target", folder / "drafter"


@each("family", ["deepseek_v2", "deepseek_v3", "kimi_k2"])
def test_a_pair_with_latent_attention_is_checked_planned_and_answers(family: str, run: Run, tmp_path: Path) -> None:
    target, drafter = save_pair(tmp_path, family)

    checked = run("check", drafter, "--target", target)
    assert checked.code == 0, checked

    planned = run("plan", target, "--drafter", drafter, "--gpu", "rtx4090", "--json")
    assert planned.code == 0, planned
    formulas = json.dumps(json.loads(planned.out)["formulas"])
    assert "(24 + 8) of the latent" in formulas

    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"Bird {i}"}) + "\n" for i in range(7)))
    told = []
    for speculative in (["--drafter", "none"], ["--drafter", drafter, "--depth", "3"]):
        options = ["--target", target, "--max-tokens", "8", "--temperature", "0.8", "--dtype", "float32", "--json"]
        outcome = run("generate", "--file", prompts, *speculative, *options)
        assert outcome.code == 0, outcome
        told.append([json.loads(line) for line in outcome.out.splitlines()])
    assert len(told[0]) == 7
    assert [one["answer"] for one in told[1]] == [one["answer"] for one in told[0]]
