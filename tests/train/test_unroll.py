"""Training runs the drafter as decoding runs it, and packing, chunking and depth do not change what is learnt."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import tiny
from eyas.drafter.model import Drafter
from eyas.engine.dense import EagleDraft
from eyas.errors import UserError
from eyas.train.loss import LOSSES, score_rows
from eyas.train.unroll import DenseUnrollAttention, TrainingBatch, depth_weights, shifted, unroll, valid_slots

EAGLE_31 = {"fc_norm": True, "norm_output": True}
LENGTH = 14


def identity(x: Tensor) -> Tensor:
    return x


def batch_of(lengths: list[int], *, seed: int = 0) -> TrainingBatch:
    """One sequence of documents of these lengths; the teacher's states are its scores themselves."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    return TrainingBatch(
        ids_BT=torch.randint(tiny.VOCAB, (1, total), generator=generator),
        mask_BT=torch.ones(1, total, dtype=torch.bool),
        document_BT=torch.cat([torch.full((1, n), i) for i, n in enumerate(lengths)], dim=1),
        position_BT=torch.cat([torch.arange(n)[None] for n in lengths], dim=1),
        aux_BTX=torch.randn(1, total, 3 * tiny.HIDDEN, generator=generator),
        teacher_BTE=torch.randn(1, total, tiny.VOCAB, generator=generator) * 3,
    )


def drafter_of(**flags: object) -> Drafter:
    return tiny.random_drafter(tiny.drafter_config(**flags)).requires_grad_(True)


def gradients(drafter: Drafter) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in drafter.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("flags", [{}, EAGLE_31, {"norm_before_residual": True, "num_hidden_layers": 2}])
def test_a_slot_sees_at_each_depth_what_decoding_sees(flags: dict[str, object]) -> None:
    drafter, batch, depths = drafter_of(**flags), batch_of([LENGTH]), 4
    attend = DenseUnrollAttention(batch.document_BT)
    hidden = drafter.fuse(batch.aux_BTX)
    decoder, ids = EagleDraft(drafter), batch.ids_BT[0].tolist()
    states = [decoder.start(ids[: t + 2], batch.aux_BTX[0, : t + 1]) for t in range(LENGTH - 1)]
    for depth in range(depths):
        output = drafter.step(hidden, shifted(batch.ids_BT, 1 + depth), batch.position_BT + depth, attend)
        for t in range(LENGTH - 1 - depth):
            torch.testing.assert_close(output.normed[0, t], states[t].normed_D, atol=2e-5, rtol=1e-4)
        states = [
            decoder.extend(state, ids[t + 2 + depth]) if t + 2 + depth < LENGTH else state
            for t, state in enumerate(states)
        ]
        hidden = output.feedback


def test_depth_one_is_the_plain_loss() -> None:
    drafter, batch = drafter_of(**EAGLE_31), batch_of([LENGTH])
    output = drafter.step(
        drafter.fuse(batch.aux_BTX),
        shifted(batch.ids_BT, 1),
        batch.position_BT,
        DenseUnrollAttention(batch.document_BT),
    )
    logits = drafter.logits(output.normed)[0, : LENGTH - 2]
    teacher = batch.teacher_BTE[0, 1 : LENGTH - 1].softmax(dim=-1)
    plain = torch.nn.functional.cross_entropy(logits, teacher)
    torch.testing.assert_close(unroll(drafter, batch, depths=1, teacher_head=identity).loss, plain)


def test_packed_documents_equal_documents_by_themselves_in_loss_and_gradient() -> None:
    drafter, lengths, depths = drafter_of(**EAGLE_31), [6, 9, 7], 3
    packed = batch_of(lengths)
    ours = unroll(drafter, packed, depths=depths, teacher_head=identity)
    ours.loss.backward()
    packed_gradients = gradients(drafter)
    drafter.zero_grad()
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    alone = [
        TrainingBatch(**{n: getattr(packed, n)[:, a : a + length] for n in packed.__dataclass_fields__})
        for a, length in zip(starts, lengths, strict=True)
    ]
    scores = [unroll(drafter, batch, depths=depths, teacher_head=identity) for batch in alone]
    weights = depth_weights(depths, 0.8)
    expected = torch.zeros(())
    for depth in range(depths):
        slots = sum(score.depths[depth].slots for score in scores)
        assert ours.depths[depth].slots == slots
        mean = sum(score.depths[depth].loss * score.depths[depth].slots for score in scores) / slots
        assert ours.depths[depth].loss == pytest.approx(mean, rel=1e-5)
        expected = expected + weights[depth] * mean
    torch.testing.assert_close(ours.loss, expected, rtol=1e-5, atol=1e-6)
    drafter.zero_grad()
    joined = sum(
        weights[d] * _depth_sum(drafter, batch, d) / ours.depths[d].slots for batch in alone for d in range(depths)
    )
    assert isinstance(joined, Tensor)
    joined.backward()
    for name, gradient in gradients(drafter).items():
        torch.testing.assert_close(packed_gradients[name], gradient, rtol=1e-4, atol=1e-6)


def _depth_sum(drafter: Drafter, batch: TrainingBatch, depth: int) -> Tensor:
    """Summed loss of one depth, with a gradient."""
    attend = DenseUnrollAttention(batch.document_BT)
    hidden = drafter.fuse(batch.aux_BTX)
    for k in range(depth + 1):
        output = drafter.step(hidden, shifted(batch.ids_BT, 1 + k), batch.position_BT + k, attend)
        hidden = output.feedback
    valid = valid_slots(batch.mask_BT, batch.document_BT, depth)
    return score_rows(
        output.normed[valid],
        shifted(batch.teacher_BTE, 1 + depth)[valid],
        student_head=drafter.logits,
        teacher_head=identity,
        kept_W=drafter.vocab().target_ids_W,
    ).loss_sum


