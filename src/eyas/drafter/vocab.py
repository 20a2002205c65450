"""The draft vocabulary: the target tokens that the drafter can propose.

On disk `d2t` is an OFFSET: draft id i is target id i + d2t[i]. Absolute ids would draft garbage without an error, so
only this file reads and writes `d2t`.
"""

import torch
from torch import Tensor

from eyas.errors import UserError


class DraftVocab:
    """Maps draft ids to target ids and draft distributions to target distributions."""

    def __init__(self, target_ids_W: Tensor, vocab_size: int) -> None:
        self.target_ids_W = target_ids_W
        self.vocab_size = vocab_size

    @classmethod
    def from_offsets(cls, d2t_W: Tensor, vocab_size: int) -> "DraftVocab":
        """Read `d2t` as a checkpoint stores it; refuses what cannot be a table of offsets."""
        check_offsets(d2t_W, vocab_size)
        return cls(d2t_W + torch.arange(len(d2t_W), device=d2t_W.device), vocab_size)

    @classmethod
    def identity(cls, vocab_size: int, device: torch.device) -> "DraftVocab":
        return cls(torch.arange(vocab_size, device=device), vocab_size)

    def to_target(self, draft_ids: Tensor) -> Tensor:
        return self.target_ids_W[draft_ids]

    def scatter(self, values_W: Tensor, fill: float) -> Tensor:
        """Scatter [..., W] into the target vocabulary [..., V]; other tokens get `fill`."""
        values_V = values_W.new_full((*values_W.shape[:-1], self.vocab_size), fill)
        values_V[..., self.target_ids_W] = values_W
        return values_V


def offsets_from_target_ids(target_ids_W: Tensor) -> Tensor:
    """Return `d2t` for these target ids, which must ascend."""
    return target_ids_W - torch.arange(len(target_ids_W), device=target_ids_W.device)


def membership_from_target_ids(target_ids_W: Tensor, vocab_size: int) -> Tensor:
    """Return `t2d`: whether each target id can be drafted."""
    t2d_V = torch.zeros(vocab_size, dtype=torch.bool, device=target_ids_W.device)
    t2d_V[target_ids_W] = True
    return t2d_V


def check_offsets(d2t_W: Tensor, vocab_size: int) -> None:
    """Refuse a table that holds absolute ids, points outside the vocabulary, or maps two draft ids to one token."""
    target_ids_W = d2t_W + torch.arange(len(d2t_W), device=d2t_W.device)
    lowest, highest = int(target_ids_W.min()), int(target_ids_W.max())
    in_range = lowest >= 0 and highest < vocab_size
    if _ascending_ids(d2t_W, vocab_size) and (not in_range or len(d2t_W) ** 2 > 20 * vocab_size):
        # Two neighbouring tokens in the vocabulary have equal offsets. A random choice of W among V tokens has about
        # W^2 / V neighbours, so with more than a few expected, a strictly ascending table must hold ids.
        raise UserError(
            f"d2t holds absolute target ids ({int(d2t_W[0])} .. {int(d2t_W[-1])}, all ascending); it must hold "
            "offsets, target id minus draft id: subtract arange(draft_vocab_size) from it"
        )
    if not in_range:
        raise UserError(
            f"d2t maps to target id {highest if highest >= vocab_size else lowest}, outside 0..{vocab_size - 1}; "
            "rebuild d2t for this target's vocabulary"
        )
    doubles = len(target_ids_W) - len(torch.unique(target_ids_W))
    if doubles:
        raise UserError(
            f"d2t maps {doubles} draft ids to a token that another one has; each must be unique: rebuild d2t"
        )


def _ascending_ids(d2t_W: Tensor, vocab_size: int) -> bool:
    return bool((d2t_W.diff() > 0).all()) and int(d2t_W.min()) >= 0 and int(d2t_W.max()) < vocab_size
