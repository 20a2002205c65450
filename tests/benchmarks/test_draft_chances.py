"""Chances of drafts are those with which they are accepted: tossed one by one, and by the engine that serves."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from draft_chances import GREEDY, SAMPLED, draft_chances, expect_rounds
from torch import Tensor

import tiny
from eyas.drafter.model import Drafter
from eyas.engine.config import EngineConfig
from eyas.engine.engine import Engine
from eyas.engine.request import Request, Speculation
from eyas.kernels.noise import race
from eyas.sampling import Sampling
from eyas.target.model import Target
from eyas.train.attention import DenseUnrollAttention
from eyas.train.estimate import walk_rounds
from eyas.train.loss import LOSSES, forward_loss
from eyas.train.sources.live import LiveSource
from eyas.train.unroll import unroll
from train.batches import ScoreTeacher, batch_of, drafter_of, features_of

TOSSES = 60_000


def chances_of(scores: Tensor, said: Tensor, kept: Tensor, token: int) -> dict[str, float]:
    """Of one draft, in a text of four tokens whose third is `token`; `scores` over the draft vocabulary."""
    drafter = drafter_of()
    ids = torch.tensor([0, 0, token, 0])
    batch = batch_of([4], mask=[0, 1, 1, 0], ids=ids)
    features, logits_TV = features_of(batch), said.expand(4, -1)
    features = replace(features, teachers=lambda target_ids_W: ScoreTeacher(logits_TV, target_ids_W))
    with torch.no_grad():
        state_D = unroll(drafter, batch, features.aux_TX, depths=1, attend=DenseUnrollAttention(batch))[0, 0]
        # A head that makes these scores of the first channel of that state, whatever it is.
        head_WD = torch.zeros(len(kept), len(state_D))
        head_WD[:, 0] = scores / state_D[0]
        assert drafter.lm_head is not None
        drafter.lm_head.weight = torch.nn.Parameter(head_WD)
    found = draft_chances(drafter, batch, features, target_ids_W=kept, layer_ids=tiny.AUX_IDS, depths=1)
    return {rule: float(chance_SM[0, 0]) for rule, chance_SM in found.items()}


def test_chances_at_temperature_one_are_acceptance_rates() -> None:
    generator = torch.Generator().manual_seed(3)
    size, kept = tiny.VOCAB, torch.tensor([1, 2, 5, 7, 11])
    said = torch.full((size,), -9.0)
    said[:12] = torch.randn(12, generator=generator)
    scores = torch.randn(len(kept), generator=generator)
    p, q = said.softmax(dim=-1), scores.softmax(dim=-1)
    seed, position, everyone = torch.arange(TOSSES), torch.zeros(TOSSES, dtype=torch.int64), torch.arange(size)
    token = race(p.expand(TOSSES, -1), seed, position, everyone)[:, 0]
    draft = kept[race(q.expand(TOSSES, -1), seed, position, kept)[:, 0]]
    for x in (1, 5, 7):
        chances = chances_of(scores, said, kept, x)
        by_x = token == x
        assert chances["race"] == pytest.approx(float((draft[by_x] == x).float().mean()), abs=0.02)
        place = int((kept == x).nonzero())
        assert chances["rejection"] == pytest.approx(min(1.0, float(q[place] / p[x])), rel=1e-4)
        assert chances["guess"] == float(int(kept[q.argmax()]) == x)
    outside = chances_of(scores, said, kept, 3)
    assert [outside[rule] for rule in SAMPLED] == [0.0, 0.0, 0.0]


def test_a_perfect_drafter_is_always_accepted() -> None:
    said = torch.randn(tiny.VOCAB, generator=torch.Generator().manual_seed(0))
    chances = chances_of(said, said, torch.arange(tiny.VOCAB), 4)
    assert chances["race"] == pytest.approx(1.0, abs=1e-4)
    assert chances["rejection"] == pytest.approx(1.0, abs=1e-4)
    assert chances[GREEDY] == 1.0


def test_greedy_chances_are_the_hits_of_training(tiny_target: Target, tiny_drafter: Drafter) -> None:
    batch = batch_of([30, 9], mask=[0] * 5 + [1] * 25 + [0] * 2 + [1] * 7)
    features, kept = LiveSource(tiny_target, tiny.AUX_IDS)(batch), tiny_drafter.vocab().target_ids_W
    given = {"target_ids_W": kept, "layer_ids": tiny.AUX_IDS}
    found = draft_chances(tiny_drafter, batch, features, **given, depths=3, chunk=7)[GREEDY]
    with torch.no_grad():
        hit_SM = forward_loss(
            tiny_drafter, batch, features, **given, weights=[1.0] * 3, row_loss=LOSSES["kl"], chunk=64
        ).hit_SM
    counts_SM = batch.run_M[None] > torch.arange(3)[:, None]
    assert torch.equal(found.bool() & counts_SM, hit_SM)


MASK = [0, 1, 1, 1, 1, 1, 1, 1, 0, 0, 1, 1, 1, 0, 1, 1, 1, 1, 1]


def test_expected_rounds_of_certain_drafts_are_the_walked_rounds() -> None:
    batch = batch_of([len(MASK)], mask=MASK)
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        hit_SM = torch.rand(3, len(batch.row_M), generator=generator) < 0.6
        expected, walked = expect_rounds(batch, hit_SM.float()), walk_rounds(batch, hit_SM)
        assert expected.rounds_A.sum() == walked.rounds
        assert tuple(expected.accepted_AS.sum(axis=0)) == walked.accepted_at
        assert expected.acceptance_length == pytest.approx(walked.acceptance_length)
        assert expected.rounds_A.shape == (3,)


def test_expected_rounds_are_the_mean_of_sampled_rounds() -> None:
    batch = batch_of([len(MASK)], mask=MASK)
    generator = torch.Generator().manual_seed(0)
    chance_SM = torch.rand(3, len(batch.row_M), generator=generator)
    tossed = [walk_rounds(batch, torch.rand(chance_SM.shape, generator=generator) < chance_SM) for _ in range(4000)]
    expected = expect_rounds(batch, chance_SM)
    assert expected.rounds_A.sum() == pytest.approx(np.mean([t.rounds for t in tossed]), rel=0.02)
    assert expected.accepted_AS.sum(axis=0) == pytest.approx(np.mean([t.accepted_at for t in tossed], axis=0), rel=0.05)
    assert expect_rounds(batch_of([4], mask=[0] * 4), torch.zeros(3, 0)).acceptance_length == 1.0


@pytest.mark.slow
def test_the_estimate_at_temperature_one_is_what_the_engine_accepts(tiny_target: Target, tiny_drafter: Drafter) -> None:
    depth, users, new = 3, 48, 60
    engine = Engine(tiny_target, tiny_drafter, config=EngineConfig(max_num_seqs=16, max_model_len=128))
    texts: dict[int, list[int]] = {}
    for seed, prompt in enumerate(torch.randint(tiny.VOCAB, (users, 8), generator=torch.Generator().manual_seed(5))):
        request = Request(
            prompt=tuple(prompt.tolist()),
            sampling=Sampling(temperature=1.0),
            max_new_tokens=new,
            speculation=Speculation(mode="fixed", depth=depth),
            seed=seed,
            detokenize=False,
        )
        texts[engine.submit(request)] = prompt.tolist()
    while engine.busy:
        for piece in engine.step():
            texts[piece.key] += piece.tokens
    measured = 1 + engine.stats.accepted / engine.stats.drafts
    ids = torch.tensor([token for text in texts.values() for token in text])
    mask = [int(place >= 8) for text in texts.values() for place in range(len(text))]
    batch = batch_of([len(text) for text in texts.values()], mask=mask, ids=ids)
    features, kept = LiveSource(tiny_target, tiny.AUX_IDS)(batch), tiny_drafter.vocab().target_ids_W
    chances = draft_chances(
        tiny_drafter, batch, features, target_ids_W=kept, layer_ids=tiny.AUX_IDS, depths=depth, chunk=500
    )
    assert engine.stats.drafts > 500
    assert expect_rounds(batch, chances["race"]).acceptance_length == pytest.approx(measured, rel=0.05)
