"""Drafting rounds side by side, depth after depth, where they can be watched: for the doctor and the drift probe.

Serving drafts the same by code of its own (`engine/runner/`), which keeps no attention weights; tests hold both to the
same drafts.

Shapes: N slots that depth 1 reads, R rounds, D drafter hidden, W draft vocabulary.
"""

from collections.abc import Callable

from torch import Tensor

from eyas.drafter.model import Drafter
from eyas.drafter.round_attention import RoundAttention

Choose = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor | None]]
"""Given a depth, the logits [R, W] there and the states [R, D] that it hands to the next: the drafts [R] as target ids,
and which rounds go on, None for all."""


def draft_rounds(
    drafter: Drafter,
    hidden_ND: Tensor,
    token_N: Tensor,
    position_N: Tensor,
    attention: RoundAttention,
    *,
    depth: int,
    choose: Choose,
    disturb: Callable[[Tensor], Tensor] = lambda hidden: hidden,
) -> None:
    """Draft every round of `attention` up to `depth`, behind slots that depth 1 reads with the target's fused states.

    `disturb` is applied to every state that the drafter receives.
    """
    hidden, token, position = disturb(hidden_ND), token_N, position_N
    for level in range(1, depth + 1):
        attention.depth = level
        output = drafter.step(hidden, token, position, attention)
        normed, feedback = output.normed, output.feedback
        if level == 1:
            place_R = attention.start_R - position_N[0]
            normed, feedback, position = normed[place_R], feedback[place_R], attention.start_R
        token, kept_R = choose(level, drafter.logits(normed), feedback)
        position, hidden = position + 1, disturb(feedback)
        if kept_R is not None:
            if not kept_R.any():
                return
            token, position, hidden = token[kept_R], position[kept_R], hidden[kept_R]
            attention.keep(kept_R)
