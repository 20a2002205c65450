"""Layers in one call give the bits of their single steps; models with other steps have no single call."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from each import each
from eyas.drafter.model import Drafter
from eyas.engine.kv_cache.cache import KVCache, PagedAttention
from eyas.engine.runner.draft_passes import DraftPasses
from eyas.engine.runner.fused_drafter import _FusedDrafter, fused_drafter
from eyas.kernels.attention.choose import choose_backend
from eyas.kernels.attention.dense import DenseBackend
from eyas.kernels.attention.metadata import AttentionMetadata, AttentionRow
from eyas.kernels.linear.embedding_table import QuantisedEmbedding
from eyas.kernels.linear.packed_linear import pack_linears
from eyas.kernels.linear.quantised_linear import (
    QuantisedLinear,
    load_quantised,
    quantise,
    replace_by_blocks,
)
from eyas.kernels.llama import eagle
from eyas.kernels.llama.block import FusedLlama
from eyas.kernels.llama.cpu import load_layers
from eyas.kernels.llama.rotary_table import FIRST_POSITIONS
from eyas.target.model import Target
from kernels.test_attention import MakeBackend
from kernels.test_recognise import DENSE, assert_same_pass, lean_of, plain, zeros
from tiny import drafter_config, random_drafter

SIZE = 4
TREE = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], dtype=torch.bool)
PASSES = (
    [AttentionRow(blocks=(3, 1, 6), base=0, count=9)],
    [AttentionRow(blocks=(3, 1, 6), base=9, count=1), AttentionRow(blocks=(2, 5), base=0, count=4)],
    [AttentionRow(blocks=(3, 1, 6), base=8, count=2), AttentionRow(blocks=(2, 5), base=4, count=4, ancestors=TREE)],
)


@pytest.fixture(autouse=True)
def _compiled() -> None:
    if load_layers() is None:
        pytest.skip("no C compiler here, or none that can be trusted")


def packed(block: str = "llama", **changes: Any) -> Target:
    sizes = {"hidden_size": 128, "intermediate_size": 96} | ({} if block.startswith("phi3") else {"head_dim": 32})
    target = plain(block, **{**sizes, **changes})
    assert pack_linears(target.model).linears > 0
    return target


def layout_of(rows: Sequence[AttentionRow]) -> AttentionMetadata:
    return AttentionMetadata.of(rows, block_size=SIZE, device=torch.device("cpu"))


@torch.inference_mode()
def passes_of(
    lean: FusedLlama, aux_layer_ids: Sequence[int], backend: MakeBackend = choose_backend
) -> list[torch.Tensor]:
    """Logits, states and the cache contents of each pass."""
    kv, made = zeros(lean, blocks=7, block_size=SIZE), list[torch.Tensor]()
    generator = torch.Generator().manual_seed(3)
    for rows in PASSES:
        layout = layout_of(rows)
        ids_N = torch.randint(len(lean.embedding_VD), layout.slot_mapping_N.shape, generator=generator)
        logits, aux = lean.forward(ids_N, backend(layout), kv, None, aux_layer_ids)
        made += [logits, *([] if aux is None else [aux])]
    return [*made, *(x for pair in kv.values() for x in pair)]


@each("block", DENSE)
def test_one_call_has_the_bits_of_single_steps_for_every_block(block: str) -> None:
    target = packed(block)
    lean = lean_of(target)
    assert lean.layers is not None
    assert_same_pass(target, lean, range(5), rtol=1e-3, atol=1e-3)
    ours, theirs = passes_of(lean, (0, 3)), passes_of(replace(lean, layers=None), (0, 3))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@each("aux_layer_ids", [(), (0, 2), (1, 4)])
@each(
    "changes",
    [{}, {"attention_bias": True, "mlp_bias": True}, {"num_key_value_heads": 4}, {"num_key_value_heads": 1}],
)
def test_one_call_has_the_bits_of_single_steps(changes: dict[str, Any], aux_layer_ids: tuple[int, ...]) -> None:
    target = packed(**changes)
    assert len(target.model.model.layers) == 4
    lean = lean_of(target)
    assert lean.layers is not None
    assert_same_pass(target, lean, rtol=0, atol=1e-3)  # states have an RMS of 19, and their errors are alike
    ours, theirs = passes_of(lean, aux_layer_ids), passes_of(replace(lean, layers=None), aux_layer_ids)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_where_attention_is_not_compiled_the_steps_run_one_by_one() -> None:
    lean = lean_of(packed())
    ours, theirs = passes_of(lean, (1,), DenseBackend), passes_of(replace(lean, layers=None), (1,), DenseBackend)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_layers_without_packed_linears_have_no_single_call() -> None:
    assert lean_of(plain()).layers is None


# --- a drafter's depth ---------------------------------------------------------------------------------------------

FLAGS = ("norm_output", "norm_before_residual", "attention_bias", "mlp_bias")
SETTINGS = [dict(zip(FLAGS, values, strict=True)) for values in product([False, True], repeat=len(FLAGS))]


def packed_drafter(*, halve: bool = False, **flags: bool) -> Drafter:
    drafter = random_drafter(drafter_config(hidden_size=64, head_dim=32, **flags)).eval().requires_grad_(False)
    if halve:
        drafter = drafter.bfloat16().float()
    assert pack_linears(drafter, halve=halve).linears > 0
    return drafter


@torch.inference_mode()
def depths_of(lean: _FusedDrafter, *, far: int = 0) -> list[torch.Tensor]:
    """The results of two depths, the second over as many tokens after the first."""
    config, cache, generator = lean._config, KVCache(blocks=7, block_size=SIZE), torch.Generator().manual_seed(3)
    hidden = torch.randn(9, config.hidden_size, generator=generator)
    made = list[torch.Tensor]()
    for base in (0, 9):
        layout = layout_of([AttentionRow(blocks=(3, 1, 6, 0, 2), base=base, count=9)])
        token_N = torch.randint(config.vocab_size, (9,), generator=generator)
        output = lean.step(hidden, token_N, layout.position_N + far, PagedAttention(cache, layout))
        hidden = output.feedback
        made += [output.normed, output.feedback]
    return [*made, *cache.layers[0]]


@each("halve", [False, True])
@each("flags", SETTINGS)
def test_a_depth_in_one_call_has_the_bits_of_single_steps(flags: dict[str, bool], halve: bool) -> None:
    lean = fused_drafter(packed_drafter(halve=halve, **flags))
    assert isinstance(lean, _FusedDrafter)
    assert lean._in_one_call is not None
    far = 3 * FIRST_POSITIONS  # the rotary table must grow
    ours = [depths_of(lean), depths_of(lean, far=far)]
    lean._in_one_call = None
    theirs = [depths_of(lean), depths_of(lean, far=far)]
    for mine, other in zip(ours, theirs, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, other, strict=True))
    assert not torch.equal(ours[0][2], ours[1][2]), "or positions do not matter"


@each("flags", [{}, {"fc_norm": True}, {"norm_before_fc": True}, {"fc_norm": True, "norm_output": True}])
@torch.inference_mode()
def test_reading_states_in_one_call_has_the_same_bits(flags: dict[str, bool]) -> None:
    lean = fused_drafter(packed_drafter(**flags))
    assert isinstance(lean, _FusedDrafter)
    config, generator = lean._config, torch.Generator().manual_seed(3)
    aux_NX = torch.randn(5, config.num_aux_hidden_states * config.target_hidden_size, generator=generator)
    token_N = torch.randint(config.vocab_size, (5,), generator=generator)
    layout, made = layout_of([AttentionRow(blocks=(3, 1), base=2, count=5)]), []
    for at_once in (True, False):
        cache = KVCache(blocks=7, block_size=SIZE)
        asked = token_N, layout.position_N, PagedAttention(cache, layout)
        output = lean.read(aux_NX, *asked) if at_once else lean.step(lean.fuse(aux_NX), *asked)
        made.append([output.normed, output.feedback, *cache.layers[0]])
    assert all(torch.equal(a, b) for a, b in zip(*made, strict=True))


@each("call", ["run_read", "run_depth"])
def test_a_wrong_call_is_rejected(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = getattr(eagle.DraftLayer, call)

    def wrong(self: eagle.DraftLayer, *given: Any) -> Any:
        made = right(self, *given)
        assert made is not None
        made[1].mul_(1.01)
        return made

    drafter = packed_drafter()
    monkeypatch.setattr(eagle.DraftLayer, call, wrong)
    assert type(fused_drafter(drafter)) is DraftPasses


# --- a chain of drafts ---------------------------------------------------------------------------------------------

CHUNK = 128
BASES = (0, 1, SIZE - 1, CHUNK - 3, CHUNK - 1)
"""Slots of the first drafts: within a block, across a block's end, and across a chunk's end of attention."""


@torch.inference_mode()
def chain_of(lean: _FusedDrafter, base: int, depths: int, window: int | None, *, at_once: bool) -> tuple[Any, ...]:
    """Drafts after random states in a random cache; with their probabilities and the cache contents."""
    config, generator = lean._config, torch.Generator().manual_seed(base)
    shape = (config.num_key_value_heads, 40 * SIZE, config.head_dim)
    cache = KVCache(blocks=40, block_size=SIZE)
    cache.layers[0] = (torch.randn(shape, generator=generator), torch.randn(shape, generator=generator))
    normed, feedback = torch.randn(2, 1, config.hidden_size, generator=generator)
    if config.norm_output:
        feedback = normed
    blocks = torch.randperm(40, generator=generator).tolist()

    def attend(slot: int) -> PagedAttention:
        layout = layout_of([AttentionRow(blocks=blocks, base=slot, count=1)])
        return PagedAttention(cache, layout, window=window, sinks=2 if window else 0)

    tokens, chances = list[int](), list[float]()
    if at_once:
        made = lean.chains(normed, feedback, attend(base), depths)
        assert made is not None
        tokens, chances = made.token_KR[:, 0].tolist(), made.chance_KR[:, 0].tolist()
    for depth in range(0 if at_once else depths):
        if depth:
            output = lean.step(
                feedback, torch.tensor(tokens[-1:]), torch.tensor([base + depth - 1]), attend(base + depth - 1)
            )
            normed, feedback = output.normed, output.feedback
        place, chance = lean.elementwise.most_likely_and_chance(lean.logits(normed).contiguous())
        tokens += lean.token_W[place].tolist()
        chances += chance.tolist()
    return tokens, chances, *cache.layers[0]


@each("base", BASES)
@each("flags", SETTINGS[::5])
def test_a_chain_in_one_call_has_the_bits_of_single_depths(flags: dict[str, bool], base: int) -> None:
    lean = fused_drafter(packed_drafter(**flags))
    assert isinstance(lean, _FusedDrafter)
    for depths, window in ((1, None), (2, None), (7, None), (7, 5)):
        ours, theirs = (chain_of(lean, base, depths, window, at_once=at_once) for at_once in (True, False))
        assert ours[:2] == theirs[:2]
        assert len(ours[0]) == depths
        assert all(torch.equal(a, b) for a, b in zip(ours[2:], theirs[2:], strict=True))


def test_a_chain_of_a_quantised_drafter_with_scaled_logits_is_the_same() -> None:
    kernel, reason = load_quantised()
    assert kernel is not None, reason
    drafter = random_drafter(drafter_config(hidden_size=64, head_dim=32, norm_output=True, logit_scale=0.3)).eval()
    drafter.requires_grad_(False)
    replace_by_blocks(drafter, kernel, lambda linear: quantise(linear.weight, 8))
    assert drafter.embed_tokens is not None
    table = QuantisedLinear.of(kernel, quantise(drafter.embed_tokens.weight, 4))
    drafter.embed_tokens = QuantisedEmbedding(table)  # type: ignore[assignment]
    lean = fused_drafter(drafter)
    assert isinstance(lean, _FusedDrafter)
    ours, theirs = (chain_of(lean, 3, 5, None, at_once=at_once) for at_once in (True, False))
    assert ours[:2] == theirs[:2]


def test_a_wrong_chain_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    right = eagle.DraftLayer.run_chains

    def wrong(self: eagle.DraftLayer, *given: Any) -> Any:
        made = right(self, *given)
        assert made is not None
        made.chance_KR[:] *= 0.99
        return made

    drafter = packed_drafter()
    monkeypatch.setattr(eagle.DraftLayer, "run_chains", wrong)
    assert type(fused_drafter(drafter)) is DraftPasses


# --- rotations computed ahead --------------------------------------------------------------------------------------


@each("block", ["llama", "gemma3"])
def test_rotations_computed_ahead_match_positions(block: str) -> None:
    lean = lean_of(packed(block))
    assert lean._next_turns is not None
    x_ND = torch.zeros(1, 128)
    for first, count in ((0, 1), (1, 4), (60, 4), (61, 4), (64, 16), (3, 2), (5000, 1), (5001, 3)):
        row = AttentionRow(blocks=range(1300), base=first, count=count)
        metadata = layout_of([row])
        ours, theirs = lean._pass_turns(x_ND, metadata), lean._turns(x_ND, metadata.position_N)
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
