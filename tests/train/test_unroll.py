"""Training runs the drafter as decoding runs it, and packing, chunking and depth do not change what is learnt."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

import tiny
from each import each
from eyas.drafter.model import Drafter
from eyas.train.attention import DenseUnrollAttention, merge_own_slot, split_gradient
from eyas.train.batch import TrainingBatch
from eyas.train.features import Features
from eyas.train.loss import LOSSES, Scores, row_loss_of, score
from eyas.train.unroll import depth_weights, unroll
from oracle.dense import EagleDraft
from train.batches import EAGLE_31, ScoreTeacher, batch_of, drafter_of, features_of, gradients

LENGTH = 14
LATENT = {"kv_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10}


def scored(
    drafter: Drafter,
    batch: TrainingBatch,
    features: Features,
    *,
    depths: int,
    loss: str | dict[str, float] = "cross_entropy",
    chunk: int = 1000,
    activation_checkpointing: bool = False,
    weights: list[float] | None = None,
    attend: DenseUnrollAttention | None = None,
) -> Scores:
    """Scores with the weights of the loop: depth weights over predictions that count."""
    kept = drafter.vocab().target_ids_W
    attend = attend or DenseUnrollAttention(batch)
    normed = unroll(
        drafter, batch, features.aux_TX, depths=depths, attend=attend, activation_checkpointing=activation_checkpointing
    )
    if weights is None:
        weights = [w / max(1, n) for w, n in zip(depth_weights(depths, 0.8), batch.counts(depths), strict=True)]
    assert drafter.lm_head is not None
    return score(
        normed,
        drafter.lm_head.weight,
        batch,
        features.teachers(kept),
        target_ids_W=kept,
        weights=weights,
        row_loss=row_loss_of(loss),
        chunk=chunk,
    )


@each(
    "flags",
    [
        {},
        EAGLE_31,
        {"norm_before_residual": True, "num_hidden_layers": 2},
        {**EAGLE_31, "qk_norm": True},
        {**EAGLE_31, "mla": LATENT},
        {"mla": {**LATENT, "q_lora_rank": None}, "num_hidden_layers": 2},
    ],
)
def test_a_slot_sees_at_each_depth_what_decoding_sees(flags: dict[str, object]) -> None:
    drafter, batch, depths = drafter_of(**flags), batch_of([LENGTH]), 4
    aux = features_of(batch).aux_TX
    normed = unroll(drafter, batch, aux, depths=depths, attend=DenseUnrollAttention(batch))
    decoder, ids = EagleDraft(drafter), batch.ids_T.tolist()
    assert batch.slots.taught_M.tolist() == list(range(LENGTH - 2))
    states = [decoder.start(ids[: t + 2], aux[: t + 1]) for t in range(LENGTH - 2)]
    for depth in range(depths):
        for t in range(LENGTH - 2 - depth):
            torch.testing.assert_close(normed[depth, t], states[t].normed_D, atol=2e-5, rtol=1e-4)
        states = [
            decoder.extend(state, ids[t + 2 + depth]) if t + 2 + depth < LENGTH else state
            for t, state in enumerate(states)
        ]


@each("lengths", [[1], [2], [3], [1, 2, 1]])
def test_a_pack_shorter_than_the_depths_still_teaches(lengths: list[int]) -> None:
    drafter, depths = drafter_of(**EAGLE_31), 7
    short, longer = batch_of(lengths), batch_of([*lengths, 9])
    found = scored(drafter, short, features_of(short), depths=depths)
    found.loss.backward()
    assert all(bool(gradient.isfinite().all()) for gradient in gradients(drafter).values())
    assert short.counts(depths)[1:] == [0] * (depths - 1)
    # Beside a long document the short ones give the same states as alone.
    ids = longer.ids_T[: sum(lengths)]
    aux = features_of(longer).aux_TX
    both = [
        unroll(drafter, batch, aux[: len(batch.ids_T)], depths=depths, attend=DenseUnrollAttention(batch))
        for batch in (batch_of(lengths, ids=ids), longer)
    ]
    torch.testing.assert_close(both[0][0], both[1][0, : len(short.row_M)])


def test_depth_one_is_the_plain_loss() -> None:
    drafter, batch = drafter_of(**EAGLE_31), batch_of([LENGTH])
    features = features_of(batch)
    normed = unroll(drafter, batch, features.aux_TX, depths=1, attend=DenseUnrollAttention(batch))[0]
    teacher = features.teachers(torch.arange(tiny.VOCAB))
    assert isinstance(teacher, ScoreTeacher)
    plain = torch.nn.functional.cross_entropy(drafter.logits(normed), teacher.logits_TV[1 : LENGTH - 1].softmax(dim=-1))
    plain.backward()
    expected = gradients(drafter)
    drafter.zero_grad()
    ours = scored(drafter, batch, features, depths=1)
    ours.loss.backward()
    torch.testing.assert_close(ours.loss, plain)
    for name, gradient in gradients(drafter).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6)


def test_packed_documents_equal_documents_by_themselves_in_loss_and_gradient() -> None:
    drafter, lengths, depths = drafter_of(**EAGLE_31), [6, 9, 7], 3
    packed = batch_of(lengths)
    features = features_of(packed)
    teacher = features.teachers(torch.arange(tiny.VOCAB))
    assert isinstance(teacher, ScoreTeacher)
    together = scored(drafter, packed, features, depths=depths)
    together.loss.backward()
    expected = gradients(drafter)
    drafter.zero_grad()
    weights = [w / n for w, n in zip(depth_weights(depths, 0.8), packed.counts(depths), strict=True)]
    total = torch.zeros(())
    for start, length in zip(np.cumsum([0, *lengths]), lengths, strict=False):
        here = slice(int(start), int(start) + length)
        alone = batch_of([length], ids=packed.ids_T[here])
        said = teacher.logits_TV[here]
        own = replace(features, aux_TX=features.aux_TX[here], teachers=lambda kept, said=said: ScoreTeacher(said, kept))
        total = total + scored(drafter, alone, own, depths=depths, weights=weights).loss
    total.backward()
    torch.testing.assert_close(together.loss, total, rtol=1e-5, atol=1e-6)
    for name, gradient in gradients(drafter).items():
        torch.testing.assert_close(expected[name], gradient, rtol=1e-4, atol=1e-6)


def test_without_document_boundaries_packing_would_leak() -> None:
    drafter, packed = drafter_of(**EAGLE_31), batch_of([6, 9])
    features = features_of(packed)
    one = replace(packed, starts=torch.tensor([0, 15], dtype=torch.int32))
    leaking = scored(drafter, packed, features, depths=2, attend=DenseUnrollAttention(one))
    assert not torch.allclose(scored(drafter, packed, features, depths=2).loss, leaking.loss)


def test_a_prediction_counts_if_all_its_tokens_are_the_answer() -> None:
    mask = [0, 0, 1, 1, 1, 1, 0, 1, 1]
    batch = batch_of([9], mask=mask)

    def rows(batch: TrainingBatch, depth: int) -> list[int]:
        return batch.row_M[batch.run_M > depth].tolist()

    # The state at token s scores token s + 1. At depth 0 both must be answer; slot s - 1 learns from it.
    assert rows(batch, 0) == [2, 3, 4, 7]
    assert rows(batch, 1) == [3, 4]
    assert rows(batch, 2) == [4]
    assert batch.counts(4) == [4, 2, 1, 0]
    split = batch_of([4, 5], mask=mask)
    assert rows(split, 0) == [2, 7]  # a document's first token has no slot before it
    assert rows(batch_of([5], mask=[1] * 5), 0) == [1, 2, 3]


MIXTURE = {"cross_entropy": 0.1, "total_variation": 0.9}


@each("loss", [*LOSSES, MIXTURE])
def test_chunks_and_checkpoints_change_neither_loss_nor_gradient(loss: str | dict[str, float]) -> None:
    drafter, batch = drafter_of(**EAGLE_31, num_hidden_layers=2), batch_of([LENGTH, 5])
    features = features_of(batch)
    results = []
    for chunk, activation_checkpointing in ((1000, False), (3, False), (1000, True)):
        drafter.zero_grad()
        scores = scored(
            drafter,
            batch,
            features,
            depths=3,
            loss=loss,
            chunk=chunk,
            activation_checkpointing=activation_checkpointing,
        )
        scores.loss.backward()
        results.append((scores, gradients(drafter)))
    for scores, found in results[1:]:
        torch.testing.assert_close(scores.loss, results[0][0].loss)
        torch.testing.assert_close(scores.overlap_S, results[0][0].overlap_S)
        assert torch.equal(scores.hit_SM, results[0][0].hit_SM)
        for name, gradient in results[0][1].items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)


@each("loss", [*LOSSES, MIXTURE, {"lk_hybrid": 2.0, "kl": 0.5}])
def test_the_gradient_of_a_loss_is_its_gradient(loss: str | dict[str, float]) -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(6, 12, generator=generator, dtype=torch.float64).requires_grad_()
    # Some probability lies outside the draft vocabulary.
    p = torch.randn(6, 15, generator=generator, dtype=torch.float64).softmax(dim=-1)[:, :12]
    value, gradient = row_loss_of(loss)(scores.log_softmax(dim=-1), p)
    (expected,) = torch.autograd.grad(value.sum(), scores)
    torch.testing.assert_close(gradient.detach(), expected)


def test_losses_match_their_formulas() -> None:
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.randn(5, 12, generator=generator).softmax(dim=-1) for _ in range(2))
    entropy, distance = -(p * p.log()).sum(-1), (p - q).abs().sum(-1) / 2
    expected = {
        "cross_entropy": -(p * q.log()).sum(-1),
        "kl": -(p * q.log()).sum(-1) - entropy,
        "total_variation": distance,
        "acceptance": -(1 - distance).log(),
    }
    weight = (-3 * (1 - distance)).exp()
    expected["lk_hybrid"] = weight * expected["kl"] + (1 - weight) * distance
    assert expected.keys() == LOSSES.keys()
    for name, value in expected.items():
        torch.testing.assert_close(LOSSES[name](q.log(), p)[0], value)
        if name != "cross_entropy":
            torch.testing.assert_close(LOSSES[name](p.log(), p)[0], torch.zeros(5), atol=1e-6, rtol=0)


def test_a_mixture_is_the_weighted_sum_of_its_losses_and_gradients() -> None:
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.randn(5, 12, generator=generator).softmax(dim=-1) for _ in range(2))
    found = row_loss_of(MIXTURE)(q.log(), p)
    parts = [LOSSES[name](q.log(), p) for name in MIXTURE]
    for ours, one, other in zip(found, *parts, strict=True):
        torch.testing.assert_close(ours, 0.1 * one + 0.9 * other)


def test_the_hybrid_loss_has_both_limits() -> None:
    apart, near = torch.tensor([[8.0, 0.0, 0.0]]), torch.tensor([[0.0, 0.1, 0.0]])
    p = torch.tensor([[0.0, 0.0, 20.0]]).softmax(dim=-1), torch.zeros(1, 3).softmax(dim=-1)
    for scores, target, leader, factor in ((apart, p[0], "kl", 1.0), (near, p[1], "total_variation", 1 - np.exp(-3))):
        log_q = scores.log_softmax(dim=-1)
        torch.testing.assert_close(
            LOSSES["lk_hybrid"](log_q, target)[1], factor * LOSSES[leader](log_q, target)[1], rtol=0.1, atol=0.01
        )


def test_a_token_outside_the_draft_vocabulary_is_a_miss() -> None:
    kept = torch.tensor([0, 2, 4])
    said = torch.zeros(4, 5)
    said[1, 1], said[2, 2] = 9.0, 9.0  # id 1 cannot be drafted, id 2 can
    states = torch.tensor([0.0, 5.0, 0.0]).expand(1, 4, 3)  # proposes target id 2 everywhere
    batch = batch_of([4])
    found = score(
        states,
        torch.eye(3),
        batch,
        ScoreTeacher(said, kept),
        target_ids_W=kept,
        weights=[1.0],
        row_loss=LOSSES["total_variation"],
    )
    assert batch.row_M.tolist() == [1, 2]
    assert found.hit_SM.tolist() == [[False, True]]
    assert float(found.overlap_S[0]) < 1.1


def test_depth_weights_sum_to_one() -> None:
    assert sum(depth_weights(7, 0.8)) == pytest.approx(1)
    assert depth_weights(3, 1.0) == pytest.approx([1 / 3] * 3)
    assert depth_weights(2, 0.5) == pytest.approx([2 / 3, 1 / 3])


def test_first_weight_keeps_the_ratios_of_the_other_depths() -> None:
    assert depth_weights(3, 0.5, first=3.0) == pytest.approx([3 / 3.75, 0.5 / 3.75, 0.25 / 3.75])
    assert depth_weights(1, 0.5, first=3.0) == [1.0]


def test_feedback_is_not_detached() -> None:
    drafter, batch = drafter_of(), batch_of([LENGTH])
    features = features_of(batch)
    scored(drafter, batch, features, depths=2, weights=[0.0, 1.0]).loss.backward()
    # Depth 1 reads the fused states through depth 0's feedback and keys alone.
    assert drafter.fc.weight.grad is not None
    assert float(drafter.fc.weight.grad.abs().sum()) > 0
    deep = drafter.fc.weight.grad.clone()
    drafter.zero_grad()
    scored(drafter, batch, features, depths=1, weights=[1.0]).loss.backward()
    assert not torch.allclose(deep, drafter.fc.weight.grad)


def test_nothing_to_train_on_gives_no_loss() -> None:
    drafter, batch = drafter_of(), batch_of([LENGTH], mask=[0] * LENGTH)
    assert batch.counts(2) == [0, 0]
    assert float(scored(drafter, batch, features_of(batch), depths=2).loss) == 0


def test_merging_the_slots_own_keys_equals_attending_to_all_keys_at_once() -> None:
    """Tests the part that the flash path adds to flash attention, without flash attention."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    batch = batch_of([6, 5])
    slots, heads, groups, size, depth = len(batch.row_M), 4, 2, 8, 3
    q, first_k, first_v = random(slots, heads, size), random(slots, groups, size), random(slots, groups, size)
    own_k, own_v = ([random(slots, groups, size) for _ in range(depth)] for _ in range(2))
    attend = DenseUnrollAttention(batch)
    for earlier, (k, v) in enumerate([(first_k, first_v), *zip(own_k, own_v, strict=True)][:-1]):
        attend.at(earlier)(0, q, k, v)
    dense = attend.at(depth)(0, q, own_k[-1], own_v[-1])
    d_out = torch.randn(slots, heads, size, generator=generator, dtype=torch.float64)
    expected = torch.autograd.grad(dense, [q, *own_k, *own_v, first_k], d_out)

    document = torch.tensor([0] * 4 + [1] * 3)  # a document's last two slots teach nothing
    visible = torch.ones(slots, slots, dtype=torch.bool).tril() & (document[:, None] == document)
    spread = first_k.repeat_interleave(2, dim=1)
    scores = torch.einsum("thk,shk->hts", q, spread).masked_fill(~visible, float("-inf")) * size**-0.5
    first = torch.einsum("hts,shk->thk", scores.softmax(-1), first_v.repeat_interleave(2, dim=1))
    merged, lse = merge_own_slot(first.detach(), scores.logsumexp(-1).T.detach(), q.detach(), own_k, own_v)
    torch.testing.assert_close(merged, dense.double(), atol=1e-5, rtol=1e-5)
    d_q, d_keys, d_values = split_gradient(d_out, merged, lse, q.detach(), own_k, own_v)
    for ours, theirs in zip([*d_keys, *d_values], expected[1:-1], strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
    # The rest of q's gradient is flash attention's: softmax over the first keys with the merged normaliser.
    p = (scores - lse.T[..., None]).exp().masked_fill(~visible, 0.0)
    d_p = torch.einsum("thk,shk->hts", d_out, first_v.repeat_interleave(2, dim=1))
    d_s = p * (d_p - (d_out * merged).sum(-1).T[..., None]) * size**-0.5
    torch.testing.assert_close(d_q + torch.einsum("hts,shk->thk", d_s, spread), expected[0], atol=1e-5, rtol=1e-4)
