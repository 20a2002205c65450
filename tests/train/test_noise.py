"""Noise on states is as loud as it is told to be, the same for the same seed and pack, and for training alone."""

from dataclasses import replace

import pytest
import torch

import tiny
from eyas.target.model import Target
from eyas.train.features import Features
from eyas.train.noise import with_noise
from train.batches import batch_of, features_of
from train.test_loop import train_state_of


def loud_features() -> Features:
    """States of which one is a thousand times as large as the others."""
    features = features_of(batch_of([40]))
    aux_TX = features.aux_TX.clone()
    aux_TX[:, tiny.HIDDEN : 2 * tiny.HIDDEN] *= 1000
    return replace(features, aux_TX=aux_TX)


def test_noise_is_a_share_of_the_rms_of_each_state() -> None:
    features = loud_features()
    noisy = with_noise(features, tiny.AUX_IDS, 0.1, (0, 0))
    for before, after in zip(features.aux_TX.chunk(3, dim=-1), noisy.aux_TX.chunk(3, dim=-1), strict=True):
        share = (after - before).square().mean().sqrt() / before.square().mean().sqrt()
        assert float(share) == pytest.approx(0.1, rel=0.05)


def test_noise_is_a_function_of_seed_and_pack() -> None:
    features = loud_features()
    first, again, other_pack, other_seed = (
        with_noise(features, tiny.AUX_IDS, 0.1, seed).aux_TX for seed in ((3, 5), (3, 5), (3, 6), (4, 5))
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other_pack)
    assert not torch.equal(first, other_seed)


def test_a_drafter_that_reads_some_of_the_states_gets_those_with_noise() -> None:
    features, some = loud_features(), tiny.AUX_IDS[1:]
    noisy = with_noise(features, some, 0.0, (0, 0))
    assert noisy.aux_layer_ids == some
    torch.testing.assert_close(noisy.aux_TX, features.aux_of(some))


def test_noise_changes_what_is_learnt_and_not_what_is_judged(tiny_target: Target) -> None:
    batch, features = batch_of([40]), loud_features()
    quiet, noisy = train_state_of(tiny_target), train_state_of(tiny_target, noise=0.3)
    for state in (quiet, noisy):
        state.backward(batch, features, batch.counts(3), pack=1)
    assert not torch.equal(quiet.gradient_norm(), noisy.gradient_norm())
    judged = [state.forward_loss(batch, features, depths=3).loss_S for state in (quiet, noisy)]
    assert torch.equal(*judged)
