"""Attention over slots is attention over each request alone; what is not plain causal attention is refused."""

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import Gemma2Config, Gemma2ForCausalLM, MistralConfig, MistralForCausalLM, PreTrainedModel

from eyas.drafter.attention import attend_densely, causal_mask
from eyas.engine.slots import SlotAttention, SlotCache, SlotTarget, Spans
from eyas.errors import UserError
from eyas.target.facts import facts_of
from eyas.target.model import Target
from tiny import VOCAB, language

SLOTS, LENGTH, HEADS, KEY_HEADS, SIZE = 5, 24, 6, 2, 8
CPU = torch.device("cpu")


def qkv(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.randn(count, HEADS, SIZE, generator=generator),
        torch.randn(count, KEY_HEADS, SIZE, generator=generator),
        torch.randn(count, KEY_HEADS, SIZE, generator=generator),
    )


@pytest.mark.parametrize("seed", range(6))
def test_random_rows_attend_as_each_request_alone(seed: int) -> None:
    chance, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    cache = SlotCache(slots=SLOTS, length=LENGTH)
    held: list[tuple[Tensor, Tensor]] = [(torch.empty(0, KEY_HEADS, SIZE),) * 2 for _ in range(SLOTS)]
    for _ in range(12):
        slots = chance.sample(range(SLOTS), chance.randint(1, SLOTS))
        equal = chance.choice([None, 1, 3])
        rows = []
        for slot in slots:
            # Some rows go back: rejected drafts are written over, new requests begin at 0.
            start = chance.randint(0, min(len(held[slot][0]), LENGTH - 4))
            rows.append((slot, start, equal or chance.randint(1, 4)))
        q, k, v = qkv(sum(count for _, _, count in rows), generator)
        ours = SlotAttention(cache, Spans.of(rows, CPU))(0, q, k, v)
        at = 0
        for slot, start, count in rows:
            here = slice(at, at + count)
            keys, values = (torch.cat([old[:start], new[here]]) for old, new in zip(held[slot], (k, v), strict=True))
            held[slot] = keys, values
            theirs = attend_densely(q[here], keys, values, causal_mask(count, len(keys), device=CPU))
            torch.testing.assert_close(ours[here], theirs, rtol=1e-5, atol=1e-5)
            at += count


def test_layouts_made_on_host_and_device_are_the_same() -> None:
    host = Spans.of([(3, 4, 2), (0, 0, 2), (1, 7, 2)], CPU)
    device = Spans.even(torch.tensor([3, 0, 1]), torch.tensor([4, 0, 7]), 2, longest_k=9)
    for name in ("slot_R", "slot_N", "position_N", "cu_q", "used_R", "last_R"):
        ours, theirs = getattr(host, name), getattr(device, name)
        assert ours.dtype == theirs.dtype, name
        assert ours.tolist() == theirs.tolist(), name
    assert (host.longest_q, host.longest_k) == (device.longest_q, device.longest_k) == (2, 9)


def test_every_slot_in_order_reads_the_cache_where_it_lies() -> None:
    generator = torch.Generator().manual_seed(0)
    cache = SlotCache(slots=SLOTS, length=LENGTH)
    rows = [(slot, 0, slot + 1) for slot in range(SLOTS)]
    SlotAttention(cache, Spans.of(rows, CPU))(0, *qkv(15, generator))
    new = qkv(SLOTS, generator)
    slot_R, first_R = torch.arange(SLOTS), torch.arange(1, SLOTS + 1)
    gathered, in_place = (
        SlotAttention(cache, Spans.even(slot_R, first_R, 1, longest_k=SLOTS + 1, every_slot=every))(0, *new)
        for every in (False, True)
    )
    assert torch.equal(gathered, in_place)


def test_a_target_over_slots_computes_what_it_computes_alone(tiny_target: Target) -> None:
    before = tiny_target.model.config._attn_implementation
    prompts = [
        row[:n] for row, n in zip(language(3, 9, torch.Generator().manual_seed(5)).tolist(), (9, 4, 6), strict=True)
    ]
    model = SlotTarget(tiny_target, slots=3, length=16)
    split = [3, 0, 5]  # the second pass continues after these many
    first = [(slot, 0, n) for slot, n in enumerate(split) if n]
    second = [(slot, n, len(prompts[slot]) - n) for slot, n in enumerate(split)]
    with torch.no_grad():
        for rows in (first, second):
            ids = torch.tensor([t for slot, start, n in rows for t in prompts[slot][start : start + n]])
            spans = Spans.of(rows, CPU)
            ours = model.forward(ids, spans)
            assert tiny_target.model.config._attn_implementation == before, "restored after every pass"
        kept = model.forward(ids, spans, spans.last_R)
    torch.testing.assert_close(kept, ours[spans.last_R])
    at = 0
    for slot, start, n in second:
        theirs = tiny_target.model(torch.tensor([prompts[slot]])).logits[0, start:]
        torch.testing.assert_close(ours[at : at + n], theirs, rtol=1e-4, atol=1e-4)
        at += n


SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}


def as_target(model: PreTrainedModel, like: Target) -> Target:
    return replace(like, facts=facts_of(model.config, "odd"), model=model.eval().requires_grad_(False))


def test_a_window_shorter_than_the_slots_is_refused_and_a_longer_one_served(tiny_target: Target) -> None:
    odd = as_target(MistralForCausalLM(MistralConfig(**SIZES, sliding_window=12)), tiny_target)
    spans = Spans.of([(0, 0, 5)], CPU)
    ids = torch.arange(5)
    theirs = odd.model(ids[None]).logits[0]
    torch.testing.assert_close(SlotTarget(odd, slots=1, length=12).forward(ids, spans), theirs, rtol=1e-4, atol=1e-4)
    with pytest.raises(UserError, match=r"a window of 12 tokens, below the 13 .* lower the longest context to 12"):
        SlotTarget(odd, slots=1, length=13).forward(ids, spans)
    assert odd.model.config._attn_implementation == "sdpa", "restored after a failure too"


def test_capped_scores_are_refused(tiny_target: Target) -> None:
    odd = as_target(Gemma2ForCausalLM(Gemma2Config(**SIZES, sliding_window=64)), tiny_target)
    with pytest.raises(UserError, match="attends with softcap"):
        SlotTarget(odd, slots=1, length=12).forward(torch.arange(5), Spans.of([(0, 0, 5)], CPU))
    with pytest.raises(UserError, match="a window of 64 tokens"):
        SlotTarget(odd, slots=1, length=65)


def test_layers_that_are_no_attention_are_refused(tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny_target.model.config, "layer_types", ["full_attention", "linear_attention"], raising=False)
    with pytest.raises(UserError, match="layers of type linear_attention"):
        SlotTarget(tiny_target, slots=1, length=8)


def test_no_slots_are_refused() -> None:
    with pytest.raises(UserError, match="slots is 0"):
        SlotCache(slots=0, length=8)
