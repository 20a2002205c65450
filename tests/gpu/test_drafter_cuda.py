"""The drafter computes on a GPU what it computes on a CPU, and the reference decoder is lossless there too."""

import copy
import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import tiny
from eyas.drafter.model import Drafter
from eyas.target.model import Target
from oracle.dense import DenseAttention, DenseTarget, EagleDraft
from oracle.reference import Chain, Tree, decode_plainly, decode_speculatively
from oracle.rejection import SeededDraws

pytestmark = pytest.mark.gpu

FLAGS = ("fc_norm", "norm_output", "norm_before_fc", "norm_before_residual")


def three_depths(drafter: Drafter, aux: Tensor, ids: Tensor) -> list[Tensor]:
    """Logits of the last slot at depths 0, 1, 2 along fixed tokens."""
    attention = DenseAttention()
    output = drafter.step(drafter.fuse(aux), ids, torch.arange(len(ids), device=ids.device), attention)
    logits = [drafter.logits(output.normed[-1])]
    for depth in (1, 2):
        attention = DenseAttention(attention.present)
        position = torch.tensor([len(ids) - 1 + depth], device=ids.device)
        output = drafter.step(output.feedback[-1:], ids[depth : depth + 1], position, attention)
        logits.append(drafter.logits(output.normed[-1]))
    return logits


@pytest.mark.parametrize("values", itertools.product([False, True], repeat=4))
def test_float32_on_cuda_equals_cpu_for_every_flag(values: tuple[bool, ...]) -> None:
    drafter = tiny.random_drafter(tiny.drafter_config(**dict(zip(FLAGS, values, strict=True)), num_hidden_layers=2))
    generator = torch.Generator().manual_seed(0)
    aux = torch.randn(20, 3 * tiny.HIDDEN, generator=generator) * 5
    ids = torch.randint(tiny.VOCAB, (20,), generator=generator)
    on_cpu = three_depths(drafter, aux, ids)
    on_cuda = three_depths(drafter.cuda(), aux.cuda(), ids.cuda())
    for cpu, cuda in zip(on_cpu, on_cuda, strict=True):
        torch.testing.assert_close(cuda.cpu(), cpu, atol=1e-4, rtol=1e-4)


def test_bfloat16_on_cuda_stays_near_float32() -> None:
    drafter = tiny.random_drafter(tiny.drafter_config(fc_norm=True, norm_output=True))
    generator = torch.Generator().manual_seed(0)
    aux = torch.randn(20, 3 * tiny.HIDDEN, generator=generator)
    ids = torch.randint(tiny.VOCAB, (20,), generator=generator)
    exact = three_depths(drafter, aux, ids)
    rounded = three_depths(drafter.to("cuda", torch.bfloat16), aux.to("cuda", torch.bfloat16), ids.cuda())
    for a, b in zip(exact, rounded, strict=True):
        assert float((a - b.float().cpu()).abs().max()) < 0.05 * float(a.abs().max())


def test_greedy_speculation_on_cuda_equals_plain_decoding(tiny_target: Target, tiny_drafter: Drafter) -> None:
    target = replace(tiny_target, model=copy.deepcopy(tiny_target.model).cuda())
    dense, drafter = DenseTarget(target, tiny_drafter.config), EagleDraft(copy.deepcopy(tiny_drafter).cuda())
    accepted = rounds = 0
    for prompt in tiny.language(10, 12, torch.Generator().manual_seed(4)).tolist():
        plain = decode_plainly(dense, prompt, draws=SeededDraws(0), max_new_tokens=24)
        for shape in (Chain(depth=4), Tree(depth=3, width=2, budget=8)):
            ours = decode_speculatively(dense, drafter, prompt, shape=shape, draws=SeededDraws(0), max_new_tokens=24)
            assert ours.tokens == plain
            accepted += sum(r.accepted for r in ours.rounds)
            rounds += len(ours.rounds)
    assert accepted > rounds
