"""Gradients are sent as soon as they are whole, in one order for all processes, and all of them are."""

import torch
from torch import Tensor, nn

from eyas.target.model import Target
from eyas.train.features import Features
from eyas.train.ranks import PendingSum, Ranks
from eyas.train.reduction import GradientReduction
from eyas.train.sources.live import LiveSource
from tiny import AUX_IDS
from train.test_loop import corpus_of, packs_of, train_state_of


class TwoAlike(Ranks):
    """Another process does what this one does: sums are twice its own."""

    def start_sum(self, tensor: Tensor) -> PendingSum:
        sent.append(tensor.numel())
        return PendingSum(tensor=tensor.mul_(2), work=None)

    def sum_tensors(self, tensors: object) -> None:
        pass


sent: list[int] = []


def weights(*sizes: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(size)) for size in sizes]


def test_a_bucket_is_sent_when_it_and_those_before_it_are_whole() -> None:
    sent.clear()
    first, second, third = weights(4, 8, 2)
    reduction = GradientReduction([first, second, third], TwoAlike(rank=0, world=2), bucket_bytes=40)
    # Backward passes come from the end: third and second share a bucket, first has its own.
    first.grad = torch.full_like(first, 3.0)
    reduction.ready(first)
    assert sent == []
    third.grad = torch.full_like(third, 5.0)
    reduction.ready(third)
    assert sent == []
    second.grad = torch.full_like(second, 7.0)
    reduction.ready(second)
    assert sent == [10, 4]
    reduction.flush()
    reduction.wait()
    assert [float(weight.grad[0]) for weight in (first, second, third) if weight.grad is not None] == [6, 14, 10]


def test_what_a_batch_did_not_touch_is_sent_as_zeros_at_the_end() -> None:
    sent.clear()
    first, second = weights(4, 8)
    reduction = GradientReduction([first, second], TwoAlike(rank=0, world=2), bucket_bytes=1)
    first.grad = torch.ones_like(first)
    reduction.ready(first)
    reduction.flush()
    reduction.wait()
    assert sent == [8, 4]
    assert second.grad is not None
    assert float(second.grad.abs().sum()) == 0


def test_a_drafters_gradients_are_sent_before_its_backward_pass_is_over(tiny_target: Target) -> None:
    sent.clear()
    batch = packs_of(corpus_of(8)).epoch(0)[0].build()
    features: Features = LiveSource(tiny_target, AUX_IDS)(batch)
    state, alone = train_state_of(tiny_target), train_state_of(tiny_target)
    seen: list[int] = []
    # The fusion is the first to be computed, so the last to get its gradient.
    state.drafter.fc.weight.register_hook(lambda gradient: seen.append(len(sent)))
    ranks = TwoAlike(rank=0, world=2)
    import eyas.train.reduction as reduction

    before, reduction.BUCKET_BYTES = reduction.BUCKET_BYTES, 1
    try:
        state.backward(batch, features, batch.counts(3), last_among=ranks)
    finally:
        reduction.BUCKET_BYTES = before
    state.wait_for_sum(ranks)
    assert len(sent) == len(state.master_weights)
    assert 0 < seen[0] < len(sent)
    alone.backward(batch, features, batch.counts(3))
    for ours, theirs in zip(state.gradients(), alone.gradients(), strict=True):
        torch.testing.assert_close(ours, 2 * theirs)
