"""Speculative decoding in its plainest form: the oracle that fast code is tested against.

Every round runs the whole sequence again through target and drafter; nothing is cached between rounds, a tree is
verified path by path, and sequences are decoded one at a time. What it gains from speculation is therefore not
speed but certainty: each line is a line of the algorithm.

    draft   propose a tree of continuations (a chain is a tree with single children)
    verify  run the target over every path
    accept  walk from the root, `sampling.try_candidates` at each node
    commit  append the accepted path and one token of the target's own

Shapes: T tokens, V target vocabulary, X concatenated auxiliary states.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from eyas.errors import UserError
from eyas.sampling import Sampling
from oracle.rejection import Candidate, Draws, require_unshaped, try_candidates
from oracle.shaping import one_hot, probabilities

State = TypeVar("State")


class TargetModel(Protocol):
    """The target: next-token logits [T, V] and auxiliary states [T, X] of each given sequence."""

    def __call__(self, sequences: Sequence[Sequence[int]]) -> list[tuple[Tensor, Tensor]]:
        """Run sequences, each on its own."""
        ...


class DraftModel(Protocol[State]):
    """The drafter, as two functions over a state that may be branched freely."""

    def start(self, ids: Sequence[int], aux_TX: Tensor) -> State:
        """Read ids; `aux_TX` are the target's states of all but the newest."""
        ...

    def extend(self, state: State, token: int) -> State:
        """Go one depth further, along `token`."""
        ...

    def logits(self, state: State) -> Tensor:
        """Scores [V] of the next token; minus infinity for tokens that cannot be drafted."""
        ...


@dataclass(frozen=True, kw_only=True)
class Chain:
    """One candidate at each depth."""

    depth: int
    probabilistic: bool = False
    """Draw from the drafter's distribution instead of taking its most likely token."""

    def __post_init__(self) -> None:
        if self.depth < 0:
            raise UserError(f"depth {self.depth} is below 0; 0 is plain decoding")


@dataclass(frozen=True, kw_only=True)
class Tree:
    """The dynamic tree of EAGLE-2: `width` candidates per node, the `width` most confident nodes of a depth grow.

    Greedy candidates are cut to the `budget` most confident nodes at the end. Drawn candidates are not: dropping a
    token after looking at it would change the output distribution, so there the budget must hold the whole tree.
    """

    depth: int
    width: int
    budget: int
    probabilistic: bool = False

    def __post_init__(self) -> None:
        for name in ("depth", "width", "budget"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} of the tree is {getattr(self, name)}; it must be 1 or more")
        whole = self.width + (self.depth - 1) * self.width**2
        if self.probabilistic and self.budget < whole:
            raise UserError(
                f"a drawn tree of depth {self.depth} and width {self.width} has {whole} nodes, above the budget "
                f"{self.budget}; raise the budget or lower the width"
            )


@dataclass(eq=False)
class Node:
    """A drafted token in the tree. The root is the newest token of the sequence and was not drafted."""

    candidate: Candidate | None
    depth: int
    confidence: float
    """Product of the drafter's probabilities along the path."""
    children: list["Node"] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Round:
    """One draft and its verification."""

    drafted: tuple[tuple[int, ...], ...]
    """The paths that were offered, root to leaf."""
    accepted: int
    """Drafted tokens accepted; the round adds one more of the target's own."""


@dataclass(frozen=True, kw_only=True)
class Generation:
    """New tokens and how they came about."""

    tokens: tuple[int, ...]
    rounds: tuple[Round, ...]

    @property
    def acceptance_length(self) -> float:
        """Tokens per verification: 1 + accepted / drafts, pooled over rounds."""
        return 1 + sum(r.accepted for r in self.rounds) / max(1, len(self.rounds))


def decode_plainly(
    target: TargetModel,
    prompt: Sequence[int],
    *,
    draws: Draws,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    stop_ids: Collection[int] = (),
) -> tuple[int, ...]:
    """Decode without speculation; `decode_speculatively` must have the same distribution."""
    sampling = sampling or Sampling()
    require_unshaped(sampling, "the reference decoder")
    _require_tokens(prompt)
    ids = list(prompt)
    while len(ids) - len(prompt) < max_new_tokens:
        logits_TV, _ = target([ids])[0]
        ids.append(draws.pick(probabilities(logits_TV[-1], sampling)))
        if ids[-1] in stop_ids:
            break
    return tuple(ids[len(prompt) :])


def decode_speculatively(
    target: TargetModel,
    drafter: DraftModel[State],
    prompt: Sequence[int],
    *,
    shape: Chain | Tree,
    draws: Draws,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    stop_ids: Collection[int] = (),
) -> Generation:
    """Decode with speculation. Rounds are complete even where the last one overshoots; tokens are cut to fit."""
    sampling = sampling or Sampling()
    require_unshaped(sampling, "the reference decoder")
    _require_tokens(prompt)
    ids = list(prompt)
    logits_TV, aux_TX = target([ids])[0]
    ids.append(draws.pick(probabilities(logits_TV[-1], sampling)))
    rounds: list[Round] = []
    while not _finished(ids[len(prompt) :], max_new_tokens, stop_ids):
        root = draft(drafter, ids, aux_TX, shape, sampling, draws)
        new_ids, aux_TX = verify(target, ids, root, sampling, draws)
        drafted = tuple(tuple(_tokens(path)) for path in _paths(root))
        rounds.append(Round(drafted=drafted, accepted=len(new_ids) - 1))
        ids += new_ids
    return Generation(tokens=_cut(ids[len(prompt) :], max_new_tokens, stop_ids), rounds=tuple(rounds))


