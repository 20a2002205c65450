"""Documents in one pass equal each document alone; nothing is seen across their borders."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from each import each
from eyas.errors import UserError
from eyas.target.facts import facts_of
from eyas.target.model import Target
from eyas.target.packed import PackedTarget, _WithinDocuments, attends_plainly, runs_in_one_pass
from target.test_parts import target_of
from tiny import Letters, latent_target_config

LENGTHS = (5, 9, 1, 6)
IDS = (1, 2, 4)


def starts_of(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


def packed(target: Target, lengths: tuple[int, ...] = LENGTHS, *, one_pass: bool = False) -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, 80, (sum(lengths),), generator=torch.Generator().manual_seed(3))
    positions = torch.cat([torch.arange(n) for n in lengths])
    return PackedTarget(target, IDS, one_pass=one_pass)(ids, positions, starts_of(lengths), max(lengths))


def alone(target: Target) -> tuple[Tensor, Tensor]:
    """Each document alone, through the target's own forward pass."""
    ids = torch.randint(0, 80, (sum(LENGTHS),), generator=torch.Generator().manual_seed(3))
    decoder: Any = target.model.get_decoder()
    pieces = [ids[None, a:b] for a, b in pairwise(starts_of(LENGTHS).tolist())]
    with torch.no_grad():
        hidden = [decoder(input_ids=piece, use_cache=False).last_hidden_state[0] for piece in pieces]
    return torch.cat(hidden), torch.cat([target.forward(piece, IDS).aux_hidden_BTX[0] for piece in pieces])


@each("family", ["llama", "mistral", "gemma2", "gemma3_text", "phi", "qwen3_moe", "gpt2"])
def test_documents_in_one_call_equal_documents_alone(family: str) -> None:
    target = target_of(family)
    for ours, theirs in zip(packed(target), alone(target), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_empty_documents_at_the_end_are_harmless() -> None:
    target = target_of("llama")
    for ours, theirs in zip(packed(target, (*LENGTHS, 0, 0, 0)), packed(target), strict=True):
        assert torch.equal(ours, theirs)


def flash_written_out(
    q_THK: Tensor,
    k_TGK: Tensor,
    v_TGK: Tensor,
    starts: Tensor,
    *_: object,
    scale: float,
    window_size_left: int = 9999,
    **__: object,
) -> tuple[Tensor]:
    """What flash attention computes, for machines without a GPU."""
    group = q_THK.shape[1] // k_TGK.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k_TGK, v_TGK))
    index = torch.arange(len(q_THK))
    document = torch.searchsorted(starts[1:].long(), index, right=True)
    distance = index[:, None] - index
    visible = (distance >= 0) & (distance <= window_size_left) & (document[:, None] == document)
    scores = (torch.einsum("thk,shk->hts", q_THK, k) * scale).masked_fill(~visible, float("-inf"))
    return (torch.einsum("hts,shk->thk", scores.softmax(-1), v),)


@each("family", ["llama", "qwen2", "qwen3", "mistral", "gemma", "gemma3_text", "phi", "mixtral", "gpt2"])
def test_one_pass_equals_documents_alone_for_any_attention_that_knows_the_borders(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", flash_written_out)
    target = target_of(family)
    assert attends_plainly(target.model)
    config = target.model.config.get_text_config()
    if getattr(config, "sliding_window", None):
        config.sliding_window = 4
        for module in target.model.modules():
            if getattr(module, "sliding_window", None):
                module.sliding_window = 4
    expected, before = alone(target), config._attn_implementation
    for ours, theirs in zip(packed(target, one_pass=True), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert config._attn_implementation == before


def test_values_that_are_narrower_than_keys_are_padded_for_flash(monkeypatch: pytest.MonkeyPatch) -> None:
    widths = set()

    def flash(q: Tensor, k: Tensor, v: Tensor, *given: Any, **options: Any) -> tuple[Tensor]:
        widths.add((q.shape[-1], k.shape[-1], v.shape[-1]))
        return flash_written_out(q, k, v, *given, **options)

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", flash)
    model = AutoModelForCausalLM.from_config(latent_target_config()).eval()  # type: ignore[no-untyped-call]
    target = Target(facts=facts_of(model.config, "latent"), model=model.requires_grad_(False), tokenizer=Letters())
    assert attends_plainly(target.model)
    for ours, theirs in zip(packed(target, one_pass=True), alone(target), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert widths == {(96, 96, 96)}


def test_attention_that_flash_does_not_support_is_refused() -> None:
    x = torch.zeros(3, 2, 8)
    within = _WithinDocuments(starts_of((3,)), 4)
    with pytest.raises(UserError, match=r"Linear caps its attention scores.*target\.dtype"):
        within(torch.nn.Linear(1, 1), x, x, x, 1.0, 30.0, None, None)
    with pytest.raises(UserError, match=r"Linear has sinks in its attention.*target\.dtype"):
        within(torch.nn.Linear(1, 1), x, x, x, 1.0, None, None, torch.zeros(2))


@each(
    ("family", "plainly"),
    [
        ("llama", True),
        ("qwen3_moe", True),
        ("gemma2", False),
        ("gpt_oss", False),
        ("qwen3_next", False),
        ("mamba", False),
    ],
)
def test_only_plain_attention_goes_in_one_pass(family: str, plainly: bool) -> None:
    config = AutoConfig.for_model(family, num_hidden_layers=4)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    assert attends_plainly(model) == plainly


def test_one_pass_is_for_half_precision_on_a_gpu() -> None:
    assert not runs_in_one_pass(target_of("llama"))
