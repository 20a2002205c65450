"""Noise on states has the chosen size, depends on seed and pack, and affects training only; gradients are summed."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import tiny
from eyas.target.model import Target
from eyas.train.features import Features
from eyas.train.ranks import Ranks
from eyas.train.sources.live import LiveSource
from train.batches import batch_of, features_of
from train.test_loop import corpus_of, packs_of, train_state_of


def loud_features() -> Features:
    """Features with one state a thousand times as large as the others."""
    features = features_of(batch_of([40]))
    aux_TX = features.aux_TX.clone()
    aux_TX[:, tiny.HIDDEN : 2 * tiny.HIDDEN] *= 1000
    return replace(features, aux_TX=aux_TX)


def test_noise_is_a_share_of_the_rms_of_each_state() -> None:
    features = loud_features()
    noisy = features.with_noise(tiny.AUX_IDS, 0.1, (0, 0))
    for before, after in zip(features.aux_TX.chunk(3, dim=-1), noisy.aux_TX.chunk(3, dim=-1), strict=True):
        share = (after - before).square().mean().sqrt() / before.square().mean().sqrt()
        assert float(share) == pytest.approx(0.1, rel=0.05)


def test_noise_is_a_function_of_seed_and_pack() -> None:
    features = loud_features()
    first, again, other_pack, other_seed = (
        features.with_noise(tiny.AUX_IDS, 0.1, seed).aux_TX for seed in ((3, 5), (3, 5), (3, 6), (4, 5))
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other_pack)
    assert not torch.equal(first, other_seed)


def test_a_drafter_that_reads_some_of_the_states_gets_those_with_noise() -> None:
    features, some = loud_features(), tiny.AUX_IDS[1:]
    noisy = features.with_noise(some, 0.0, (0, 0))
    assert noisy.aux_layer_ids == some
    torch.testing.assert_close(noisy.aux_TX, features.aux_of(some))


def test_noise_affects_training_and_not_evaluation(tiny_target: Target) -> None:
    batch, features = batch_of([40]), loud_features()
    quiet, noisy = train_state_of(tiny_target), train_state_of(tiny_target, noise=0.3)
    for state in (quiet, noisy):
        state.backward(batch, features, batch.counts(3), pack=1)
    assert not torch.equal(quiet.gradient_norm(), noisy.gradient_norm())
    judged = [state.forward_loss(batch, features, depths=3).loss_S for state in (quiet, noisy)]
    assert torch.equal(*judged)


class TwoAlike(Ranks):
    """Another process that computes the same, so sums are twice its own."""

    def sum_tensors(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            tensor.mul_(2)


def test_gradients_and_metrics_are_summed_and_untouched_weights_are_zero(tiny_target: Target) -> None:
    batch = packs_of(corpus_of(8)).epoch(0)[0].build()
    features = LiveSource(tiny_target, tiny.AUX_IDS)(batch)
    alone, both, idle = (train_state_of(tiny_target) for _ in range(3))
    for state in (alone, both):
        state.backward(batch, features, batch.counts(3))
    alone.sum_gradients(Ranks())
    for state in (both, idle):
        state.sum_gradients(TwoAlike(rank=0, world=2))
    for single, double, zero in zip(alone.gradients(), both.gradients(), idle.gradients(), strict=True):
        assert torch.equal(double, 2 * single)
        assert not zero.any()
    assert torch.equal(both.metrics_3S, 2 * alone.metrics_3S)
