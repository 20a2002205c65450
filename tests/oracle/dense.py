"""A real target and a real drafter behind the reference decoder's protocols, without any cache.

Shapes: B sequences, T tokens, V target vocabulary, X concatenated auxiliary states, D drafter hidden.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eyas.drafter.attention import KeysAndValues, attend_densely, causal_mask
from eyas.drafter.config import DrafterConfig
from eyas.drafter.model import Drafter
from eyas.target.model import Target


class DenseAttention:
    """Causal attention of one sequence, without a cache that is written in place.

    `past` is `present` of an earlier pass. Several continuations, such as branches of a tree, can share one past.
    """

    def __init__(self, past: Sequence[KeysAndValues] = ()) -> None:
        self._past = past
        self.present: list[KeysAndValues] = []

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend from the new slots [T, H, K] to past and new ones."""
        assert layer == len(self.present), "layers call in order, once each"
        if self._past:
            past_k, past_v = self._past[layer]
            k, v = torch.cat([past_k, k]), torch.cat([past_v, v])
        self.present.append((k, v))
        return attend_densely(q, k, v, causal_mask(len(q), len(k), device=q.device))


class DenseTarget:
    """Runs whole sequences through the target, padded on the right, where a causal model cannot see."""

    def __init__(self, target: Target, drafter: DrafterConfig) -> None:
        self._target = target
        self._layer_ids = drafter.layers_read(target.facts)

    def __call__(self, sequences: Sequence[Sequence[int]]) -> list[tuple[Tensor, Tensor]]:
        """Logits [T, V] and auxiliary states [T, X] of each sequence."""
        longest = max(map(len, sequences))
        ids_BT = torch.tensor([[*ids, *[0] * (longest - len(ids))] for ids in sequences], device=self._target.device)
        output = self._target.forward(ids_BT, self._layer_ids)
        return [
            (output.logits_BTV[row, : len(ids)], output.aux_hidden_BTX[row, : len(ids)])
            for row, ids in enumerate(sequences)
        ]


@dataclass(frozen=True, kw_only=True)
class EagleState:
    """State of a draft: keys and values so far, and the last slot's output."""

    past: Sequence[KeysAndValues]
    normed_D: Tensor
    feedback_D: Tensor
    position: int


class EagleDraft:
    """A drafter as a `DraftModel`."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self._vocab = drafter.vocab()

    @torch.inference_mode()
    def start(self, ids: Sequence[int], aux_TX: Tensor) -> EagleState:
        """Depth 0: slot i holds the target's state at i, the embedding of token i + 1, and position i."""
        assert len(aux_TX) == len(ids) - 1, "one state for every token but the newest"
        drafter, device = self._drafter, aux_TX.device
        hidden_TD = drafter.fuse(aux_TX.to(drafter.fc.weight.dtype))
        shifted_T = torch.tensor(ids[1:], device=device)
        return self._run(hidden_TD, shifted_T, torch.arange(len(ids) - 1, device=device), ())

    @torch.inference_mode()
    def extend(self, state: EagleState, token: int) -> EagleState:
        """Depth 1 and beyond: the drafted token beside the fed-back state, one position on."""
        device = state.feedback_D.device
        position_T = torch.tensor([state.position + 1], device=device)
        return self._run(state.feedback_D[None], torch.tensor([token], device=device), position_T, state.past)

    @torch.inference_mode()
    def logits(self, state: EagleState) -> Tensor:
        """Scores over the target's vocabulary."""
        return self._vocab.scatter(self._drafter.logits(state.normed_D), float("-inf"))

    def _run(self, hidden_TD: Tensor, token_T: Tensor, position_T: Tensor, past: Sequence[KeysAndValues]) -> EagleState:
        attention = DenseAttention(past)
        output = self._drafter.step(hidden_TD, token_T, position_T, attention)
        return EagleState(
            past=attention.present,
            normed_D=output.normed[-1],
            feedback_D=output.feedback[-1],
            position=int(position_T[-1]),
        )
