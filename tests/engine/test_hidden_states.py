"""An answer comes with the target's states of all its tokens but the last, however they were computed."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import tiny
from each import each
from engine.common import OFF, Prompts, at_depth, bytes_for, options, request, requests, run, run_preempted, tokens_of
from eyas.drafter.model import Drafter
from eyas.engine.engine import Engine
from eyas.engine.output import RequestOutput
from eyas.engine.request import Request
from eyas.engine.speculation.draft import Tree
from eyas.errors import UserError
from eyas.target.model import Target

LAYERS = (0, 2, tiny.LAYERS)
"""One of them is read by the drafter too."""


def assert_states(target: Target, asked: Request, answer: RequestOutput) -> None:
    ids = torch.tensor([[*asked.prompt, *answer.tokens]])
    theirs = target.forward(ids, LAYERS).aux_hidden_BTX[0, :-1]
    assert answer.hidden_states is not None
    torch.testing.assert_close(answer.hidden_states, theirs, rtol=1e-4, atol=1e-4)


@each(
    "changes",
    [
        {},
        {"max_num_batched_tokens": 9, "block_size": 1},
        {"tree": Tree(depth=3, width=3, budget=9)},
        {"prefix_cache": False, "max_num_seqs": 2},
    ],
)
@each("fused", [True, False])
def test_states_are_the_targets_own(
    target: Target,
    tiny_drafter: Drafter,
    prompts: Prompts,
    changes: dict[str, Any],
    fused: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not fused:
        monkeypatch.setattr("eyas.engine.runner.model_runner.fused_target", lambda *_: None)
    engine = Engine(target, tiny_drafter, config=options(hidden_state_layers=LAYERS, **changes))
    asked = [request(p, speculation=at_depth(3) if i % 3 else OFF) for i, p in enumerate(prompts)]
    asked += asked[:4]  # their prefixes are cached by then
    answers = run(engine, asked)
    for one, answer in zip(asked, answers, strict=True):
        assert_states(target, one, answer)
    assert engine.stats.accepted > 0, "drafts are accepted, so their states are among these"
    plain = run(Engine(target, tiny_drafter, config=options(**changes)), asked)
    assert tokens_of(answers) == tokens_of(plain)
    assert [answer.accepted for answer in answers] == [answer.accepted for answer in plain]


def test_no_drafter_is_needed_and_a_stop_token_ends_the_states_too(target: Target, prompts: Prompts) -> None:
    engine = Engine(target, config=options(hidden_state_layers=LAYERS))
    first = run(engine, [request(prompts[5])])[0]
    asked = request(prompts[5], stop_ids=frozenset({first.tokens[4]}))
    answer = run(engine, [asked])[0]
    assert len(answer.tokens) <= 5
    assert_states(target, asked, answer)


def test_prefix_cache_hits_come_with_their_states(target: Target, prompts: Prompts) -> None:
    engine = Engine(target, config=options(hidden_state_layers=LAYERS))
    first = run(engine, [request(prompts[-1])])[0]
    assert first.num_cached_tokens == 0
    longer = request((*prompts[-1], *first.tokens, 5, 6))
    answer = run(engine, [longer])[0]
    size = engine.config.block_size
    assert answer.num_cached_tokens == (len(prompts[-1]) + len(first.tokens) - 1) // size * size
    assert_states(target, longer, answer)


@each("prefix_cache", [True, False])
def test_preempted_requests_have_all_their_states(
    target: Target, tiny_drafter: Drafter, prompts: Prompts, prefix_cache: bool
) -> None:
    config = options(hidden_state_layers=LAYERS, max_model_len=64, prefix_cache=prefix_cache)
    memory = bytes_for(30, target, tiny_drafter, config)
    asked = requests(prompts, speculation=at_depth(3))
    answers = run_preempted(Engine(target, tiny_drafter, config=replace(config, memory=memory)), asked)
    for one, answer in zip(asked, answers, strict=True):
        assert_states(target, one, answer)


def test_states_are_part_of_the_memory_budget(target: Target) -> None:
    without, beside = (Engine(target, config=options(hidden_state_layers=kept)).budget for kept in (None, LAYERS))
    more = options().block_size * len(LAYERS) * tiny.HIDDEN * 4
    assert beside.bytes_per_block == without.bytes_per_block + more


def test_layers_that_the_target_does_not_have_are_refused(target: Target) -> None:
    with pytest.raises(UserError, match=rf"layer id {tiny.LAYERS + 1} is outside"):
        Engine(target, config=replace(options(), hidden_state_layers=(1, tiny.LAYERS + 1)))
    with pytest.raises(UserError, match="not strictly ascending"):
        Engine(target, config=replace(options(), hidden_state_layers=(2, 1)))
