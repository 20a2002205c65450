"""The fused pass of a drafter computes what its model does; where it would not, the model runs."""

from itertools import product

import pytest
import torch

from each import each
from eyas.drafter.model import Drafter
from eyas.engine.runner.draft_passes import DraftPasses
from eyas.engine.runner.fused_drafter import _FusedDrafter, fused_drafter
from eyas.kernels.elementwise import Elementwise, load_elementwise
from eyas.kernels.linear.packed_linear import load_kernel, pack_linears
from eyas.kernels.llama.rotary_table import FIRST_POSITIONS
from oracle.dense import DenseAttention
from tiny import drafter_config, random_drafter

FLAGS = ("fc_norm", "norm_output", "norm_before_residual", "norm_before_fc", "attention_bias", "mlp_bias")
SETTINGS = [dict(zip(FLAGS, values, strict=True)) for values in product([False, True], repeat=len(FLAGS))]


@pytest.fixture(autouse=True)
def _compiled() -> None:
    if load_elementwise() is None:
        pytest.skip("no C compiler here, or none that can be trusted")


def drafter_of(**flags: bool | int) -> Drafter:
    if flags.get("fc_norm") and flags.get("norm_before_fc"):
        flags["norm_before_fc"] = False  # they exclude each other
    return random_drafter(drafter_config(**flags)).eval().requires_grad_(False)


@torch.inference_mode()
def assert_drafts_alike(lean: DraftPasses, drafter: Drafter) -> None:
    assert type(lean) is not DraftPasses, "the model is not compared with itself"
    config = drafter.config
    aux_NX = torch.randn(5, config.num_aux_hidden_states * config.target_hidden_size) * 20
    token_N, position_N = torch.randint(config.vocab_size, (5,)), torch.arange(5)
    ours, theirs = lean.fuse(aux_NX), drafter.fuse(aux_NX)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    attends = DenseAttention(), DenseAttention()
    for depth in range(4):
        mine = lean.step(ours, token_N, position_N + depth, attends[0])
        other = drafter.step(theirs, token_N, position_N + depth, attends[1])
        for name in ("normed", "feedback"):
            torch.testing.assert_close(getattr(mine, name), getattr(other, name), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(lean.logits(mine.normed), drafter.logits(other.normed), rtol=1e-4, atol=1e-4)
        ours, theirs = mine.feedback, other.feedback
        attends = DenseAttention(attends[0].present), DenseAttention(attends[1].present)


@each("flags", SETTINGS)
def test_every_flag_is_honoured(flags: dict[str, bool]) -> None:
    drafter = drafter_of(**flags)
    assert_drafts_alike(fused_drafter(drafter), drafter)


@each("residual", [False, True])
def test_norms_of_queries_and_keys_are_honoured(residual: bool) -> None:
    drafter = drafter_of(qk_norm=True, fc_norm=True, norm_output=True, norm_before_residual=residual)
    assert_drafts_alike(fused_drafter(drafter), drafter)


@each("qk_norm", [False, True])
def test_packed_linears_are_run_as_one(qk_norm: bool) -> None:
    if load_kernel()[0] is None:
        pytest.skip("no C compiler here, or none that can be trusted")
    flags = {"fc_norm": True, "norm_output": True, "qk_norm": qk_norm}
    drafter, packed = drafter_of(**flags), drafter_of(**flags)
    assert pack_linears(packed).linears > 0
    assert_drafts_alike(fused_drafter(packed), drafter)


def test_more_layers_and_other_types_run_by_the_model() -> None:
    deep = random_drafter(drafter_config(num_hidden_layers=2))
    half = drafter_of().to(torch.bfloat16)
    homeless = random_drafter(drafter_config(), own_embedding=False)
    mixed = drafter_of()
    assert mixed.embed_tokens is not None
    mixed.embed_tokens.bfloat16()
    for drafter in (deep, half, homeless, mixed):
        assert type(fused_drafter(drafter)) is DraftPasses


@each("step", ["gate", "rotate", "norm"])
def test_a_wrong_step_is_found_by_the_trial(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, right = drafter_of(), getattr(Elementwise, step)

    def wrong(self: Elementwise, *given: torch.Tensor) -> object:
        made = right(self, *given)
        (given[-1] if made is None else made).mul_(1.01)
        return made

    monkeypatch.setattr(Elementwise, step, wrong)
    assert type(fused_drafter(drafter)) is DraftPasses


def test_the_trial_leaves_no_rotations_of_positions_that_were_not_reached() -> None:
    drafter = drafter_of(max_position_embeddings=3 * FIRST_POSITIONS)
    fused = fused_drafter(drafter)
    assert isinstance(fused, _FusedDrafter)
    assert len(fused.turns.cos_TK) == FIRST_POSITIONS
    far_N = torch.tensor([3 * FIRST_POSITIONS - 1])
    cos_NGK, sin_NGK = drafter.rope(far_N, torch.float32)
    ours = fused.turns.at(far_N)
    assert torch.equal(torch.stack(ours), torch.stack([cos_NGK[:, 0], sin_NGK[:, 0]]))
