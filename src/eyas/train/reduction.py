"""Gradients of all processes summed while the backward pass that completes them is still under way.

The head's gradient is there first and the fusion's last, so weights go in the order in which backward passes reach
them, in buckets of some megabytes, each sent as soon as it is whole. Processes must send the same buckets in the same
order, whatever their batches hold: a bucket waits for those before it, and what a batch did not touch follows at the
end as zeros.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from eyas.train.ranks import PendingSum, Ranks

BUCKET_BYTES = 32 * 2**20


class GradientReduction:
    """One sum over all processes of a list of weights' gradients, in place."""

    def __init__(self, weights: Sequence[Tensor], ranks: Ranks, *, bucket_bytes: int | None = None) -> None:
        self._ranks = ranks
        self._buckets = _buckets(list(reversed(weights)), bucket_bytes or BUCKET_BYTES)
        self._bucket_of = {id(weight): place for place, bucket in enumerate(self._buckets) for weight in bucket}
        self._missing = [len(bucket) for bucket in self._buckets]
        self._sent: list[tuple[list[Tensor], PendingSum]] = []

    def ready(self, weight: Tensor) -> None:
        """The weight's gradient is whole in this process."""
        self._missing[self._bucket_of[id(weight)]] -= 1
        while len(self._sent) < len(self._buckets) and not self._missing[len(self._sent)]:
            self._send()

    def flush(self) -> None:
        """The backward pass is at its end: send the rest, zeros where there is no gradient."""
        while len(self._sent) < len(self._buckets):
            self._send()

    def wait(self) -> None:
        """Until gradients are those of all processes."""
        for bucket, pending in self._sent:
            flat = pending.wait()
            gradients = [_gradient(weight) for weight in bucket]
            parts = torch.split(flat, [gradient.numel() for gradient in gradients])
            torch._foreach_copy_(gradients, [part.view_as(own) for part, own in zip(parts, gradients, strict=True)])

    def _send(self) -> None:
        bucket = self._buckets[len(self._sent)]
        flat = torch.cat([_gradient(weight).flatten() for weight in bucket])
        self._sent.append((bucket, self._ranks.start_sum(flat)))


def _gradient(weight: Tensor) -> Tensor:
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    return weight.grad


def _buckets(weights: Sequence[Tensor], limit: int) -> list[list[Tensor]]:
    """Neighbours together up to the limit; who is beyond it stays alone."""
    buckets: list[list[Tensor]] = []
    filled = 0
    for weight in weights:
        if not buckets or filled + weight.nbytes > limit:
            buckets.append([])
            filled = 0
        buckets[-1].append(weight)
        filled += weight.nbytes
    return buckets
