"""The estimate walks rounds as decoding does: on the target's own greedy text both are equal, round by round."""

import torch

import tiny
from each import each
from eyas.drafter.model import Drafter
from eyas.target.model import Target
from eyas.train.estimate import RoundCounts, walk_rounds
from eyas.train.loss import LOSSES, forward_loss
from eyas.train.sources.live import LiveSource
from oracle.dense import DenseTarget, EagleDraft
from oracle.reference import Chain, decode_plainly, decode_speculatively
from oracle.rejection import SeededDraws
from train.batches import batch_of

DEPTHS, NEW = 4, 40


def walk(mask: list[int], *hits: str) -> RoundCounts:
    """Walk one document; hits are a line per depth with a character per teacher row."""
    batch = batch_of([len(mask)], mask=mask)
    return walk_rounds(batch, torch.tensor([[c == "x" for c in line] for line in hits]))


@each(
    ("mask", "hits", "rounds", "accepted_at"),
    [
        # Row 0 at depth 0 and row 1 at depth 1 hit. The next round starts after the token that the target gave, at row
        # 3, and misses at once; then row 4 hits, and only row 5 is left to draft, which misses.
        ([0, 1, 1, 1, 1, 1, 1, 1], ("x...x.", ".x...."), 3, (2, 1)),
        ([0, 1, 1, 1], ("..", "xx"), 2, (0, 0)),  # a hit after a miss does not count
        ([0, 1, 1, 1, 0, 1, 1, 1], ("xxxx", "xxxx"), 2, (2, 2)),  # rounds stay within an answer
    ],
)
def test_the_next_round_starts_after_the_first_miss(
    mask: list[int], hits: tuple[str, ...], rounds: int, accepted_at: tuple[int, ...]
) -> None:
    counts = walk(mask, *hits)
    assert counts == RoundCounts(rounds=rounds, accepted_at=accepted_at)
    assert counts.acceptance_length == 1 + sum(accepted_at) / rounds


def test_counts_add_up() -> None:
    one, two = RoundCounts(rounds=1, accepted_at=(1, 0)), RoundCounts(rounds=2, accepted_at=(2, 1))
    assert one + two == RoundCounts(rounds=3, accepted_at=(3, 1))


def test_a_batch_that_teaches_nothing_has_no_rounds() -> None:
    batch = batch_of([4], mask=[0] * 4)
    assert walk_rounds(batch, torch.zeros(2, 0, dtype=torch.bool)).rounds == 0


def test_the_estimate_equals_decoding_on_the_targets_own_text(tiny_target: Target, tiny_drafter: Drafter) -> None:
    target, decoder = DenseTarget(tiny_target, tiny_drafter.config), EagleDraft(tiny_drafter)
    source = LiveSource(tiny_target, tiny.AUX_IDS)
    kept = tiny_drafter.vocab().target_ids_W
    estimated = RoundCounts(rounds=0, accepted_at=(0,) * DEPTHS)
    rounds = []
    # Random prompts, on which the trained drafter misses often.
    for prompt in torch.randint(tiny.VOCAB, (12, 8), generator=torch.Generator().manual_seed(5)).tolist():
        # Decoding may overshoot the requested length; the text ends where its last round does.
        asked = decode_speculatively(
            target, decoder, prompt, shape=Chain(depth=DEPTHS), draws=SeededDraws(0), max_new_tokens=NEW
        )
        made = 1 + sum(r.accepted + 1 for r in asked.rounds)
        text = [*prompt, *decode_plainly(target, prompt, draws=SeededDraws(0), max_new_tokens=made)]
        batch = batch_of([len(text)], mask=[i >= len(prompt) for i in range(len(text))], ids=torch.tensor(text))
        features = source(batch)
        with torch.no_grad():
            scores = forward_loss(
                tiny_drafter,
                batch,
                features,
                target_ids_W=kept,
                layer_ids=tiny.AUX_IDS,
                weights=[1.0] * DEPTHS,
                row_loss=LOSSES["kl"],
                chunk=64,
            )
        counts = walk_rounds(batch, scores.hit_SM)
        assert counts.rounds == len(asked.rounds)
        assert counts.accepted_at == tuple(sum(r.accepted > d for r in asked.rounds) for d in range(DEPTHS))
        estimated += counts
        rounds += asked.rounds
    measured = 1 + sum(r.accepted for r in rounds) / len(rounds)
    assert estimated.acceptance_length == measured
    assert 1.5 < measured < DEPTHS + 1
