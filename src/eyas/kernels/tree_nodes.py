"""The draft trees of a round, in device memory: candidates while they grow, then the nodes to verify.

Trees are those of EAGLE-2 in a fixed shape. Candidates come in groups of `width`: group 0 after the request's newest
token, group 1 + e after the node that was expanded e-th. At every depth but the last, `width` nodes are expanded, so
candidate r of group g has the number g * width + r in every tree, and numbers ascend with depth. Rows with fewer slots
grow less deep and keep fewer nodes: unused candidates have the path -1.

    token, sure, path   of candidates: the token, the drafter's probability of it after its parent, and the product of
                        these along its path, where each counts for at least as much as any later sibling
    grown, grown_sees   the number of each expanded node, and the expanded nodes that it sees, itself included, as bits
    kept ...            the newest token and the nodes to verify, in order of their numbers, as `places` from 0 on:
                        tokens, parents (places), depths, the places they see (bits), and the group of their children,
                        -1 if not expanded
    kept_count          nodes to verify, without the newest token

Shapes: R rows, G groups, W their candidates, F = G * W, E grown nodes, B budget, Q = 1 + B, X concatenated auxiliary
states.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class TreeNodes:
    """Trees of one shape. Integers are int64."""

    depth: int
    width: int
    budget: int
    token_RGW: Tensor
    sure_RGW: Tensor
    """float32."""
    path_RGW: Tensor
    """float64."""
    grown_RE: Tensor
    grown_sees_RE: Tensor
    kept_token_RQ: Tensor
    kept_parent_RQ: Tensor
    kept_depth_RQ: Tensor
    kept_sees_RQ: Tensor
    kept_group_RQ: Tensor
    kept_count_R: Tensor
    states_NX: Tensor | None
    """Hidden states of the target, at the places of all rows: N = R * Q."""

    @classmethod
    def of(
        cls, rows: int, *, depth: int, width: int, budget: int, device: torch.device, states_like: Tensor | None
    ) -> "TreeNodes":
        """Allocate trees whose budget is at most the number of candidates."""
        groups, places = 1 + (depth - 1) * width, 1 + budget
        assert budget <= groups * width, "no more nodes than candidates"

        def integers(*shape: int) -> Tensor:
            return torch.zeros(rows, *shape, dtype=torch.int64, device=device)

        return cls(
            depth=depth,
            width=width,
            budget=budget,
            token_RGW=integers(groups, width),
            sure_RGW=torch.zeros(rows, groups, width, device=device),
            path_RGW=torch.zeros(rows, groups, width, dtype=torch.float64, device=device),
            grown_RE=integers(groups - 1),
            grown_sees_RE=integers(groups - 1),
            kept_token_RQ=integers(places),
            kept_parent_RQ=integers(places),
            kept_depth_RQ=integers(places),
            kept_sees_RQ=integers(places),
            kept_group_RQ=integers(places),
            kept_count_R=integers(),
            states_NX=None if states_like is None else states_like.new_zeros(rows * places, states_like.shape[-1]),
        )

    @property
    def bytes(self) -> int:
        return sum(x.nbytes for x in vars(self).values() if isinstance(x, Tensor))

    def groups_of(self, depth: int) -> slice:
        """The groups with candidates of a depth, from 1 on."""
        return slice(0, 1) if depth == 1 else slice(1 + (depth - 2) * self.width, 1 + (depth - 1) * self.width)
