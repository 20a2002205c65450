"""Rounds on a real device, captured or not, asynchronous or not: answers equal those of eager, synchronous steps.

The tests are those of tests/engine/test_rounds.py, over engines on a GPU.
"""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import engine.test_rounds as test_rounds
from engine.common import options
from engine.test_rounds import (  # noqa: F401  tests and fixtures are used by name
    test_after_a_failed_step_others_are_served,
    test_chains_of_every_depth,
    test_chunks_blocks_and_prefixes,
    test_depths_that_change_and_requests_that_come_and_go,
    test_drafters_come_and_go,
    test_drafters_of_two_layers,
    test_drift_check_ups_change_nothing,
    test_eagle1_drafters,
    test_logprobs_ends_and_shortest_lengths,
    test_long_rests_are_caught_up_on,
    test_preempted_requests,
    test_prefixes_found_later_are_right,
    test_without_a_drafter,
)
from eyas.drafter.model import Drafter
from eyas.engine.config import EngineConfig
from eyas.engine.engine import Engine
from eyas.target.model import Target

pytestmark = pytest.mark.gpu


class EagerEngine(Engine):
    """The reference: nothing is captured, and each step lands before the next is launched."""

    def __init__(self, *given: Any, config: EngineConfig) -> None:
        super().__init__(*given, config=replace(config, graphs=False, async_scheduling=False))


@pytest.fixture(autouse=True)
def _expected_by_eager_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_rounds, "Engine", EagerEngine)


@pytest.fixture(scope="module")
def tiny_drafter(tiny_drafter: Drafter) -> Drafter:
    return copy.deepcopy(tiny_drafter).cuda()


@pytest.fixture(params=["captured", "uncaptured", "synchronous"])
def build(request: pytest.FixtureRequest) -> Callable[..., Engine]:
    """Makes engines of one kind of steps."""

    def made(target: Target, drafter: Drafter | None, **changes: Any) -> Engine:
        kind = {"graphs": request.param != "uncaptured", "async_scheduling": request.param != "synchronous"}
        return Engine(target, drafter, config=options(**kind, **changes))

    return made
