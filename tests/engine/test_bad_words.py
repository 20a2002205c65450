"""Banned sequences do not come, greedy or sampled, and drafts change nothing about what comes instead."""

from typing import Any

import pytest

from each import each
from engine.round_engines import round_engine
from engine.test_engine import OFF, at_depth, options, request, run
from eyas.drafter.model import Drafter
from eyas.engine.engine import Engine
from eyas.errors import UserError
from eyas.sampling import Sampling
from eyas.target.model import Target


def holds(tokens: tuple[int, ...], word: tuple[int, ...]) -> bool:
    return any(tokens[at : at + len(word)] == word for at in range(len(tokens)))


@each("sampling", [Sampling(), Sampling(temperature=0.9)])
def test_they_do_not_come_and_drafts_do_not_matter(
    target: Target, tiny_drafter: Drafter, prompts: list[tuple[int, ...]], sampling: Sampling
) -> None:
    free = run(Engine(target, config=options()), [request(prompt, sampling=sampling) for prompt in prompts])
    asked: list[dict[str, Any]] = []
    for prompt, answer in zip(prompts, free, strict=True):
        words = (answer.tokens[2:4], answer.tokens[5:8], answer.tokens[:1])
        asked.append({"prompt": prompt, "sampling": sampling, "bad_words": words})
    plain = run(Engine(target, config=options()), [request(**one, speculation=OFF) for one in asked])
    for one, answer, before in zip(asked, plain, free, strict=True):
        assert all(holds(before.tokens, word) for word in one["bad_words"])
        assert not any(holds(answer.tokens, word) for word in one["bad_words"])
    for engine in (Engine(target, tiny_drafter, config=options()), round_engine(target, tiny_drafter, options())):
        drafted = run(engine, [request(**one, speculation=at_depth(4)) for one in asked])
        assert [answer.tokens for answer in drafted] == [answer.tokens for answer in plain]
        assert sum(answer.stats.accepted for answer in drafted) > 0


def test_a_word_of_the_prompt_does_not_count(target: Target, prompts: list[tuple[int, ...]]) -> None:
    """A sequence is banned within the answer: what the prompt ends with is no part of it."""
    prompt = prompts[-1]
    (free,) = run(Engine(target, config=options()), [request(prompt)])
    words = ((prompt[-1], free.tokens[0]),)
    (answer,) = run(Engine(target, config=options()), [request(prompt, bad_words=words)])
    assert answer.tokens[0] == free.tokens[0]


def test_what_would_leave_nothing_is_refused(target: Target) -> None:
    engine, everything = Engine(target, config=options()), tuple((token,) for token in range(96))
    with pytest.raises(UserError, match="ban all 96"):
        engine.submit(request((1,), bad_words=everything))
    engine.submit(request((1,), bad_words=everything[1:], stop_ids=frozenset({0})))
    with pytest.raises(UserError, match="ban all 96"):
        engine.submit(request((1,), bad_words=everything[1:], stop_ids=frozenset({0}), min_new_tokens=1))
    with pytest.raises(UserError, match="allowed_tokens"):
        request((1,), bad_words=((1,),), sampling=Sampling(allowed_tokens=frozenset({1})))
    with pytest.raises(UserError, match="0 tokens"):
        request((1,), bad_words=((),))
