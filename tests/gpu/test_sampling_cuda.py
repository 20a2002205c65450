"""On a GPU tokens are sampled as on a CPU, and a captured graph samples for the requests in its slots.

The first half also runs on a CPU in Triton's interpreter: TRITON_INTERPRET=1, with `--noconftest` against the skip.
"""

import pytest
import torch
from torch import Tensor

from engine.test_slot_sampling import EVERYTHING, random_batch
from eyas.kernels import noise, nucleus
from eyas.kernels.round_outcome import accepted_drafts

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("size", [3, 97, 9000])
@pytest.mark.parametrize("cut", [False, True])
def test_the_race_is_won_by_the_same_tokens(size: int, cut: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from eyas.kernels.noise_triton import first_by_triton

    generator = torch.Generator().manual_seed(size)
    logits_NV = 3 * torch.randn(12, size, generator=generator)
    p_NV = logits_NV.softmax(dim=-1)
    if cut:
        p_NV = p_NV.masked_fill(torch.rand(p_NV.shape, generator=generator) < 0.9, 0.0)
        p_NV[:, size // 2] = 0.1
    seed_N = torch.randint(-(2**63), 2**63 - 1, (12,), generator=generator)
    position_N, greedy_N = torch.arange(12) * 1001, torch.arange(12) % 4 // 3
    token_V = torch.randperm(2 * size, generator=generator)[:size]
    inputs = [x.to(DEVICE) for x in (p_NV, logits_NV, greedy_N, seed_N, position_N, token_V)]
    won_N = first_by_triton(*inputs)
    monkeypatch.setattr(noise, "has_triton", lambda: False)
    assert won_N.tolist() == noise.first(*inputs).tolist()


@pytest.mark.parametrize("size", [2, 97, 9000, 20000])
def test_nuclei_are_those_of_a_sorted_row(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from eyas.kernels.nucleus_triton import nucleus_by_triton

    generator = torch.Generator().manual_seed(size)
    logits_NV = 3 * torch.randn(14, size, generator=generator)
    logits_NV[4:8] = logits_NV[4:8].round()  # many ties
    logits_NV[8] = 0
    logits_NV[9, 1:] = -torch.inf
    logits_NV[10] *= 30
    p_NV = logits_NV.softmax(dim=-1).to(DEVICE)
    top_p_N1 = torch.rand(14, 1, generator=generator)
    top_p_N1[0], top_p_N1[4], top_p_N1[5], top_p_N1[11] = 2.0, 1.0, 1e-9, 0.999
    kept_NV = nucleus_by_triton(p_NV, top_p_N1.to(DEVICE))
    monkeypatch.setattr(nucleus, "has_triton", lambda: False)
    assert torch.equal(kept_NV, nucleus.nucleus(p_NV, top_p_N1.to(DEVICE)))


@pytest.mark.parametrize("seed", range(12))
def test_mixed_batches_choose_as_the_law_does_on_a_cpu(seed: int) -> None:
    batch = random_batch(seed, size=9000 if seed % 3 == 0 else 700, device=DEVICE)
    assert torch.equal(batch.choose(), batch.expected())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs are CUDA's")
@pytest.mark.parametrize("everything", [False, True])
def test_a_captured_sampler_follows_its_slots(everything: bool) -> None:
    batch = random_batch(0, size=700, depth=2, device=DEVICE)
    needs = batch.sampling.needs(batch.seqs) | EVERYTHING
    if not everything:
        needs = type(needs)(sampled=True)
    inputs = [x.to(DEVICE) for x in (batch.logits_NV, batch.slot_R, batch.position_R, batch.drafts_RK)]
    outputs: list[Tensor] = []

    def sample() -> None:
        logits_NV, slot_R, position_R, drafts_RK = inputs
        token_RQ = batch.sampling.choose(logits_NV, slot_R, position_R, drafts_RK, needs)
        accepted_R = accepted_drafts(token_RQ, drafts_RK, torch.full_like(slot_R, 2))
        outputs[:] = [token_RQ, accepted_R]

    beside = torch.cuda.Stream()
    with torch.cuda.stream(beside):
        sample()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sample()
    of_graph = list(outputs)  # the next replay overwrites them
    for turn in range(3):
        batch.seqs.reverse()
        batch.sampling.admit(batch.slots, batch.seqs)()
        inputs[0].copy_(3 * torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(turn)))
        inputs[2].copy_(batch.position_R)
        graph.replay()
        captured = [x.clone() for x in of_graph]
        sample()
        assert all(torch.equal(a, b) for a, b in zip(captured, outputs, strict=True))
