"""Training-time test: the drafter run over whole documents, depth after depth, exactly as decoding runs it.

Slot t at depth k holds what decoding would hold k tokens after a verified position t: at depth 0 the target's state at
t, later the drafter's own feedback, beside the true token t + 1 + k, at position t + k. It predicts the target's
distribution for token t + 2 + k. attention.py says who sees whom, batch.py which predictions count.

Only slots that teach go through all depths. The others are read at depth 0, for their keys and values (batch.py).

Shapes: T slots of the pack, M that teach, P that are only read, R both, X concatenated auxiliary states, D drafter
state, S depths.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from eyas.drafter.attention import Attend, KeysAndValues
from eyas.drafter.model import DepthOutput, Drafter
from eyas.train.attention import UnrollAttention
from eyas.train.batch import TrainingBatch


@dataclass(frozen=True, kw_only=True)
class DrafterPasses:
    """Methods of a drafter that an unroll calls, compiled if asked for."""

    fuse: Callable[[Tensor], Tensor]
    remember: Callable[..., KeysAndValues]
    step: Callable[[Tensor, Tensor, Tensor, Attend], DepthOutput]

    @classmethod
    def of(cls, drafter: Drafter, *, compiled: bool = False) -> "DrafterPasses":
        """Passes of a drafter. Compiled packs have one length, but any number of slots that teach."""
        if not compiled:
            return cls(fuse=drafter.fuse, remember=drafter.remember, step=drafter.step)
        return cls(
            fuse=torch.compile(drafter.fuse, dynamic=False),
            remember=torch.compile(drafter.remember, dynamic=True),
            step=torch.compile(drafter.step, dynamic=True),
        )


def unroll(
    drafter: Drafter,
    batch: TrainingBatch,
    aux_TX: Tensor,
    *,
    depths: int,
    attend: UnrollAttention,
    activation_checkpointing: bool = False,
    passes: DrafterPasses | None = None,
) -> Tensor:
    """Post-norm states of the slots that teach, at every depth [S, M, D].

    `activation_checkpointing` keeps only the inputs of each depth and computes the rest again in the backward pass: a
    third more work for a fraction of the memory.
    """
    passes = passes or DrafterPasses.of(drafter)
    remember = partial(passes.remember, expanded=attend.expands_latents)
    slots = batch.slots
    taught, last = len(slots.taught_M), len(batch.ids_T) - 1

    def call(function: Callable[..., Any], *arguments: Tensor) -> Any:
        return (
            checkpoint(function, *arguments, use_reentrant=False) if activation_checkpointing else function(*arguments)
        )

    def reads(slot_N: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        # Nothing counts after the end of the pack, so any token will do.
        return batch.ids_T[(slot_N + 1 + depth).clamp(max=last)], batch.position_T[slot_N] + depth

    def run(
        hidden_ND: Tensor, slot_N: Tensor, depth: int, context: KeysAndValues | None = None
    ) -> tuple[Tensor, Tensor]:
        def pass_of_depth(hidden_ND: Tensor) -> tuple[Tensor, Tensor]:
            output = passes.step(hidden_ND, *reads(slot_N, depth), attend.at(depth, context))
            return output.normed, output.feedback

        normed_ND, feedback_ND = call(pass_of_depth, hidden_ND)
        return normed_ND, feedback_ND

    hidden_TD = passes.fuse(aux_TX.to(drafter.fc.weight.dtype))
    if not taught:
        return hidden_TD[:0].expand(depths, 0, -1)
    if len(drafter.layers) == 1:
        hidden_MD, hidden_PD = _rows(hidden_TD, slots.taught_M, slots.context_P)
        context = call(remember, hidden_PD, *reads(slots.context_P, 0)) if len(hidden_PD) else None
        normed_MD, hidden_MD = run(hidden_MD, slots.taught_M, 0, context)
    else:
        # Upper layers read the lower layers' output for every slot.
        (hidden_RD,) = _rows(hidden_TD, slots.read_R)
        outputs = run(hidden_RD, slots.read_R, 0)
        (normed_MD,), (hidden_MD,) = (_rows(output_RD, slots.order_R[:taught]) for output_RD in outputs)
    states = [normed_MD]
    for depth in range(1, depths):
        normed_MD, hidden_MD = run(hidden_MD, slots.taught_M, depth)
        states.append(normed_MD)
    return torch.stack(states)


class _Rows(torch.autograd.Function):
    """Disjoint selections of rows. Their gradients are copied back, where indexing would add them."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, *indices: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*indices)
        ctx.shape = x_ND.shape
        return tuple(x_ND.index_select(0, index) for index in indices)

    @staticmethod
    def backward(ctx: Any, *d_rows: Tensor) -> tuple[Tensor | None, ...]:
        d_ND = d_rows[0].new_zeros(ctx.shape)
        for index, d in zip(ctx.saved_tensors, d_rows, strict=True):
            d_ND.index_copy_(0, index, d)
        return d_ND, *[None] * len(d_rows)


def _rows(x_ND: Tensor, *indices: Tensor) -> tuple[Tensor, ...]:
    rows: tuple[Tensor, ...] = _Rows.apply(x_ND, *indices)  # type: ignore[no-untyped-call]
    return rows


def depth_weights(depths: int, gamma: float, first: float = 1.0) -> list[float]:
    """Weights gamma ** depth, the first one times `first`, that sum to one: the loss does not grow with the depths."""
    raw = [gamma**depth * (1.0 if depth else first) for depth in range(depths)]
    return [weight / sum(raw) for weight in raw]
