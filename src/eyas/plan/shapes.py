"""Shapes of drafts: chains, trees, and chains that the host looks up. No torch."""

from dataclasses import dataclass
from functools import cache
from typing import Literal

MARGIN = 1.02
"""Speculation must promise this many times the tokens per second of plain decoding."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Shape of a request's drafts: a chain, a tree of at most `budget` tokens, or a chain that the host looks up."""

    kind: Literal["chain", "tree", "suffix"] = "chain"
    depth: int = 0
    """Depth of a tree or of a lookup; chains have depths of their own."""
    width: int = 1
    """Candidates of a node, and nodes of a depth that get any."""
    budget: int = 0
    """Tokens of a tree that are verified; a chain has its depth."""


CHAIN = Shape()
CAPTURED_TREES = tuple(
    Shape(kind="tree", depth=depth, width=width, budget=budget) for depth, width, budget in ((3, 3, 7), (5, 4, 15))
)
"""Trees for which passes are captured: few, since each takes some twenty CUDA graphs. With the newest token they have 8
and 16 tokens, as many as a pass reads in the time of one."""
CAPTURED_TREE_ROWS = 4
"""The largest batch for which trees are captured."""
OFFERED = 15
"""The deepest chain that the host looks up: it takes no pass of a drafter, and with the newest token has as many tokens
as a pass reads in the time of one."""


@cache
def offered(depth: int) -> Shape:
    """Shape of a chain of this depth that the host looks up."""
    return Shape(kind="suffix", depth=depth)
