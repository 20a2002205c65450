"""Where an answer with drafts leaves the plain one, and how far apart the target holds the two tokens there.

Every token is the target's own choice. In half precision its logits move by a rounding with the number of tokens in a
pass, so two tokens that are nearly equally likely may change places. The margin tells that from a defect: the target's
own code, in one pass over the text before the place, scores both tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from eyas.target.model import Target


@dataclass(frozen=True)
class Parting:
    """The first place where two answers to a prompt differ."""

    at: int
    """The number of answer tokens before it."""
    margin: float
    """The target's logit of the plain answer's token less that of the other."""


def first_difference(plain: Sequence[int], other: Sequence[int]) -> int | None:
    """The place of the first token in which both differ; None if one is the beginning of the other."""
    return next((at for at, (ours, theirs) in enumerate(zip(plain, other, strict=False)) if ours != theirs), None)


@torch.no_grad()
def find_parting(target: Target, prompt: Sequence[int], plain: Sequence[int], other: Sequence[int]) -> Parting | None:
    """Where two answers to a prompt part, if they do."""
    at = first_difference(plain, other)
    if at is None:
        return None
    ids_BT = torch.tensor([[*prompt, *plain[:at]]], device=target.device)
    logits_BTV = target.model(input_ids=ids_BT, use_cache=False, logits_to_keep=1).logits
    kept, turned = logits_BTV[0, -1, [plain[at], other[at]]].double().tolist()
    return Parting(at=at, margin=kept - turned)
