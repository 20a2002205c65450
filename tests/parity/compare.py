"""Our drafter held against what vLLM proposed, and against itself with one flag flipped."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from eyas.drafter.eagle1_model import new_drafter
from eyas.drafter.model import Drafter
from oracle.dense import EagleDraft

NEAR_TIE = 1e-4


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """How many proposals were equal in every token."""

    equal: int
    comparable: int
    """Proposals without a near-tie: there, rounding decides and neither side is wrong."""
    near_ties: int

    @property
    def share(self) -> float:
        return self.equal / self.comparable


def propose(drafter: EagleDraft, ids: Sequence[int], aux_TX: Tensor, depth: int) -> tuple[list[int], float]:
    """Our greedy chain behind ids, and the smallest margin between best and second-best score on the way."""
    state = drafter.start(ids, aux_TX[: len(ids) - 1])
    tokens: list[int] = []
    margin = float("inf")
    while True:
        best = drafter.logits(state).topk(2)
        margin = min(margin, float(best.values[0] - best.values[1]))
        tokens.append(int(best.indices[0]))
        if len(tokens) == depth:
            return tokens, margin
        state = drafter.extend(state, tokens[-1])


def agreement(drafter: Drafter, record: dict[str, Any], aux: Sequence[Tensor], depth: int) -> Agreement:
    """Compare proposal by proposal, on states of our own making."""
    ours = EagleDraft(drafter)
    equal = comparable = near_ties = 0
    for proposals, aux_TX in zip(record["proposals"], aux, strict=True):
        for ids, drafts in sequences(proposals):
            if len(ids) - 1 > len(aux_TX):
                continue  # proposed behind the last token that was asked for; nobody verified it
            tokens, margin = propose(ours, ids, aux_TX, depth)
            if tokens != drafts and margin < NEAR_TIE:
                near_ties += 1
                continue
            comparable += 1
            equal += tokens == drafts
    return Agreement(equal=equal, comparable=comparable, near_ties=near_ties)


def sequences(proposals: Sequence[dict[str, Any]]) -> list[tuple[list[int], list[int]]]:
    """For each proposal of one sequence: the ids it stands behind, the newest included, and its drafts."""
    known: dict[int, int] = {}
    result = []
    for entry in proposals:
        known |= dict(zip(entry["positions"], entry["tokens"], strict=True))
        verified = [known[position] for position in range(entry["positions"][-1] + 1)]
        result.append(([*verified, entry["next"]], entry["drafts"]))
    return result


def flipped(drafter: Drafter, flag: str) -> Drafter:
    """The same weights under the opposite flag: a norm that is dropped, or one that appears with unit weights."""
    config = replace(drafter.config, **{flag: not getattr(drafter.config, flag)})
    other = new_drafter(config, own_embedding=drafter.embed_tokens is not None, own_head=drafter.lm_head is not None)
    other.load_state_dict(drafter.state_dict(), strict=False)
    return other.eval().requires_grad_(False)


def relative_difference(ours_TD: Tensor, theirs_TD: Tensor) -> float:
    """The largest distance between two state vectors, in units of the vector's own length.

    Single elements are no measure: a state of the default target holds values from 1e-3 to 2.5e4 side by side, and
    float32 rounds what passes through the large ones.
    """
    return float(((ours_TD - theirs_TD).norm(dim=-1) / theirs_TD.norm(dim=-1)).max())
