"""Suffix drafts in captured rounds on a real device give the answers of steps without drafts."""

import copy
from dataclasses import replace
from typing import Any

import pytest

from engine.common import OFF, request, run
from engine.test_suffix_drafts import AUTO, FORCED, SAMPLINGS, quoting, with_suffix
from engine.test_suffix_rounds import extend_every_round
from eyas.drafter.model import Drafter
from eyas.engine.engine import Engine
from eyas.target.model import Target
from gpu.test_rounds_cuda import EagerEngine

__all__ = ["quoting"]
pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("changes", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("drafter", [False, True], ids=["alone", "beside a drafter"])
@pytest.mark.parametrize("graphs", [True, False], ids=["captured", "uncaptured"])
def test_captured_rounds_with_suffix_drafts_give_the_answers_without(
    target: Target,
    tiny_drafter: Drafter,
    quoting: list[tuple[int, ...]],
    changes: dict[str, Any],
    drafter: bool,
    graphs: bool,
) -> None:
    made = copy.deepcopy(tiny_drafter).cuda() if drafter else None
    wanted = [request(prompt, max_new_tokens=30, speculation=OFF, **changes) for prompt in quoting[:4]]
    expected = run(EagerEngine(target, None, config=with_suffix(suffix=None)), wanted)
    for speculation in (FORCED, AUTO):
        engine = Engine(target, made, config=with_suffix(graphs=graphs))
        for again in (False, True):
            answers = run(engine, [replace(one, speculation=speculation) for one in wanted])
            assert [answer.tokens for answer in answers] == [answer.tokens for answer in expected]
            if speculation is FORCED and again:
                assert sum(answer.stats.suffix_accepted for answer in answers) > 0


@pytest.mark.parametrize("changes", SAMPLINGS.values(), ids=SAMPLINGS)
def test_captured_rounds_in_which_the_text_continues_a_drafters_chain_give_the_answers_without(
    target: Target,
    tiny_drafter: Drafter,
    quoting: list[tuple[int, ...]],
    changes: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted = [request(prompt, max_new_tokens=30, speculation=OFF, **changes) for prompt in quoting[:4]]
    expected = run(EagerEngine(target, None, config=with_suffix(suffix=None)), wanted)
    engine = Engine(target, copy.deepcopy(tiny_drafter).cuda(), config=with_suffix(max_depth=3))
    extend_every_round(monkeypatch, engine)
    for _ in range(2):
        answers = run(engine, [replace(one, speculation=AUTO) for one in wanted])
        assert [answer.tokens for answer in answers] == [answer.tokens for answer in expected]
    assert engine.stats.accepted > engine.stats.suffix_accepted > 0
