"""Noise on the target's states while a drafter learns, so that it does not lean on their last digits.

At serving time states come from another precision, another quantisation, or a target that was tuned a little since.
Noise is measured in parts of a state's own RMS, which differs a thousandfold from layer to layer and from token to
token. It is a function of seed and pack: a run that is taken up, or shared among more processes, has the same.

Shapes: T tokens, A auxiliary states, D their width, X = A * D.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from eyas.train.features import Features


def with_noise(features: Features, layer_ids: Sequence[int], share: float, seed: Sequence[int]) -> Features:
    """The states of these layers with Gaussian noise of `share` of each state's RMS; what the target says stays."""
    aux_TX = features.aux_of(layer_ids)
    state_TAD = aux_TX.float().reshape(len(aux_TX), len(layer_ids), -1)
    mixed = int(np.random.SeedSequence(seed).generate_state(1, np.uint64)[0])
    generator = torch.Generator(aux_TX.device).manual_seed(mixed)
    noise_TAD = torch.randn(state_TAD.shape, generator=generator, device=aux_TX.device)
    rms_TA1 = state_TAD.square().mean(dim=-1, keepdim=True).sqrt()
    noisy_TX = (state_TAD + share * rms_TA1 * noise_TAD).flatten(1).to(aux_TX.dtype)
    return replace(features, aux_TX=noisy_TX, aux_layer_ids=tuple(layer_ids))