def draft(
    drafter: DraftModel[State],
    ids: Sequence[int],
    aux_TX: Tensor,
    shape: Chain | Tree,
    sampling: Sampling,
    draws: Draws,
) -> Node:
    """Grow a tree of candidates after the newest token."""
    width = shape.width if isinstance(shape, Tree) else 1
    root = Node(candidate=None, depth=0, confidence=1.0)
    if shape.depth == 0:
        return root
    growing = [(root, drafter.start(ids, aux_TX))]
    everyone: list[Node] = []
    for depth in range(1, shape.depth + 1):
        grown: list[tuple[Node, State]] = []
        for parent, state in growing:
            logits_V = drafter.logits(state)
            confidence_V = logits_V.float().softmax(dim=-1)
            if shape.probabilistic:
                candidates = _draw_candidates(probabilities(logits_V, sampling), width, draws)
            else:
                candidates = _best_candidates(logits_V, width)
            for candidate in candidates:
                confidence = parent.confidence * float(confidence_V[candidate.token])
                child = Node(candidate=candidate, depth=depth, confidence=confidence)
                parent.children.append(child)
                grown.append((child, state))
        everyone += [child for child, _ in grown]
        if depth < shape.depth:
            # Which nodes grow depends on tokens already drawn only, so drawn candidates stay lossless.
            grown.sort(key=lambda pair: -pair[0].confidence)
            growing = [(child, drafter.extend(state, _token(child))) for child, state in grown[:width]]
    if isinstance(shape, Tree) and not shape.probabilistic:
        # Stable, and a child is never more confident than its parent, so what is kept is a tree.
        kept = set(sorted(everyone, key=lambda node: (-node.confidence, node.depth))[: shape.budget])
        for node in [root, *everyone]:
            node.children = [child for child in node.children if child in kept]
    return root


def _best_candidates(logits_V: Tensor, width: int) -> list[Candidate]:
    possible = min(width, int(logits_V.isfinite().sum()))
    tokens = logits_V.topk(possible).indices
    return [
        Candidate(token=int(token), q_V=one_hot(token, len(logits_V), torch.float32).to(logits_V.device))
        for token in tokens
    ]


def _draw_candidates(q_V: Tensor, width: int, draws: Draws) -> list[Candidate]:
    """Sample siblings without replacement, each from the rest of q."""
    candidates: list[Candidate] = []
    for _ in range(width):
        total = q_V.sum()
        if not total > 0:
            break
        q_V = q_V / total
        token = draws.pick(q_V)
        candidates.append(Candidate(token=token, q_V=q_V))
        q_V = q_V.clone()
        q_V[token] = 0
    return candidates


def verify(
    target: TargetModel, ids: Sequence[int], root: Node, sampling: Sampling, draws: Draws
) -> tuple[list[int], Tensor]:
    """Accepted tokens plus one of the target, and the target's states of all tokens before it."""
    paths = _paths(root)
    outputs = target([[*ids, *_tokens(path)] for path in paths])
    node, accepted = root, list[Node]()
    while True:
        # Any path through the node will do: the target is causal, so all give the same distribution behind it.
        row = next(i for i, path in enumerate(paths) if path[: len(accepted)] == accepted)
        logits_TV, aux_TX = outputs[row]
        here = len(ids) + len(accepted)
        p_V = probabilities(logits_TV[here - 1], sampling)
        candidates = [child.candidate for child in node.children if child.candidate is not None]
        index, p_V = try_candidates(p_V, candidates, draws)
        if index is None:
            return [*_tokens(accepted), draws.pick(p_V)], aux_TX[:here]
        node = node.children[index]
        accepted.append(node)


def _paths(root: Node) -> list[list[Node]]:
    """Root-to-leaf paths without the root; a lone root has the empty path."""
    if not root.children:
        return [[]]
    return [[child, *path] for child in root.children for path in _paths(child)]


def _tokens(path: Sequence[Node]) -> list[int]:
    return [_token(node) for node in path]


def _token(node: Node) -> int:
    assert node.candidate is not None, "the root is no candidate"
    return node.candidate.token


def _require_tokens(prompt: Sequence[int]) -> None:
    if not prompt:
        raise UserError("the prompt has 0 tokens; give at least 1")


def _finished(new: Sequence[int], max_new_tokens: int, stop_ids: Collection[int]) -> bool:
    return len(new) >= max_new_tokens or any(token in stop_ids for token in new)


def _cut(new: Sequence[int], max_new_tokens: int, stop_ids: Collection[int]) -> tuple[int, ...]:
    stops = [i for i, token in enumerate(new) if token in stop_ids]
    return tuple(new[: min([max_new_tokens, *(i + 1 for i in stops)])])
