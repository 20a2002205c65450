"""Skipping slots that teach nothing changes neither loss nor gradient."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from each import each
from eyas.drafter.model import Drafter
from eyas.train.attention import DenseUnrollAttention, FlashUnrollAttention, UnrollAttention
from eyas.train.batch import TrainingBatch
from eyas.train.features import Features
from eyas.train.loss import LOSSES, score
from eyas.train.unroll import DrafterPasses, unroll
from train.batches import EAGLE_31, batch_of, drafter_of, features_of, gradients

DEPTHS = 4
WEIGHTS = [0.9, 0.5, 0.4, 0.2]
PACKS = {
    "one answer": ([12], "000001111111"),
    "answers with turns between": ([20], "00011100001111110011"),
    "an answer at the start": ([12], "111111100000"),
    "everything": ([9, 7], "1111111111111111"),
    "several documents": ([8, 12, 6], "00011111" + "000011110111" + "011111"),
    "a document that teaches nothing, and padding": ([7, 5, 8, 6], "0001111" + "00000" + "00111111" + "000000"),
    "documents shorter than the depths": ([3, 2, 4, 1, 3], "0110011110111"),
    "a single slot": ([5], "00110"),
}


class EverySlot:
    """Attention of all slots of a pack at all depths, written out."""

    def __init__(self, batch: TrainingBatch) -> None:
        index = torch.arange(len(batch.ids_T))
        document_T = torch.searchsorted(batch.starts[1:].long(), index, right=True)
        self._visible_TT = (index[:, None] >= index) & (document_T[:, None] == document_T)
        self._kept: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group, slots = q.shape[1] // k.shape[1], len(q)
        kept = self._kept.setdefault(layer, [])
        kept.append((k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)))
        own_TT = torch.eye(slots, dtype=torch.bool)
        visible = torch.cat([self._visible_TT, *[own_TT] * (len(kept) - 1)], dim=1)
        keys, values = torch.cat([k for k, _ in kept]), torch.cat([v for _, v in kept])
        scores = torch.einsum("thk,shk->hts", q, keys) * q.shape[-1] ** -0.5
        return torch.einsum("hts,shk->thk", scores.masked_fill(~visible, float("-inf")).softmax(-1), values)


def states_of_every_slot(drafter: Drafter, batch: TrainingBatch, aux_TX: Tensor) -> list[Tensor]:
    """Post-norm states [T, D] of every depth, nothing left out."""
    attend, hidden, states = EverySlot(batch), drafter.fuse(aux_TX), []
    for depth in range(DEPTHS):
        read_T = functional.pad(batch.ids_T, (0, DEPTHS))[1 + depth :][: len(batch.ids_T)]
        output = drafter.step(hidden, read_T, batch.position_T + depth, attend)
        hidden = output.feedback
        states.append(output.normed)
    return states


def oracle(drafter: Drafter, batch: TrainingBatch, features: Features) -> tuple[Tensor, Tensor]:
    """The loss and the summed losses of each depth, by autograd from every slot."""
    kept = drafter.vocab().target_ids_W
    losses = []
    for depth, normed_TD in enumerate(states_of_every_slot(drafter, batch, features.aux_TX)):
        row_C = batch.row_M[batch.run_M > depth]
        log_q_CW = drafter.logits(normed_TD[row_C - 1 - depth]).log_softmax(-1)
        p_CW = features.teachers(kept)(row_C).probabilities(log_q_CW)
        losses.append(-(p_CW * log_q_CW).sum())
    loss_S = torch.stack(losses)
    return (loss_S * torch.tensor(WEIGHTS)).sum(), loss_S


def ours(
    drafter: Drafter, batch: TrainingBatch, features: Features, attend: UnrollAttention, **options: Any
) -> tuple[Tensor, Tensor]:
    kept = drafter.vocab().target_ids_W
    normed_SMD = unroll(drafter, batch, features.aux_TX, depths=DEPTHS, attend=attend, **options)
    assert normed_SMD.shape == (DEPTHS, len(batch.row_M), drafter.config.hidden_size)
    assert drafter.lm_head is not None
    found = score(
        normed_SMD,
        drafter.lm_head.weight,
        batch,
        features.teachers(kept),
        target_ids_W=kept,
        weights=WEIGHTS,
        row_loss=LOSSES["cross_entropy"],
        chunk=3,
    )
    return found.loss, found.loss_S


def assert_same(drafter: Drafter, batch: TrainingBatch, attend: UnrollAttention, **options: Any) -> None:
    features = features_of(batch)
    expected, expected_S = oracle(drafter, batch, features)
    expected.backward()
    theirs = gradients(drafter)
    drafter.zero_grad()
    found, found_S = ours(drafter, batch, features, attend, **options)
    found.backward()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found_S, expected_S, rtol=1e-5, atol=1e-5)
    mine = gradients(drafter)
    assert theirs.keys() == mine.keys()
    for name, gradient in mine.items():
        torch.testing.assert_close(
            gradient, theirs[name], rtol=1e-4, atol=2e-5, msg=lambda m, name=name: f"{name}: {m}"
        )


def pack_of(name: str) -> TrainingBatch:
    lengths, mask = PACKS[name]
    return batch_of(lengths, mask=[int(c) for c in mask])


@each("checkpointing", [False, True])
@each(
    "flags",
    [{}, EAGLE_31, {**EAGLE_31, "num_hidden_layers": 2}, {"norm_before_residual": True, "num_hidden_layers": 3}],
)
@each("name", PACKS)
def test_loss_and_gradient_are_those_of_every_slot(name: str, flags: dict[str, object], checkpointing: bool) -> None:
    batch = pack_of(name)
    assert_same(drafter_of(**flags), batch, DenseUnrollAttention(batch), activation_checkpointing=checkpointing)


def test_computed_slots_are_those_that_teach_and_those_they_read() -> None:
    lengths, mask = PACKS["a document that teaches nothing, and padding"]
    slots = batch_of(lengths, mask=[int(c) for c in mask]).slots
    # Tokens 3 to 6 are an answer, so rows 3 to 5 teach slots 2 to 4; tokens 14 to 19 one of the third document.
    assert slots.taught_M.tolist() == [2, 3, 4, 13, 14, 15, 16, 17]
    assert slots.context_P.tolist() == [0, 1, 12]
    assert slots.key_starts.tolist() == [0, 5, 11]
    assert slots.query_starts.tolist() == [0, 3, 8]
    assert (slots.query_place_M, slots.longest_keys, slots.longest_queries) == (None, 6, 5)


def test_steps_see_only_slots_that_teach() -> None:
    drafter, batch = drafter_of(**EAGLE_31), pack_of("several documents")
    seen: dict[str, list[int]] = {"step": [], "remember": []}

    def counted(name: str) -> Any:
        def call(hidden: Tensor, *rest: Any, **options: Any) -> Any:
            seen[name].append(len(hidden))
            return getattr(drafter, name)(hidden, *rest, **options)

        return call

    passes = DrafterPasses(fuse=drafter.fuse, remember=counted("remember"), step=counted("step"))
    attend = DenseUnrollAttention(batch)
    unroll(drafter, batch, features_of(batch).aux_TX, depths=DEPTHS, attend=attend, passes=passes)
    taught = len(batch.row_M)
    assert seen == {"step": [taught] * DEPTHS, "remember": [len(batch.slots.context_P)]}
    assert taught + len(batch.slots.context_P) < len(batch.ids_T)


def test_a_batch_that_teaches_nothing_has_no_gradients() -> None:
    drafter, batch = drafter_of(**EAGLE_31), batch_of([6, 3], mask=[0] * 9)
    loss, loss_S = ours(drafter, batch, features_of(batch), DenseUnrollAttention(batch))
    loss.backward()
    assert loss == 0
    assert not loss_S.any()
    assert all(not gradient.any() for gradient in gradients(drafter).values())


def _scores(q: Tensor, k: Tensor) -> Tensor:
    """Scores [H, queries, keys] of one document, causal with its last query at its last key, as the kernels align."""
    queries, keys = len(q), len(k)
    hidden = torch.ones(queries, keys, dtype=torch.bool).triu(1 + keys - queries)
    scores = torch.einsum("thk,shk->hts", q, k.repeat_interleave(q.shape[1] // k.shape[1], dim=1))
    return (scores * q.shape[-1] ** -0.5).masked_fill(hidden, float("-inf"))


def _documents(query_starts: Tensor, key_starts: Tensor, longest: Sequence[int]) -> list[tuple[slice, slice]]:
    borders = [starts.tolist() for starts in (query_starts, key_starts)]
    assert all(starts.dtype == torch.int32 for starts in (query_starts, key_starts))
    both = [[slice(a, b) for a, b in pairwise(starts)] for starts in borders]
    for documents, most in zip(both, longest, strict=True):
        assert all(0 < here.stop - here.start <= most for here in documents)
    return list(zip(*both, strict=True))


def _flash_forward(
    q: Tensor, k: Tensor, v: Tensor, starts_q: Tensor, starts_k: Tensor, most_q: int, most_k: int, *_: object
) -> tuple[Tensor, ...]:
    assert (starts_q[-1], starts_k[-1]) == (len(q), len(k))
    out, lse_HQ = torch.full_like(q, float("nan")), q.new_full((q.shape[1], len(q)), float("nan"))
    for mine, seen in _documents(starts_q, starts_k, (most_q, most_k)):
        scores = _scores(q[mine], k[seen])
        lse_HQ[:, mine] = scores.logsumexp(-1)
        values = v[seen].repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        out[mine] = torch.einsum("hts,shk->thk", scores.softmax(-1), values)
    return out, lse_HQ, torch.zeros(0), torch.zeros(0), torch.zeros(0)


def _flash_backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse_HQ: Tensor,
    starts_q: Tensor,
    starts_k: Tensor,
    most_q: int,
    most_k: int,
    *_: object,
) -> tuple[Tensor, ...]:
    d_q, d_k, d_v = (torch.full_like(x, float("nan")) for x in (q, k, v))
    group, scale = q.shape[1] // k.shape[1], q.shape[-1] ** -0.5
    for mine, seen in _documents(starts_q, starts_k, (most_q, most_k)):
        p = (_scores(q[mine], k[seen]) - lse_HQ[:, mine, None]).exp()
        d_p = torch.einsum("thk,shk->hts", d_out[mine], v[seen].repeat_interleave(group, dim=1))
        d_s = p * (d_p - (d_out[mine] * out[mine]).sum(-1).T[..., None]) * scale
        d_q[mine] = torch.einsum("hts,shk->thk", d_s, k[seen].repeat_interleave(group, dim=1))
        for gradient, spread in (
            (d_k, torch.einsum("hts,thk->shk", d_s, q[mine])),
            (d_v, torch.einsum("hts,thk->shk", p, d_out[mine])),
        ):
            gradient[seen] = spread.unflatten(1, (-1, group)).sum(2)
    return d_q, d_k, d_v


@each("flags", [EAGLE_31, {"num_hidden_layers": 2}])
@each("name", PACKS)
def test_the_flash_path_gives_the_same_loss_and_gradients(
    name: str, flags: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels written out replace those of a GPU (tests/gpu has the real ones); the rest is the real code."""
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", _flash_forward)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", _flash_backward)
    batch = pack_of(name)
    assert_same(drafter_of(**flags), batch, FlashUnrollAttention(batch))
