"""Rounds of trees on a real device, captured or not: answers equal those of trees in eager steps.

The tests are those of tests/engine/test_tree_rounds.py, over engines on a GPU.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest

import engine.test_tree_rounds as test_tree_rounds
from engine.common import options, request, run
from engine.test_tree_rounds import (  # noqa: F401  tests and fixtures are used by name
    TREE,
    test_chunks_blocks_windows_and_stops,
    test_drafters_of_two_layers,
    test_eagle1_drafters,
    test_preempted_requests,
    test_prefixes_found_later_are_right,
    test_trees_of_every_shape,
)
from eyas.drafter.model import Drafter
from eyas.engine.engine import Engine
from eyas.engine.output import RequestOutput
from eyas.engine.request import Speculation
from eyas.sampling import Sampling
from eyas.target.model import Target
from gpu.test_rounds_cuda import EagerEngine, build  # noqa: F401  fixtures are used by name

pytestmark = pytest.mark.gpu


def assert_alike(ours: list[RequestOutput], theirs: list[RequestOutput]) -> None:
    """Equal answers. Of nodes that are equally likely up to rounding, either may be verified."""
    assert [answer.tokens for answer in ours] == [answer.tokens for answer in theirs]
    accepted, expected = (sum(answer.stats.accepted for answer in answers) for answers in (ours, theirs))
    assert accepted == pytest.approx(expected, rel=0.03)


@pytest.fixture(autouse=True)
def _expected_by_eager_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_tree_rounds, "Engine", EagerEngine)
    monkeypatch.setattr(test_tree_rounds, "assert_same", assert_alike)


@pytest.fixture(scope="module")
def tiny_drafter(tiny_drafter: Drafter) -> Drafter:
    return copy.deepcopy(tiny_drafter).cuda()


@pytest.fixture
def with_rounds() -> Callable[..., Engine]:
    """Makes engines with captured passes and one step in flight."""

    def made(target: Target, drafter: Drafter, **changes: Any) -> Engine:
        return Engine(target, drafter, config=options(**changes))

    return made


def test_passes_of_trees_are_captured(target: Target, tiny_drafter: Drafter, prompts: list[tuple[int, ...]]) -> None:
    fixed = Speculation(mode="fixed", depth=3)
    asked = [
        request(prompt, seed=seed, speculation=fixed, sampling=Sampling(temperature=0.8 * (seed % 2)))
        for seed, prompt in enumerate(prompts)
    ]
    engine = Engine(target, tiny_drafter, config=options(tree=TREE, max_num_batched_tokens=256))
    ours = run(engine, asked)
    plain = run(
        Engine(target, config=options()), [request(one.prompt, seed=one.seed, sampling=one.sampling) for one in asked]
    )
    assert [answer.tokens for answer in ours] == [answer.tokens for answer in plain]
    assert sum(answer.stats.accepted for answer in ours) > 20
    capture = engine.core.runner.capture
    assert {"draft trees", "verify trees", "sample trees"} <= {key[0] for key in capture._replays}
    assert not capture.refused
