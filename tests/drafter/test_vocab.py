"""d2t is a table of offsets; other tables are refused."""

import pytest
import torch
from torch import Tensor

from each import each
from eyas.drafter.vocab import DraftVocab, check_offsets, membership_from_target_ids, offsets_from_target_ids
from eyas.errors import UserError

V = 49152


def random_ids(count: int, vocab_size: int = V, seed: int = 0) -> Tensor:
    order = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(seed))
    return order[:count].sort().values


def test_d2t_is_an_offset_from_the_draft_id() -> None:
    vocab = DraftVocab.from_offsets(torch.tensor([2, 2, 5]), 10)
    assert vocab.target_ids_W.tolist() == [2, 3, 7]
    assert vocab.to_target(torch.tensor([[2, 0]])).tolist() == [[7, 2]]


def test_offsets_and_target_ids_are_inverses() -> None:
    ids = random_ids(300)
    assert torch.equal(DraftVocab.from_offsets(offsets_from_target_ids(ids), V).target_ids_W, ids)
    assert membership_from_target_ids(ids, V).nonzero().flatten().equal(ids)


def test_identity_maps_each_id_to_itself() -> None:
    assert DraftVocab.identity(5, torch.device("cpu")).to_target(torch.tensor([4, 0])).tolist() == [4, 0]


def test_scatter_puts_values_at_target_ids_and_fills_the_rest() -> None:
    vocab = DraftVocab.from_offsets(torch.tensor([1, 2]), 5)
    spread = vocab.scatter(torch.tensor([[0.25, 0.75], [1.0, 0.0]]), 0.0)
    assert spread.tolist() == [[0, 0.25, 0, 0.75, 0], [0, 1.0, 0, 0, 0]]
    assert vocab.scatter(torch.tensor([1.0, 2.0]), float("-inf"))[0] == float("-inf")


def test_scatter_keeps_every_probability() -> None:
    vocab = DraftVocab.from_offsets(offsets_from_target_ids(random_ids(500)), V)
    q_W = torch.rand(3, 500).softmax(dim=-1)
    assert torch.equal(vocab.scatter(q_W, 0.0)[:, vocab.target_ids_W], q_W)


@each("seed", range(3))
def test_absolute_ids_of_a_realistic_vocabulary_are_refused(seed: int) -> None:
    ids = random_ids(16384, seed=seed)
    with pytest.raises(UserError, match=r"absolute target ids .* subtract arange"):
        check_offsets(ids, V)
    check_offsets(offsets_from_target_ids(ids), V)  # the same choice, spelt rightly


@each("seed", range(20))
def test_a_small_sparse_vocabulary_is_not_taken_for_absolute_ids(seed: int) -> None:
    check_offsets(offsets_from_target_ids(random_ids(32, seed=seed)), V)


@each(
    ("d2t", "message"),
    [
        ([0, 0, 8], "target id 10, outside 0..9; rebuild"),
        ([-1, 0, 0], "target id -1, outside 0..9; rebuild"),
        ([3, 2, 0], "maps 1 draft ids to a token that another one has"),
        ([5, 4, 3], "maps 2 draft ids to a token that another one has"),
        ([5, 8, 9], r"absolute target ids \(5 \.\. 9"),
        ([2**63 - 1, 2**63 - 1, 0], "outside 0..9"),
    ],
)
def test_tables_that_cannot_be_offsets_are_refused(d2t: list[int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        DraftVocab.from_offsets(torch.tensor(d2t), 10)


def test_the_first_and_last_token_are_within_range() -> None:
    assert DraftVocab.from_offsets(torch.tensor([0, 8]), 10).target_ids_W.tolist() == [0, 9]
