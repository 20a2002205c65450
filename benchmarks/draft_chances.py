"""Acceptance probability of each draft on a given text, by every rule that servers use, and rounds expected from them.

At temperature 0 a draft is right or not. At temperature 1 the text is one sample of the target's. Given that its token
is x, with p and q the target's and the drafter's distributions there, a draft is accepted with probability

    race        1 / sum over v of max(p(v), q(v) p(x) / q(x))   both race against the same noise, as in eyas: x wins
                                                                p's race and q's with 1 / sum of max(p / p(x), q / q(x))
    rejection   min(1, q(x) / p(x))                             drawn from q, kept with min(1, p / q)
    guess       1 if x is the most likely token of q, else 0    the most likely draft, whatever the temperature

All three are exact on the given text. Texts must come from the target at the temperature in question.

Shapes: S depths, M teacher rows (batch.py), D drafter state, W and V draft and target vocabulary, C rows of a chunk, A
answers, L rows of an answer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eyas.drafter.model import Drafter
from eyas.train.attention import attention_for
from eyas.train.batch import TrainingBatch
from eyas.train.estimate import answer_borders
from eyas.train.features import Features, TargetDistribution
from eyas.train.unroll import unroll

GREEDY = "greedy"
SAMPLED = ("race", "rejection", "guess")
"""Rules at temperature 1."""
_LEAST = 1e-30


@torch.no_grad()
def draft_chances(
    drafter: Drafter,
    batch: TrainingBatch,
    features: Features,
    *,
    target_ids_W: Tensor,
    layer_ids: Sequence[int],
    depths: int,
    chunk: int = 4096,
) -> dict[str, Tensor]:
    """Acceptance probabilities [S, M] by rule: `GREEDY` for text of temperature 0, `SAMPLED` for temperature 1.

    Depth k of row m is the draft of a round that began k rows before it; it is meaningless if that row is in no answer.
    """
    assert drafter.lm_head is not None
    head_WD, scale = drafter.lm_head.weight, drafter.config.logit_scale
    attend = attention_for(batch, drafter.fc.weight.dtype, compiled=False)
    normed_SMD = unroll(drafter, batch, features.aux_of(layer_ids), depths=depths, attend=attend)
    teacher, rows = features.teachers(target_ids_W), len(batch.row_M)
    place_V = target_ids_W.new_full((drafter.config.vocab_size,), -1)
    place_V[target_ids_W] = torch.arange(len(target_ids_W), device=place_V.device)
    number_M = torch.arange(rows, device=batch.row_M.device)
    found: dict[str, list[list[Tensor]]] = {rule: [[] for _ in range(depths)] for rule in (GREEDY, *SAMPLED)}
    for start in range(0, rows, chunk):
        row_C, number_C = batch.row_M[start : start + chunk], number_M[start : start + chunk]
        said = teacher(row_C)
        place_C = place_V[batch.ids_T[row_C + 1]]
        for depth in range(depths):
            logits_CW = normed_SMD[depth][(number_C - depth).clamp(min=0)] @ head_WD.T * scale
            for rule, chance_C in _chances(logits_CW, said, place_C, target_ids_W).items():
                found[rule][depth].append(chance_C)
    empty = number_M.new_zeros(0, dtype=torch.float32)
    return {rule: torch.stack([torch.cat([empty, *own]) for own in by_depth]) for rule, by_depth in found.items()}


def _chances(logits_CW: Tensor, said: TargetDistribution, place_C: Tensor, target_ids_W: Tensor) -> dict[str, Tensor]:
    """Probabilities at one depth; `place_C` is the text's token in the draft vocabulary, below 0 if it is not there."""
    log_q_CW = logits_CW.float().log_softmax(dim=-1)
    q_CW, p_CW = log_q_CW.exp(), said.probabilities(log_q_CW)
    index_C1 = place_C.clamp(min=0)[:, None]
    own_q_C, own_p_C = (x_CW.gather(-1, index_C1)[:, 0].clamp(min=_LEAST) for x_CW in (q_CW, p_CW))
    # Tokens outside the draft vocabulary are in p alone.
    others_C = (1 - p_CW.sum(dim=-1)).clamp(min=0)
    race_C = 1 / (torch.maximum(p_CW, q_CW * (own_p_C / own_q_C)[:, None]).sum(dim=-1) + others_C)
    best_C = logits_CW.argmax(dim=-1)
    known_C = place_C >= 0
    return {
        GREEDY: (target_ids_W[best_C] == said.best_C).float(),
        "race": torch.where(known_C, race_C, 0.0),
        "rejection": torch.where(known_C, (own_q_C / own_p_C).clamp(max=1), 0.0),
        "guess": (known_C & (best_C == place_C)).float(),
    }


@dataclass(frozen=True, kw_only=True)
class ExpectedRounds:
    """Expected rounds and accepted drafts of each answer."""

    rounds_A: NDArray[np.float64]
    accepted_AS: NDArray[np.float64]

    @property
    def acceptance_length(self) -> float:
        """Tokens per verification, pooled."""
        return float(1 + self.accepted_AS.sum() / max(1e-9, self.rounds_A.sum()))

    def __add__(self, other: "ExpectedRounds") -> "ExpectedRounds":
        return ExpectedRounds(
            rounds_A=np.concatenate([self.rounds_A, other.rounds_A]),
            accepted_AS=np.concatenate([self.accepted_AS, other.accepted_AS]),
        )


def expect_rounds(batch: TrainingBatch, chance_SM: Tensor) -> ExpectedRounds:
    """Expected rounds of every answer of a batch, given the acceptance probability of each draft.

    Exact: the probability that a round begins at a row is passed on to the rows where the next round may begin.
    """
    depths = len(chance_SM)
    chances = chance_SM.double().cpu().numpy()
    answers = list(pairwise(answer_borders(batch)))
    longest = max((end - first for first, end in answers), default=0)
    chance_SAL = np.zeros((depths, len(answers), longest + depths))
    inside_AL = np.zeros((len(answers), longest + depths))
    for answer, (first, end) in enumerate(answers):
        chance_SAL[:, answer, : end - first] = chances[:, first:end]
        inside_AL[answer, : end - first] = 1.0
    begins_AL = np.zeros((len(answers), longest + depths + 1))
    begins_AL[:, 0] = 1.0
    rounds_A, accepted_AS = np.zeros(len(answers)), np.zeros((len(answers), depths))
    for row in range(longest):
        goes_on_A = begins_AL[:, row] * inside_AL[:, row]
        rounds_A += goes_on_A
        for depth in range(depths):
            here = row + depth
            # Nothing is drafted behind the end of an answer, and no round begins there.
            goes_on_A = goes_on_A * inside_AL[:, here]
            accepted_A = goes_on_A * chance_SAL[depth, :, here]
            accepted_AS[:, depth] += accepted_A
            begins_AL[:, here + 1] += goes_on_A - accepted_A
            goes_on_A = accepted_A
        begins_AL[:, row + depths + 1] += goes_on_A
    return ExpectedRounds(rounds_A=rounds_A, accepted_AS=accepted_AS)