def test_without_document_boundaries_packing_would_leak() -> None:
    drafter, packed = drafter_of(**EAGLE_31), batch_of([6, 9])
    leaking = DenseUnrollAttention(torch.zeros_like(packed.document_BT))
    honest = unroll(drafter, packed, depths=2, teacher_head=identity)
    assert not torch.allclose(
        honest.loss, unroll(drafter, packed, depths=2, teacher_head=identity, attend=leaking).loss
    )


def test_slots_count_where_all_they_read_and_predict_is_the_answer() -> None:
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 0, 1, 1]], dtype=torch.bool)
    document = torch.zeros_like(mask, dtype=torch.int64)
    # Slot t reads token t+1 and predicts t+2: the first that counts is the one before the answer's first token.
    assert valid_slots(mask, document, 0)[0].nonzero().flatten().tolist() == [1, 2, 3, 6]
    assert valid_slots(mask, document, 1)[0].nonzero().flatten().tolist() == [1, 2]
    assert valid_slots(mask, document, 2)[0].nonzero().flatten().tolist() == [1]
    split = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 1]])
    assert valid_slots(mask, split, 0)[0].nonzero().flatten().tolist() == [1, 6]


@pytest.mark.parametrize("loss", LOSSES)
def test_chunks_change_neither_loss_nor_gradient(loss: str) -> None:
    drafter, batch = drafter_of(**EAGLE_31), batch_of([LENGTH])
    results = []
    for chunk in (1000, 3):
        drafter.zero_grad()
        score = unroll(drafter, batch, depths=3, teacher_head=identity, loss=loss, chunk=chunk)
        score.loss.backward()
        results.append((score.loss.detach(), gradients(drafter)))
    torch.testing.assert_close(results[0][0], results[1][0])
    for name, gradient in results[0][1].items():
        torch.testing.assert_close(results[1][1][name], gradient, rtol=1e-4, atol=1e-6)


def test_losses_are_what_they_are_called() -> None:
    generator = torch.Generator().manual_seed(0)
    teacher, student = (torch.randn(5, 12, generator=generator) for _ in range(2))
    everything = torch.arange(12)
    p, q = teacher.softmax(-1), student.softmax(-1)
    entropy = -(p * p.log()).sum(-1)
    torch.testing.assert_close(LOSSES["cross_entropy"](student, teacher, everything), -(p * q.log()).sum(-1))
    torch.testing.assert_close(LOSSES["kl"](student, teacher, everything), -(p * q.log()).sum(-1) - entropy)
    torch.testing.assert_close(LOSSES["total_variation"](student, teacher, everything), (p - q).abs().sum(-1) / 2)
    torch.testing.assert_close(
        LOSSES["acceptance"](student, teacher, everything), -(1 - (p - q).abs().sum(-1) / 2).log()
    )
    for name in ("kl", "total_variation", "acceptance"):
        torch.testing.assert_close(LOSSES[name](teacher, teacher, everything), torch.zeros(5), atol=1e-6, rtol=0)


def test_a_token_outside_the_draft_vocabulary_is_a_miss() -> None:
    kept = torch.tensor([0, 2, 4])
    teacher = torch.tensor([[0.0, 9.0, 1.0, 0.0, 0.0], [0.0, 0.0, 9.0, 0.0, 0.0]])
    student = torch.tensor([[0.0, 5.0, 0.0], [0.0, 5.0, 0.0]])  # proposes target id 2 both times
    rows = score_rows(
        student, teacher, student_head=identity, teacher_head=identity, kept_W=kept, loss="total_variation"
    )
    assert rows.hit_M.tolist() == [False, True]
    assert float(rows.overlap_M[0]) < 0.01


def test_depth_weights_sum_to_one() -> None:
    assert sum(depth_weights(7, 0.8)) == pytest.approx(1)
    assert depth_weights(3, 1.0) == pytest.approx([1 / 3] * 3)
    assert depth_weights(2, 0.5) == pytest.approx([2 / 3, 1 / 3])


def test_feedback_is_not_detached() -> None:
    drafter, batch = drafter_of(), batch_of([LENGTH])
    deep = unroll(drafter, batch, depths=2, teacher_head=identity)
    deep.loss.backward()
    assert drafter.fc.weight.grad is not None
    with_feedback = drafter.fc.weight.grad.clone()
    drafter.zero_grad()
    first = _depth_sum(drafter, batch, 0) / deep.depths[0].slots * depth_weights(2, 0.8)[0]
    first.backward()
    assert not torch.allclose(with_feedback, drafter.fc.weight.grad)


def test_nothing_to_train_on_gives_no_loss_and_says_so_in_the_counts() -> None:
    drafter, batch = drafter_of(), batch_of([LENGTH])
    score = unroll(drafter, replace(batch, mask_BT=torch.zeros_like(batch.mask_BT)), depths=2, teacher_head=identity)
    assert [depth.slots for depth in score.depths] == [0, 0]
    assert float(score.loss) == 0


def test_an_unknown_loss_is_refused() -> None:
    with pytest.raises(UserError, match=r"'mse'.*cross_entropy"):
        unroll(drafter_of(), batch_of([LENGTH]), depths=1, teacher_head=identity, loss="mse")
