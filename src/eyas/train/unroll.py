"""Training-time test: the drafter run over whole documents, depth after depth, exactly as decoding runs it.

Slot t at depth k holds what decoding would hold k tokens behind a verified position t: the target's state at t at
depth 0 and the drafter's own feedback after it, beside the true token t + 1 + k, at position t + k. It predicts the
target's distribution for token t + 2 + k. Who sees whom is attention.py's business, what counts batch.py's.

Shapes: T slots, X concatenated auxiliary states, D drafter state, S depths.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from eyas.drafter.model import DepthOutput, Drafter
from eyas.train.attention import UnrollAttention
from eyas.train.batch import TrainingBatch

Step = Callable[[Tensor, Tensor, Tensor, UnrollAttention], DepthOutput]


def unroll(
    drafter: Drafter,
    batch: TrainingBatch,
    aux_TX: Tensor,
    *,
    depths: int,
    attend: UnrollAttention,
    activation_checkpointing: bool = False,
    step: Step | None = None,
) -> Tensor:
    """Post-norm states of every depth, [S, T, D].

    `activation_checkpointing` keeps only what a depth receives and computes the rest again in the backward pass: a
    third more work for a fraction of the memory. `step` is the drafter's own, compiled perhaps.
    """
    step = step or drafter.step
    hidden_TD = drafter.fuse(aux_TX.to(drafter.fc.weight.dtype))
    states: list[Tensor] = []
    for depth in range(depths):

        def run(hidden_TD: Tensor, depth: int = depth) -> tuple[Tensor, Tensor]:
            output = step(hidden_TD, shifted(batch.ids_T, 1 + depth), batch.position_T + depth, attend.at(depth))
            return output.normed, output.feedback

        if activation_checkpointing:
            normed_TD, hidden_TD = checkpoint(run, hidden_TD, use_reentrant=False)
        else:
            normed_TD, hidden_TD = run(hidden_TD)
        states.append(normed_TD)
    return torch.stack(states)


def shifted(x_T: Tensor, by: int) -> Tensor:
    """Slot t gets what stands `by` further on; beyond the end stands zero."""
    out_T = torch.zeros_like(x_T)
    out_T[: max(0, len(x_T) - by)] = x_T[by:]  # a pack may be shorter than the depths are many
    return out_T


def depth_weights(depths: int, gamma: float) -> list[float]:
    """gamma ** depth, normalised to sum to one so that the loss does not grow with the number of depths."""
    raw = [gamma**depth for depth in range(depths)]
    return [weight / sum(raw) for weight in raw]
