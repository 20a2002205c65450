"""The reference decoder with its own random draws yields pairs of tokens as plain decoding does: chi-square tests."""

from collections.abc import Sequence

import pytest
import torch
from scipy import stats
from torch import Tensor

from each import each
from engine.scripted import ScriptedDrafter, ScriptedTarget, random_table
from eyas.sampling import Sampling
from oracle import reference
from oracle.reference import Chain, Tree, decode_speculatively
from oracle.rejection import Candidate, Draws, SeededDraws
from oracle.shaping import probabilities

pytestmark = pytest.mark.slow

VOCAB = 6
SEQUENCES, LENGTH = 200, 13

CASES = [
    (Chain(depth=2), Sampling(temperature=1.0, top_p=0.9)),
    (Chain(depth=3, probabilistic=True), Sampling(temperature=0.8, top_k=4)),
    (Tree(depth=2, width=2, budget=4), Sampling(temperature=1.2, top_k=5, top_p=0.9)),
    (Tree(depth=2, width=2, budget=6, probabilistic=True), Sampling(temperature=1.0)),
]


def models() -> tuple[ScriptedTarget, ScriptedDrafter]:
    """A target whose last token decides the next, so that each pair of neighbours is a sample of a known law."""
    table = random_table(VOCAB, 5)[:1].expand(VOCAB, -1, -1)
    return ScriptedTarget(table), ScriptedDrafter(0.5 * table + random_table(VOCAB, 6))


def p_value(shape: Chain | Tree, sampling: Sampling) -> float:
    """Probability of counts at least as far from plain decoding's law, if the law is the same."""
    target, drafter = models()
    p_VV = probabilities(target.table[0], sampling)
    counts_VV = torch.zeros(VOCAB, VOCAB, dtype=torch.float64)
    for seed in range(SEQUENCES):
        tokens = decode_speculatively(
            target,
            drafter,
            [0],
            shape=shape,
            draws=SeededDraws(seed),
            max_new_tokens=LENGTH,
            sampling=sampling,
        ).tokens
        for before, after in zip((0, *tokens), tokens, strict=False):
            counts_VV[before, after] += 1
    assert counts_VV.sum() == SEQUENCES * LENGTH
    assert counts_VV[p_VV == 0].sum() == 0, "a token that shaping excluded came out"
    expected_VV = counts_VV.sum(dim=-1, keepdim=True) * p_VV
    # Cells too rare for the chi-square approximation are left out, with their degrees of freedom.
    used_VV = expected_VV >= 5
    statistic = ((counts_VV - expected_VV)[used_VV].square() / expected_VV[used_VV]).sum()
    freedom = int((used_VV.sum(dim=-1) - 1).clamp(min=0).sum())
    assert freedom > 5
    return float(stats.chi2.sf(float(statistic), freedom))


@each(("shape", "sampling"), CASES)
def test_pairs_of_tokens_come_as_often_as_in_plain_decoding(shape: Chain | Tree, sampling: Sampling) -> None:
    assert p_value(shape, sampling) > 1e-3


def test_accepting_whatever_is_possible_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def accept_possible(p_V: Tensor, candidates: Sequence[Candidate], draws: Draws) -> tuple[int | None, Tensor]:
        possible = [i for i, candidate in enumerate(candidates) if p_V[candidate.token] > 0]
        return (possible[0] if possible else None), p_V

    monkeypatch.setattr(reference, "try_candidates", accept_possible)
    shape, sampling = CASES[1]
    assert p_value(shape, sampling) < 1e-6
