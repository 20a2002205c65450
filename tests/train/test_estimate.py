"""The estimate walks rounds as decoding does: on the target's own greedy text the two are equal, round by round."""

from collections.abc import Sequence

import torch

import tiny
from eyas.drafter.model import Drafter
from eyas.engine.dense import DenseTarget, EagleDraft
from eyas.engine.reference import Chain, decode_plainly, decode_speculatively
from eyas.sampling import SeededDraws
from eyas.target.model import Target
from eyas.train.estimate import RoundCounts, walk_rounds
from eyas.train.unroll import DepthScore, TrainingBatch, unroll

DEPTHS, NEW = 4, 40


def scores(valid: Sequence[str], hits: Sequence[str]) -> list[DepthScore]:
    """One sequence; a line per depth, a character per slot."""

    def tensor(line: str) -> torch.Tensor:
        return torch.tensor([[character == "x" for character in line]])

    return [
        DepthScore(slots=0, loss=0.0, accuracy=0.0, overlap=0.0, hit_BT=tensor(h), valid_BT=tensor(v))
        for v, h in zip(valid, hits, strict=True)
    ]


def test_the_next_round_starts_behind_the_first_miss() -> None:
    # Slot 0 accepts two, so the next round is at slot 3, which misses at once; then slot 4 accepts one.
    counts = walk_rounds(scores(["xxxxxx", "xxxxxx"], ["xx..x.", "xxx..."]))
    assert counts == RoundCounts(rounds=3, accepted_at=(2, 1))
    assert counts.acceptance_length == 2.0


def test_a_hit_behind_a_miss_counts_for_nothing() -> None:
    assert walk_rounds(scores(["x", "x"], [".", "x"])) == RoundCounts(rounds=1, accepted_at=(0, 0))


def test_rounds_stay_within_a_turn() -> None:
    assert walk_rounds(scores(["xx..xx", "x...x."], ["xxxxxx", "xxxxxx"])).rounds == 2


def test_counts_add_up() -> None:
    one, two = RoundCounts(rounds=1, accepted_at=(1, 0)), RoundCounts(rounds=2, accepted_at=(2, 1))
    assert one + two == RoundCounts(rounds=3, accepted_at=(3, 1))


def test_the_estimate_equals_decoding_on_the_targets_own_text(tiny_target: Target, tiny_drafter: Drafter) -> None:
    target, drafter = DenseTarget(tiny_target, tiny_drafter.config), EagleDraft(tiny_drafter)
    estimated = RoundCounts(rounds=0, accepted_at=(0,) * DEPTHS)
    rounds = []
    # Prompts of plain noise, where the trained drafter misses often.
    for prompt in torch.randint(tiny.VOCAB, (12, 8), generator=torch.Generator().manual_seed(5)).tolist():
        # Decoding may overshoot what was asked for; let the text go on as far as its last round did.
        asked = decode_speculatively(
            target, drafter, prompt, shape=Chain(depth=DEPTHS), draws=SeededDraws(0), max_new_tokens=NEW
        )
        made = 1 + sum(r.accepted + 1 for r in asked.rounds)
        text = [*prompt, *decode_plainly(target, prompt, draws=SeededDraws(0), max_new_tokens=made)]
        logits, aux = tiny.features(tiny_target.model, torch.tensor([text]), tiny.AUX_IDS)
        mask = torch.arange(len(text))[None] >= len(prompt)
        batch = TrainingBatch(
            ids_BT=torch.tensor([text]),
            mask_BT=mask,
            document_BT=torch.zeros_like(mask, dtype=torch.int64),
            position_BT=torch.arange(len(text))[None],
            aux_BTX=aux,
            teacher_BTE=logits,
        )
        score = unroll(tiny_drafter, batch, depths=DEPTHS, teacher_head=lambda x: x)
        counts = walk_rounds(score.depths)
        assert counts.rounds == len(asked.rounds)
        assert counts.accepted_at == tuple(sum(r.accepted > d for r in asked.rounds) for d in range(DEPTHS))
        estimated += counts
        rounds += asked.rounds
    measured = 1 + sum(r.accepted for r in rounds) / len(rounds)
    assert estimated.acceptance_length == measured
    assert 1.5 < measured < DEPTHS + 1
