"""Steps that were launched and have not landed, and what has to wait for them.

A device may work on one step while the host plans the next. What the step will do to a request is known within bounds
only (`Flight`), and until it has landed it may write any block that its requests owned when it was launched.

Invariant: a block or a slot of a request that left while a step was under way is nobody else's until every step
launched before it left has landed.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Generic, TypeVar

Step = TypeVar("Step")


@dataclass(frozen=True, slots=True)
class Flight:
    """What a launched step may do to a request that goes on behind it."""

    read: int
    """Tokens that the target surely reads: the chunk, or the newest token."""
    fewest: int
    """New tokens that are surely chosen: 1 if the tokens end with the newest, else 0."""
    most: int
    """New tokens with all drafts accepted. As many more tokens may be read as are chosen beyond the fewest."""


@cache
def flight_of(count: int, drafts: int, samples: bool) -> Flight:
    """The flight of a row; one object for all rows of a kind, since a step has hundreds of them."""
    return Flight(count, 1, 1 + drafts) if samples else Flight(count, 0, 0)


@dataclass(eq=False)
class _Launched(Generic[Step]):
    step: Step
    aside: list[tuple[list[int], int]] = field(default_factory=list)
    """Blocks and slot of each request that left while this was the newest step."""


class LaunchedSteps(Generic[Step]):
    """Launched steps, oldest first. They land in that order."""

    def __init__(self) -> None:
        self._steps: deque[_Launched[Step]] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[Step]:
        return (launched.step for launched in self._steps)

    @property
    def aside(self) -> list[tuple[list[int], int]]:
        """Blocks and slots that wait for a step to land."""
        return [entry for launched in self._steps for entry in launched.aside]

    def launch(self, step: Step) -> None:
        """A step is under way from now on."""
        self._steps.append(_Launched(step))

    def put_aside(self, blocks: list[int], slot: int) -> None:
        """Keep what a request gave up until the newest step has landed, and so all before it."""
        self._steps[-1].aside.append((blocks, slot))

    def land(self, step: Step) -> list[tuple[list[int], int]]:
        """The oldest step is over: the blocks and slots that nothing writes any more."""
        assert next(iter(self), None) is step, "steps land in the order in which they were launched"
        return self._steps.popleft().aside
