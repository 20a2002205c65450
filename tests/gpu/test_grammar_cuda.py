"""On a GPU, answers that keep to a grammar are the same by CUDA graphs and without, also when drafters change."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from chat_tokenizer import letter_tokenizer
from engine.common import options
from engine.round_engines import graphs_of
from engine.test_grammar import SHORT, requests
from engine.test_swap import run_with_swaps
from eyas.engine.engine import Engine
from eyas.grammar.llguidance import LlGuidance
from tiny import drafter_config, random_drafter

if TYPE_CHECKING:
    from eyas.drafter.model import Drafter
    from eyas.target.model import Target

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def target(tiny_target: Target) -> Target:
    return replace(tiny_target, model=copy.deepcopy(tiny_target.model).cuda(), tokenizer=letter_tokenizer())


def test_a_grammar_by_graphs_and_without(target: Target, drafter: Drafter) -> None:
    asked = requests(target, LlGuidance(target.tokenizer, target.facts.vocab_size).json_schema(SHORT))
    eager = Engine(target, drafter, config=options(graphs=False)).generate(asked)
    recorded = Engine(target, drafter, config=options())
    for share in (asked, asked[1:2], asked[1::5]):
        answers = recorded.generate(share)
        assert [answer.tokens for answer in answers] == [eager[asked.index(one)].tokens for one in share]
        assert all(set(json.loads(answer.text)) == {"a", "b"} for answer in answers)
    assert len(graphs_of(recorded)) > 0


def test_drafters_change_under_recorded_steps(target: Target, drafter: Drafter) -> None:
    asked = requests(target, None, max_new_tokens=40)
    expected = run_with_swaps(Engine(target, drafter, config=options(graphs=False)), asked, {})
    other = random_drafter(drafter_config(aux_layer_ids=(0, 1, 2))).cuda()
    engine = Engine(target, drafter, config=options())
    assert run_with_swaps(engine, asked, {4: other, 8: None, 12: drafter}) == expected
    assert len(graphs_of(engine)) > 0
