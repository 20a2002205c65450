"""The estimate walks rounds as decoding does: on the target's own greedy text the two are equal, round by round."""

import numpy as np
import pytest
import torch

import tiny
from eyas.drafter.model import Drafter
from eyas.target.model import Target
from eyas.train.estimate import RoundCounts, expect_rounds, walk_rounds
from eyas.train.forward_loss import forward_loss
from eyas.train.loss import LOSSES
from eyas.train.sources.live import LiveSource
from oracle.dense import DenseTarget, EagleDraft
from oracle.reference import Chain, decode_plainly, decode_speculatively
from oracle.rejection import SeededDraws
from train.batches import batch_of

DEPTHS, NEW = 4, 40


def walk(mask: list[int], *hits: str) -> RoundCounts:
    """One document; a line of hits per depth, a character per teacher row."""
    batch = batch_of([len(mask)], mask=mask)
    return walk_rounds(batch, torch.tensor([[c == "x" for c in line] for line in hits]))


def test_the_next_round_starts_behind_the_first_miss() -> None:
    # Row 0 at depth 0 and row 1 at depth 1 hit; the next round is behind the token the target gave, at row 3, and
    # misses at once; then row 4 hits, and nothing is left to draft behind it but row 5, which misses.
    counts = walk([0, 1, 1, 1, 1, 1, 1, 1], "x...x.", ".x....")
    assert counts == RoundCounts(rounds=3, accepted_at=(2, 1))
    assert counts.acceptance_length == 2.0


def test_a_hit_behind_a_miss_counts_for_nothing() -> None:
    assert walk([0, 1, 1, 1], "..", "xx") == RoundCounts(rounds=2, accepted_at=(0, 0))


def test_rounds_stay_within_an_answer() -> None:
    assert walk([0, 1, 1, 1, 0, 1, 1, 1], "xxxx", "xxxx") == RoundCounts(rounds=2, accepted_at=(2, 2))


def test_counts_add_up() -> None:
    one, two = RoundCounts(rounds=1, accepted_at=(1, 0)), RoundCounts(rounds=2, accepted_at=(2, 1))
    assert one + two == RoundCounts(rounds=3, accepted_at=(3, 1))


MASK = [0, 1, 1, 1, 1, 1, 1, 1, 0, 0, 1, 1, 1, 0, 1, 1, 1, 1, 1]


def test_where_every_draft_is_certain_expected_rounds_are_those_walked() -> None:
    batch = batch_of([len(MASK)], mask=MASK)
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        hit_SM = torch.rand(3, len(batch.row_M), generator=generator) < 0.6
        expected, walked = expect_rounds(batch, hit_SM.float()), walk_rounds(batch, hit_SM)
        assert expected.rounds_A.sum() == walked.rounds
        assert tuple(expected.accepted_AS.sum(axis=0)) == walked.accepted_at
        assert expected.acceptance_length == pytest.approx(walked.acceptance_length)
        assert expected.rounds_A.shape == (3,)


def test_expected_rounds_are_the_mean_of_rounds_that_are_tossed() -> None:
    batch = batch_of([len(MASK)], mask=MASK)
    generator = torch.Generator().manual_seed(0)
    chance_SM = torch.rand(3, len(batch.row_M), generator=generator)
    tossed = [walk_rounds(batch, torch.rand(chance_SM.shape, generator=generator) < chance_SM) for _ in range(4000)]
    expected = expect_rounds(batch, chance_SM)
    assert expected.rounds_A.sum() == pytest.approx(np.mean([t.rounds for t in tossed]), rel=0.02)
    assert expected.accepted_AS.sum(axis=0) == pytest.approx(np.mean([t.accepted_at for t in tossed], axis=0), rel=0.05)


def test_a_batch_that_teaches_nothing_has_no_rounds() -> None:
    batch = batch_of([4], mask=[0] * 4)
    assert walk_rounds(batch, torch.zeros(2, 0, dtype=torch.bool)).rounds == 0
    assert expect_rounds(batch, torch.zeros(2, 0)).acceptance_length == 1.0


def test_the_estimate_equals_decoding_on_the_targets_own_text(tiny_target: Target, tiny_drafter: Drafter) -> None:
    target, decoder = DenseTarget(tiny_target, tiny_drafter.config), EagleDraft(tiny_drafter)
    source = LiveSource(tiny_target, tiny.AUX_IDS)
    kept = tiny_drafter.vocab().target_ids_W
    estimated = RoundCounts(rounds=0, accepted_at=(0,) * DEPTHS)
    rounds = []
    # Prompts of plain noise, where the trained drafter misses often.
    for prompt in torch.randint(tiny.VOCAB, (12, 8), generator=torch.Generator().manual_seed(5)).tolist():
        # Decoding may overshoot what was asked for; let the text go on as far as its last round did.
        asked = decode_speculatively(
            target, decoder, prompt, shape=Chain(depth=DEPTHS), draws=SeededDraws(0), max_new_tokens=NEW
        )
        made = 1 + sum(r.accepted + 1 for r in asked.rounds)
        text = [*prompt, *decode_plainly(target, prompt, draws=SeededDraws(0), max_new_tokens=made)]
        batch = batch_of([len(text)], mask=[i >= len(prompt) for i in range(len(text))], ids=torch.tensor(text))
        features = source(batch)
        with torch.no_grad():
            scores = forward_loss(
                tiny_drafter,
                batch,
                features,
                target_ids_W=kept,
                layer_ids=tiny.AUX_IDS,
                weights=[1.0] * DEPTHS,
                row_loss=LOSSES["kl"],
                chunk=64,
            )
        counts = walk_rounds(batch, scores.hit_SM)
        assert counts.rounds == len(asked.rounds)
        assert counts.accepted_at == tuple(sum(r.accepted > d for r in asked.rounds) for d in range(DEPTHS))
        estimated += counts
        rounds += asked.rounds
    measured = 1 + sum(r.accepted for r in rounds) / len(rounds)
    assert estimated.acceptance_length == measured
    assert 1.5 < measured < DEPTHS + 1
