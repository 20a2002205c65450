"""Scripted targets and drafters, and random draws that take every turn: decoding laws are computed, not estimated."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result", bound=Hashable)
IMPOSSIBLE = float("-inf")
ROUNDING = 1e-12


def random_table(vocab: int, seed: int, *, spread: float = 1.5) -> Tensor:
    """Logits [V, V, V] of the next token after the last two, in float64."""
    generator = torch.Generator().manual_seed(seed)
    return spread * torch.randn(vocab, vocab, vocab, generator=generator, dtype=torch.float64)


def constant_table(*probabilities: float) -> Tensor:
    """The same distribution behind every context."""
    size = len(probabilities)
    return torch.tensor(probabilities, dtype=torch.float64).log().expand(size, size, size)


@dataclass(frozen=True)
class ScriptedTarget:
    """The last two tokens decide the next. Auxiliary states are the tokens, so that a drafter can check them."""

    table: Tensor

    def __call__(self, sequences: Sequence[Sequence[int]]) -> list[tuple[Tensor, Tensor]]:
        outputs = []
        for ids in sequences:
            logits_TV = self.table[[ids[0], *ids[:-1]], list(ids)]
            outputs.append((logits_TV, torch.tensor(ids)[:, None]))
        return outputs


@dataclass(frozen=True)
class ScriptedDrafter:
    """A drafter with a table like the target's. Its state is the text so far."""

    table: Tensor

    def start(self, ids: Sequence[int], aux_TX: Tensor) -> tuple[int, ...]:
        assert aux_TX[:, 0].tolist() == list(ids[:-1]), "the states of every token but the newest"
        return tuple(ids)

    def extend(self, state: tuple[int, ...], token: int) -> tuple[int, ...]:
        return (*state, token)

    def logits(self, state: tuple[int, ...]) -> Tensor:
        return self.table[state[-2] if len(state) > 1 else state[0], state[-1]]


@dataclass
class Replay:
    """Takes given turns, then the first possible one at each fork; records the forks."""

    turns: Sequence[int]
    taken: list[int] = field(default_factory=list)
    forks: list[int] = field(default_factory=list)
    weight: float = 1.0

    def coin(self, probability: float) -> bool:
        assert 0 <= probability <= 1
        return self._turn([(True, probability), (False, 1 - probability)])

    def pick(self, p_V: Tensor) -> int:
        assert abs(float(p_V.sum()) - 1) < 1e-9, "a distribution"
        return self._turn(list(enumerate(p_V.tolist())))

    def _turn(self, outcomes: Sequence[tuple[int, float]]) -> int:
        possible = [(outcome, p) for outcome, p in outcomes if p > ROUNDING]
        at = len(self.taken)
        turn = self.turns[at] if at < len(self.turns) else 0
        self.taken.append(turn)
        self.forks.append(len(possible))
        self.weight *= possible[turn][1]
        return possible[turn][0]


def exact_law(run: Callable[[Replay], Result]) -> dict[Result, float]:
    """The distribution of what `run` returns, by depth-first search through every random turn."""
    law: dict[Result, float] = defaultdict(float)
    turns: list[int] = []
    while True:
        replay = Replay(turns)
        law[run(replay)] += replay.weight
        turns, forks = replay.taken, replay.forks
        while turns and turns[-1] + 1 == forks[-1]:
            turns.pop()
            forks.pop()
        if not turns:
            return dict(law)
        turns[-1] += 1


def deviation(law: dict[Result, float], other: dict[Result, float]) -> float:
    """The largest difference in the probability of any outcome."""
    return max(abs(law.get(outcome, 0.0) - other.get(outcome, 0.0)) for outcome in law.keys() | other.keys())
