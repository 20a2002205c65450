"""First difference between an answer with drafts and the plain one, and the target's logit margin there.

Every token is the target's own choice. In half precision, logits differ by rounding with the number of tokens in a
pass, so two tokens that are nearly equally likely may swap. The margin tells this from a defect: it is computed by the
target's own code in one pass over the text before the difference.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from eyas.target.model import Target


@dataclass(frozen=True)
class Parting:
    """The first difference between two answers to a prompt."""

    at: int
    margin: float
    """The target's logit of the plain answer's token minus that of the other."""


def first_difference(plain: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first token that differs; None if one answer is a prefix of the other."""
    return next((at for at, (ours, theirs) in enumerate(zip(plain, other, strict=False)) if ours != theirs), None)


@torch.no_grad()
def find_parting(target: Target, prompt: Sequence[int], plain: Sequence[int], other: Sequence[int]) -> Parting | None:
    """The first difference between two answers to a prompt, if there is one."""
    at = first_difference(plain, other)
    if at is None:
        return None
    ids_BT = torch.tensor([[*prompt, *plain[:at]]], device=target.device)
    logits_BTV = target.model(input_ids=ids_BT, use_cache=False, logits_to_keep=1).logits
    kept, turned = logits_BTV[0, -1, [plain[at], other[at]]].double().tolist()
    return Parting(at=at, margin=kept - turned)
