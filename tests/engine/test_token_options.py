"""Options that depend on earlier tokens give the same answers with and without drafts; bad words never come."""

from typing import Any

import pytest

from each import each
from engine.common import OFF, Prompts, at_depth, options, request, requests, run, tokens_of
from engine.round_engines import round_engine
from eyas.drafter.model import Drafter
from eyas.engine.engine import Engine
from eyas.engine.output import RequestOutput
from eyas.errors import UserError
from eyas.sampling import Sampling
from eyas.target.model import Target


def plain_and_drafted(target: Target, drafter: Drafter, asked: list[dict[str, Any]]) -> list[RequestOutput]:
    """Plain answers, after checking that drafts do not change them."""
    plain = run(Engine(target, config=options()), [request(**one, speculation=OFF) for one in asked])
    for engine in (Engine(target, drafter, config=options()), round_engine(target, drafter, options())):
        drafted = run(engine, [request(**one, speculation=at_depth(4)) for one in asked])
        assert tokens_of(drafted) == tokens_of(plain)
        assert sum(answer.stats.accepted for answer in drafted) > 0
    return plain


@each("sampling", [Sampling(frequency_penalty=1.0), Sampling(temperature=0.8, frequency_penalty=-1.5)])
def test_strong_penalties_give_the_same_answers_with_drafts(
    target: Target, tiny_drafter: Drafter, prompts: Prompts, sampling: Sampling
) -> None:
    """Penalties count every token once, drafted or not."""
    asked = [{"prompt": prompt, "sampling": sampling, "max_new_tokens": 24} for prompt in prompts]
    plain_and_drafted(target, tiny_drafter, asked)


def holds(tokens: tuple[int, ...], word: tuple[int, ...]) -> bool:
    return any(tokens[at : at + len(word)] == word for at in range(len(tokens)))


@each("sampling", [Sampling(), Sampling(temperature=0.9)])
def test_bad_words_do_not_come_with_or_without_drafts(
    target: Target, tiny_drafter: Drafter, prompts: Prompts, sampling: Sampling
) -> None:
    free = run(Engine(target, config=options()), requests(prompts, sampling=sampling))
    asked: list[dict[str, Any]] = []
    for prompt, answer in zip(prompts, free, strict=True):
        words = (answer.tokens[2:4], answer.tokens[5:8], answer.tokens[:1])
        asked.append({"prompt": prompt, "sampling": sampling, "bad_words": words})
    for one, answer, before in zip(asked, plain_and_drafted(target, tiny_drafter, asked), free, strict=True):
        assert all(holds(before.tokens, word) for word in one["bad_words"])
        assert not any(holds(answer.tokens, word) for word in one["bad_words"])


def test_bad_words_are_banned_in_the_answer_only(target: Target, prompts: Prompts) -> None:
    prompt = prompts[-1]
    (free,) = run(Engine(target, config=options()), [request(prompt)])
    words = ((prompt[-1], free.tokens[0]),)
    (answer,) = run(Engine(target, config=options()), [request(prompt, bad_words=words)])
    assert answer.tokens[0] == free.tokens[0]


def test_bad_words_that_leave_no_token_are_refused(target: Target) -> None:
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
