"""How much of the target a drafter still carries: evidence besides acceptance.

Drafters mostly start from the target's own head rows and embeddings. Where they do, each row of the draft head
resembles the row of the target token it stands for; a table of ids that is wrong, or another target, breaks that.

Shapes: V target vocabulary, W draft vocabulary, D hidden, N sampled rows.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from eyas.drafter.model import Drafter
from eyas.target.model import Target

SAMPLED = 512
CHUNK = 512


@dataclass(frozen=True, kw_only=True)
class Resemblance:
    """Median cosines; None where there is nothing to compare."""

    embedding: float | None
    """Shipped embeddings against the target's, row by row."""
    head: float | None
    """Rows of the draft head against the target's rows they stand for by d2t."""
    head_best: float | None
    """The same against the most similar row of the target, whichever it is."""
    head_agreement: float | None
    """Share of the sampled rows whose most similar row is the one that d2t names."""


@torch.inference_mode()
def measure_resemblance(drafter: Drafter, target: Target) -> Resemblance:
    """Compare what the drafter ships with what the target has."""
    embedding = head = best = agreement = None
    if not drafter.shares_embedding and drafter.embed_tokens is not None:
        ours_VD, theirs_VD = drafter.embed_tokens.weight, target.embedding()
        if ours_VD.shape == theirs_VD.shape:
            embedding = float(functional.cosine_similarity(ours_VD.float(), theirs_VD.float(), dim=-1).median())
    if not drafter.shares_head and drafter.lm_head is not None:
        ours_WD, theirs_VD = drafter.lm_head.weight, target.head()
        if ours_WD.shape[1] == theirs_VD.shape[1]:
            ids_W = drafter.vocab().target_ids_W
            rows_N = torch.linspace(0, len(ids_W) - 1, min(SAMPLED, len(ids_W)), device=ids_W.device).long()
            named = functional.cosine_similarity(ours_WD[rows_N].float(), theirs_VD[ids_W[rows_N]].float(), dim=-1)
            similar_N, index_N = _most_similar(ours_WD[rows_N], theirs_VD)
            head, best = float(named.median()), float(similar_N.median())
            agreement = float((index_N == ids_W[rows_N]).float().mean())
    return Resemblance(embedding=embedding, head=head, head_best=best, head_agreement=agreement)


@torch.inference_mode()
def vocabulary_by_head(drafter: Drafter, target: Target) -> Tensor | None:
    """Target ids [W] by the rows of the head; None where they do not tell."""
    if drafter.lm_head is None or drafter.lm_head.weight.shape[1] != target.head().shape[1]:
        return None
    similar_W, index_W = _most_similar(drafter.lm_head.weight, target.head())
    doubles = len(index_W) - len(torch.unique(index_W))
    return None if float(similar_W.median()) < 0.5 or doubles else index_W


def _most_similar(ours_ND: Tensor, theirs_VD: Tensor) -> tuple[Tensor, Tensor]:
    """The largest cosine of each row, and with which row of the target."""
    theirs = functional.normalize(theirs_VD.float(), dim=-1)
    found = [
        (functional.normalize(rows.float(), dim=-1) @ theirs.T).max(dim=-1) for rows in torch.split(ours_ND, CHUNK)
    ]
    return torch.cat([one.values for one in found]), torch.cat([one.indices for one in found])
