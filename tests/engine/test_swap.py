"""Swapping the drafter between steps: no request is lost, no token changes, and a refused swap changes nothing."""

from __future__ import annotations

import weakref
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any

import pytest
import torch

from each import each
from engine.common import OFF, Prompts, at_depth, options, request, run, tokens_of
from engine.round_engines import graphs_of, round_engine
from eyas.drafter.model import Drafter
from eyas.engine.engine import Engine
from eyas.engine.kv_cache import cache
from eyas.engine.request import Request, Speculation
from eyas.engine.speculation.draft import Tree
from eyas.errors import UserError
from eyas.sampling import Sampling
from tiny import drafter_config, language, random_drafter

if TYPE_CHECKING:
    from eyas.target.model import Target


@pytest.fixture(scope="module")
def other() -> Drafter:
    """A drafter with other layers and other blocks that is never right."""
    return random_drafter(drafter_config(fc_norm=False, norm_output=False, aux_layer_ids=(0, 1, 2)))


@pytest.fixture(scope="module")
def asked() -> list[Request]:
    prompts = [
        tuple(row[: 5 + 3 * i]) for i, row in enumerate(language(8, 40, torch.Generator().manual_seed(3)).tolist())
    ]
    ways = [OFF, at_depth(3), Speculation(), at_depth(2)]
    chance = Sampling(temperature=0.9, top_p=0.9)
    return [
        request(
            prompt, speculation=ways[i % 4], max_new_tokens=24, sampling=chance if i % 3 == 2 else Sampling(), seed=i
        )
        for i, prompt in enumerate(prompts)
    ]


def run_with_swaps(engine: Engine, asked: list[Request], swaps: dict[int, Drafter | None]) -> Prompts:
    """Answers, with another drafter after steps of these numbers."""
    steps, last = count(1), 0

    def swap() -> None:
        nonlocal last
        last = next(steps)
        if last in swaps:
            engine.swap_drafter(swaps[last])
            engine.scheduler.check()

    answers = run(engine, asked, after_step=swap)
    assert last > max(swaps, default=0), "the last swap came while there was work"
    return tokens_of(answers)


@pytest.fixture(scope="module")
def expected(target: Target, asked: list[Request]) -> Prompts:
    return run_with_swaps(Engine(target, config=options()), [replace(one, speculation=OFF) for one in asked], {})


@each("tree", [None, Tree(depth=3, width=2, budget=6)])
@each("prefix_cache", [True, False])
def test_requests_under_way_continue_as_if_nothing_had_happened(
    target: Target,
    tiny_drafter: Drafter,
    other: Drafter,
    asked: list[Request],
    expected: Prompts,
    tree: Tree | None,
    prefix_cache: bool,
) -> None:
    engine = Engine(target, tiny_drafter, config=options(tree=tree, prefix_cache=prefix_cache))
    swaps = {2: other, 4: None, 6: tiny_drafter, 7: other, 9: tiny_drafter}
    assert run_with_swaps(engine, asked, swaps) == expected
    before = engine.stats.accepted
    assert run_with_swaps(engine, asked, {}) == expected, "cached prefixes are right for the new drafter"
    assert engine.stats.accepted > before


def test_graphs_are_captured_again(
    target: Target, tiny_drafter: Drafter, other: Drafter, asked: list[Request], expected: Prompts
) -> None:
    engine = round_engine(target, tiny_drafter, options())
    assert run_with_swaps(engine, asked, {3: other, 6: None, 9: tiny_drafter}) == expected
    first = graphs_of(engine)
    assert len(first) > 0
    engine.swap_drafter(other)
    assert graphs_of(engine) is not first
    assert len(graphs_of(engine)) == 0
    del first
    engine = round_engine(target, tiny_drafter, options(max_num_seqs=4))
    ahead = engine.capture_graphs()
    freed, before = weakref.ref(graphs_of(engine)), engine.controller.costs
    engine.swap_drafter(other)
    assert freed() is None, "the old graphs are freed"
    assert len(graphs_of(engine)) == ahead, "what was captured ahead is captured ahead again"
    costs = engine.controller.costs
    assert costs is not before
    assert all(costs.at(1, depth) for depth in engine.core.runner.shapes.depths), "and steps are timed"
    assert run_with_swaps(engine, asked, {3: tiny_drafter, 6: other}) == expected, "also while requests wait"
    assert len(graphs_of(engine)) >= ahead
    engine.swap_drafter(None)
    assert 0 < len(graphs_of(engine)) < ahead


def test_a_cpu_rehearses_again_and_acceptance_is_learned_again(
    target: Target, tiny_drafter: Drafter, other: Drafter, asked: list[Request]
) -> None:
    engine = Engine(target, tiny_drafter, config=options(capture_ahead=True))
    engine.swap_drafter(other)
    assert engine.controller.costs.at(1, 1) is not None
    engine = Engine(target, tiny_drafter, config=options())
    run_with_swaps(engine, asked, {})
    assert engine.controller.report()["rounds"] > 0
    engine.swap_drafter(other)
    assert engine.controller.report()["rounds"] == 0
    assert engine.controller.costs.at(1, 1) is None, "no rehearsal unless requested"


@each(
    ("wrong", "reason"),
    [
        (lambda: random_drafter(drafter_config(vocab_size=200)), "vocab_size is 200"),
        (lambda: random_drafter(drafter_config(target_hidden_size=128)), "target_hidden_size is 128"),
        (lambda: random_drafter(drafter_config(aux_layer_ids=(1, 2, 77))), "layer 77"),
        (lambda: random_drafter(drafter_config()).to(torch.bfloat16), "bfloat16"),
    ],
)
def test_a_drafter_that_does_not_fit_changes_nothing(
    target: Target, tiny_drafter: Drafter, asked: list[Request], expected: Prompts, wrong: Any, reason: str
) -> None:
    engine = Engine(target, tiny_drafter, config=options())
    kept = engine.proposer, engine.controller
    with pytest.raises(UserError, match=reason):
        engine.swap_drafter(wrong())
    assert (engine.proposer, engine.controller) == kept
    assert run_with_swaps(engine, asked, {}) == expected


def test_a_drafter_without_room_is_refused(
    target: Target, tiny_drafter: Drafter, other: Drafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(target, tiny_drafter, config=options())
    kept = engine.proposer
    monkeypatch.setattr(cache, "free_bytes", lambda device: 1000)
    with pytest.raises(UserError, match=r"MiB.*free"):
        engine.swap_drafter(other)
    assert engine.proposer is kept
