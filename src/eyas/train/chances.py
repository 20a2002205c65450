"""How likely each draft for a text is accepted, by every rule that servers have: estimates for any temperature.

At temperature 0 a draft is right or it is not. At temperature 1 the text is one sample of the target's, and given that
its token is x, with p and q the target's and the drafter's distributions there, a draft is accepted with probability

    race        1 / sum over v of max(p(v), q(v) p(x) / q(x))   both race against the same noise, as eyas does: x wins
                                                                p's race and q's with 1 / sum of max(p / p(x), q / q(x))
    rejection   min(1, q(x) / p(x))                             drawn from q, kept with min(1, p / q)
    guess       1 if x is the most likely token of q, else 0    the most likely draft, whatever the temperature

All three are exact on the given text. Texts must come from the target at the temperature that is asked about.

Shapes: S depths, M teacher rows (batch.py), D drafter state, W and V draft and target vocabulary, C rows of a chunk.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from eyas.drafter.model import Drafter
from eyas.train.attention import attention_for
from eyas.train.batch import TrainingBatch
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
    """Chances [S, M] by rule: `GREEDY`, for text of temperature 0, and `SAMPLED`, for text of temperature 1.

    Depth k of row m is the draft of a round that began k rows before it. Where that is in no answer it says nothing.
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
        said = teacher.distribution(row_C)
        place_C = place_V[batch.ids_T[row_C + 1]]
        for depth in range(depths):
            logits_CW = normed_SMD[depth][(number_C - depth).clamp(min=0)] @ head_WD.T * scale
            for rule, chance_C in _chances(logits_CW, said, place_C, target_ids_W).items():
                found[rule][depth].append(chance_C)
    empty = number_M.new_zeros(0, dtype=torch.float32)
    return {rule: torch.stack([torch.cat([empty, *own]) for own in by_depth]) for rule, by_depth in found.items()}


def _chances(logits_CW: Tensor, said: TargetDistribution, place_C: Tensor, target_ids_W: Tensor) -> dict[str, Tensor]:
    """Chances of one depth; `place_C` is where the text's token stands in the draft vocabulary, below 0: nowhere."""
    log_q_CW = logits_CW.float().log_softmax(dim=-1)
    q_CW, p_CW = log_q_CW.exp(), said.probabilities(log_q_CW)
    index_C1 = place_C.clamp(min=0)[:, None]
    own_q_C, own_p_C = (x_CW.gather(-1, index_C1)[:, 0].clamp(min=_LEAST) for x_CW in (q_CW, p_CW))
    # Tokens that cannot be drafted run for p alone.
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
