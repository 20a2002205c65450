"""Another drafter between two steps: no request is lost, no token changes, and a refused one leaves all as it was."""

from __future__ import annotations

import weakref
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from engine.round_engines import graphs_of, round_engine
from engine.test_engine import OFF, at_depth, options, request
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
def target(tiny_target: Target) -> Target:
    tokenizer: Any = SimpleNamespace(decode=lambda ids, **_: "".join(chr(ord("0") + token) for token in ids))
    return replace(tiny_target, tokenizer=tokenizer)


@pytest.fixture(scope="module")
def other() -> Drafter:
    """A drafter of other layers, other blocks and no use."""
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


def run_with_swaps(engine: Engine, asked: list[Request], swaps: dict[int, Drafter | None]) -> list[tuple[int, ...]]:
    """Answers, with another drafter before steps of these numbers."""
    keys = [engine.submit(one) for one in asked]
    tokens: dict[int, list[int]] = {key: [] for key in keys}
    step = 0
    while engine.busy:
        if step in swaps:
            engine.swap_drafter(swaps[step])
            engine.scheduler.check()
        for piece in engine.step():
            tokens[piece.key] += piece.tokens
        engine.scheduler.check()
        step += 1
    assert step > max(swaps, default=0), "the last swap came while there was work"
    assert engine.block_manager.used == 0
    return [tuple(tokens[key]) for key in keys]


@pytest.fixture(scope="module")
def expected(target: Target, asked: list[Request]) -> list[tuple[int, ...]]:
    return run_with_swaps(Engine(target, config=options()), [replace(one, speculation=OFF) for one in asked], {})


@pytest.mark.parametrize("tree", [None, Tree(depth=3, width=2, budget=6)], ids=["chains", "trees"])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_requests_under_way_go_on_as_if_nothing_had_happened(
    target: Target,
    tiny_drafter: Drafter,
    other: Drafter,
    asked: list[Request],
    expected: list[tuple[int, ...]],
    tree: Tree | None,
    prefix_cache: bool,
) -> None:
    engine = Engine(target, tiny_drafter, config=options(tree=tree, prefix_cache=prefix_cache))
    swaps = {2: other, 4: None, 6: tiny_drafter, 7: other, 9: tiny_drafter}
    assert run_with_swaps(engine, asked, swaps) == expected
    before = engine.stats.accepted
    assert run_with_swaps(engine, asked, {}) == expected, "what the cache holds is right for the new drafter"
    assert engine.stats.accepted > before


def test_recorded_steps_are_made_anew(
    target: Target, tiny_drafter: Drafter, other: Drafter, asked: list[Request], expected: list[tuple[int, ...]]
) -> None:
    engine = round_engine(target, tiny_drafter, options())
    assert run_with_swaps(engine, asked, {3: other, 6: None, 9: tiny_drafter}) == expected
    first = graphs_of(engine)
    assert len(first) > 0
    engine.swap_drafter(other)
    assert graphs_of(engine) is not first
    assert len(graphs_of(engine)) == 0


def test_what_was_captured_ahead_is_captured_for_the_next_drafter(
    target: Target, tiny_drafter: Drafter, other: Drafter, asked: list[Request], expected: list[tuple[int, ...]]
) -> None:
    engine = round_engine(target, tiny_drafter, options(max_num_seqs=4))
    ahead = engine.capture_graphs()
    first, before = weakref.ref(graphs_of(engine)), engine.controller.costs
    engine.swap_drafter(other)
    assert first() is None, "the old graphs have made room"
    assert len(graphs_of(engine)) == ahead
    costs = engine.controller.costs
    assert costs is not before
    assert all(costs.at(1, depth) for depth in engine.core.runner.shapes.depths), "and steps are timed"
    assert run_with_swaps(engine, asked, {3: tiny_drafter, 6: other}) == expected, "while requests wait, too"
    assert len(graphs_of(engine)) >= ahead
    engine.swap_drafter(None)
    assert 0 < len(graphs_of(engine)) < ahead


def test_what_was_rehearsed_on_a_processor_is_rehearsed_again(
    target: Target, tiny_drafter: Drafter, other: Drafter
) -> None:
    engine = Engine(target, tiny_drafter, config=options(capture_ahead=True))
    engine.swap_drafter(other)
    assert engine.controller.costs.at(1, 1) is not None
    engine = Engine(target, tiny_drafter, config=options())
    engine.swap_drafter(other)
    assert engine.controller.costs.at(1, 1) is None, "nor without being asked"


def test_acceptance_is_learnt_anew(target: Target, tiny_drafter: Drafter, other: Drafter, asked: list[Request]) -> None:
    engine = Engine(target, tiny_drafter, config=options())
    run_with_swaps(engine, asked, {})
    assert engine.controller.report()["rounds"] > 0
    engine.swap_drafter(other)
    assert engine.controller.report()["rounds"] == 0


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (lambda: random_drafter(drafter_config(vocab_size=200)), "vocab_size is 200"),
        (lambda: random_drafter(drafter_config(target_hidden_size=128)), "target_hidden_size is 128"),
        (lambda: random_drafter(drafter_config(aux_layer_ids=(1, 2, 77))), "layer 77"),
        (lambda: random_drafter(drafter_config()).to(torch.bfloat16), "bfloat16"),
    ],
)
def test_a_drafter_that_does_not_fit_changes_nothing(
    target: Target,
    tiny_drafter: Drafter,
    asked: list[Request],
    expected: list[tuple[int, ...]],
    wrong: Any,
    reason: str,
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
