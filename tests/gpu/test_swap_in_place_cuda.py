"""Weights copied into place on a real device: captured rounds stay valid and draft as the new drafter does."""

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.common import at_depth, options
from engine.test_swap_in_place import TREE, Way, accepted, answers, asked, plainly, runner_of
from eyas.drafter.checkpoint import checkpoint_of, write_checkpoint
from eyas.drafter.model import Drafter
from eyas.drafter.quantise import quantised
from eyas.engine.engine import Engine
from eyas.engine.runner.graph_capture import GraphCapture
from eyas.engine.speculation.draft import Tree
from eyas.loading import load_drafter_for
from eyas.target.model import Target

pytestmark = pytest.mark.gpu


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Collects captures."""
    made, capture = list[object](), GraphCapture._capture

    def counted(self: Any, *given: Any) -> Any:
        made.append(given)
        return capture(self, *given)

    monkeypatch.setattr(GraphCapture, "_capture", counted)
    return made


@pytest.mark.parametrize("tree", [None, TREE], ids=["chains", "trees"])
@pytest.mark.parametrize("asynchronous", [True, False], ids=["in flight", "synchronous"])
def test_captured_rounds_go_on_with_new_weights(
    target: Target, tiny_drafter: Drafter, captured: list[object], tree: Tree | None, asynchronous: bool
) -> None:
    way, requests = Way("torch", target, tiny_drafter), asked(speculation=at_depth(3))
    expected = plainly(target, requests)
    kind = options(tree=tree, async_scheduling=asynchronous)
    old, new = (accepted(Engine(target, way.drafter(noise), config=kind), requests) for noise in (0.3, 0.0))
    assert old != new
    captured.clear()
    engine = Engine(target, way.drafter(0.3), config=kind)
    assert type(runner_of(engine).run).__name__ == "TritonDrafter"
    assert answers(engine, requests, {3: way.drafter(), 5: way.drafter(3.0), 8: way.drafter()}) == expected
    before = len(captured)
    assert engine.swap_drafter(way.drafter(0.3), in_place=True)
    assert engine.swap_drafter(way.drafter(), in_place=True)
    assert len(captured) == before
    assert accepted(engine, requests) == new
    assert engine.swap_drafter(way.drafter(0.3), in_place=True)
    assert accepted(engine, requests) == old
    assert len(captured) == len(engine.core.runner.capture) > 0, "none was captured twice"


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_those_of_a_drafter_in_8_bits_do_too(target: Target, tiny_drafter: Drafter, tmp_path: Path, kind: str) -> None:
    way, requests = Way("torch", target, tiny_drafter), asked(speculation=at_depth(3))
    half = replace(target, model=deepcopy(target.model).bfloat16())
    folders = {noise: tmp_path / str(noise) for noise in (0.0, 0.3)}
    for noise, folder in folders.items():
        write_checkpoint(quantised(checkpoint_of(way.drafter(noise).cpu()), kind, "it"), folder)

    def loaded(noise: float) -> Drafter:
        drafter = load_drafter_for(half, str(folders[noise]))
        assert drafter.quantization == kind
        return drafter

    old, new = (accepted(Engine(half, loaded(noise), config=options()), requests) for noise in (0.3, 0.0))
    assert old != new
    engine = Engine(half, loaded(0.3), config=options())
    answers(engine, requests, {3: loaded(0.0), 6: loaded(0.3)})
    for noise, expected in ((0.0, new), (0.3, old)):
        assert engine.swap_drafter(loaded(noise), in_place=True)
        assert accepted(engine, requests) == expected


def test_what_was_captured_ahead_is_not_captured_again(
    target: Target, tiny_drafter: Drafter, captured: list[object]
) -> None:
    way, requests = Way("torch", target, tiny_drafter), asked(4)
    engine = Engine(target, way.drafter(), config=options(max_num_seqs=4, capture_ahead=True))
    ahead = len(captured)
    assert engine.swap_drafter(way.drafter(0.3), in_place=True)
    assert len(captured) == ahead > 0
    assert answers(engine, requests, {2: way.drafter()}) == plainly(target, requests)
    assert len(captured) - ahead < ahead
