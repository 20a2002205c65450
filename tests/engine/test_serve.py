"""`Engine.serve` pulls requests: as many at once as fit, each answered as if alone, none left behind."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch

from each import each
from engine.common import (
    NEW_TOKENS,
    OFF,
    Prompts,
    at_depth,
    options,
    plain,
    request,
    requests,
    tokens_of,
)
from eyas.drafter.model import Drafter
from eyas.engine.engine import Engine
from eyas.engine.output import OutputDelta, RequestOutput
from eyas.engine.request import FinishReason, Request
from eyas.errors import UserError
from eyas.sampling import Sampling
from eyas.target.model import Target
from tiny import VOCAB, drafter_config, random_drafter

Pull = Callable[[], tuple[int, Request] | None]


def puller(requests: Iterable[Request]) -> Pull:
    waiting = enumerate(requests)
    return lambda: next(waiting, None)


def by_name(served: Iterator[tuple[int, RequestOutput]]) -> list[RequestOutput]:
    found = list(served)
    assert sorted(name for name, _ in found) == list(range(len(found))), "each once"
    return [output for _, output in sorted(found, key=lambda pair: pair[0])]


@pytest.fixture(scope="module")
def stop_ids(expected: Prompts) -> frozenset[int]:
    """A token that some answers have in the middle and others do not have."""
    for token in range(VOCAB):
        holding = sum(token in answer for answer in expected)
        if 3 <= holding <= 9 and not any(answer[0] == token for answer in expected):
            return frozenset({token})
    raise AssertionError("no such token")


@each("depth", [0, 3])
def test_pulled_requests_get_the_answers_they_get_alone(
    target: Target, tiny_drafter: Drafter, prompts: Prompts, expected: Prompts, stop_ids: frozenset[int], depth: int
) -> None:
    engine = Engine(target, tiny_drafter, config=options(max_num_seqs=3))
    speculation = at_depth(depth) if depth else OFF
    answers = by_name(engine.serve(puller(requests(prompts, stop_ids=stop_ids, speculation=speculation))))
    (stop,) = stop_ids
    cut = [tokens[: tokens.index(stop) + 1] if stop in tokens else tokens for tokens in expected]
    assert tokens_of(answers) == cut
    assert [answer.finished is FinishReason.STOP for answer in answers] == [tokens[-1] == stop for tokens in cut]
    assert {answer.finished for answer in answers} == {FinishReason.STOP, FinishReason.LENGTH}
    assert all(bool(answer.accepted) == bool(depth) for answer in answers)
    assert not engine.busy


def test_no_more_is_pulled_than_is_served_at_once(target: Target, prompts: Prompts) -> None:
    engine = Engine(target, config=options(max_num_seqs=3))
    waiting, under_way, most = enumerate(prompts), 0, 0

    def pull() -> tuple[int, Request] | None:
        nonlocal under_way, most
        pulled = next(waiting, None)
        if pulled is None:
            return None
        under_way += 1
        most = max(most, under_way)
        return pulled[0], request(pulled[1], max_new_tokens=1 + pulled[0] % 4)

    for _ in engine.serve(pull):
        under_way -= 1
    assert (under_way, most) == (0, 3)


def test_an_answer_may_lead_to_the_next_request(target: Target, prompts: Prompts) -> None:
    engine = Engine(target, config=options(max_num_seqs=2))
    asked = dict(enumerate(prompts[:3]))
    waiting = [(name, request(prompt, max_new_tokens=5)) for name, prompt in asked.items()]
    answers: dict[int, tuple[int, ...]] = {}
    for name, answer in engine.serve(lambda: waiting.pop(0) if waiting else None):
        answers[name] = answer.tokens
        if name < 6:  # two more turns each
            asked[name + 3] = (*asked[name], *answer.tokens, 3)
            waiting.append((name + 3, request(asked[name + 3], max_new_tokens=5)))
    assert answers == {name: plain(target, prompt, max_new_tokens=5) for name, prompt in asked.items()}
    assert len(answers) == 9


@each("room", [1, 2, 5])
def test_answers_end_where_the_longest_context_ends(target: Target, prompts: Prompts, room: int) -> None:
    length = max(map(len, prompts)) + room
    drafter = random_drafter(drafter_config(), own_embedding=True)
    for speculation in (OFF, at_depth(3)):
        engine = Engine(target, drafter, config=options(max_model_len=length))
        answers = by_name(engine.serve(puller(requests(prompts, speculation=speculation))))
        assert [len(a.tokens) for a in answers] == [min(NEW_TOKENS, length - len(p)) for p in prompts]
        assert {a.finished for a in answers} == {FinishReason.LENGTH}


def test_accepted_drafts_count_in_full_where_an_answer_ends_inside_a_round(
    target: Target, tiny_drafter: Drafter, prompts: Prompts
) -> None:
    engine = Engine(target, tiny_drafter, config=options())
    how: dict[str, Any] = {"max_new_tokens": 30, "speculation": at_depth(5)}
    for prompt in prompts:
        (whole,) = engine.generate([request(prompt, **how)])
        deep = next((i for i, accepted in enumerate(whole.accepted) if accepted > 2), None)
        if deep is None:
            continue
        stop = whole.tokens[1 + sum(whole.accepted[:deep]) + deep]  # the first token of that round
        (cut,) = engine.generate([request(prompt, stop_ids=frozenset({stop}), **how)])
        if len(cut.tokens) == 2 + sum(whole.accepted[:deep]) + deep:  # it did not come earlier
            assert cut.accepted == whole.accepted[: deep + 1]
            assert sum(cut.accepted) == cut.stats.accepted > sum(depth > 0 for depth in cut.depths)
            return
    raise AssertionError("no prompt has a round that accepts three drafts")


def test_a_caller_that_stops_iterating_leaves_nothing_behind(target: Target, prompts: Prompts) -> None:
    engine = Engine(target, config=options(max_num_seqs=4))
    served = engine.serve(puller(request(prompt, max_new_tokens=2 + 3 * i) for i, prompt in enumerate(prompts)))
    next(served)
    assert engine.busy
    served.close()  # type: ignore[attr-defined]
    assert not engine.busy
    assert engine.block_manager.used == 0


def test_a_refusal_or_a_failed_step_leaves_nothing_behind(
    target: Target, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(target, config=options())
    with pytest.raises(UserError, match=r"has 128 tokens, above the 127 .* longest context 128"):
        list(engine.serve(puller([request(prompts[0]), request((1,) * 128)])))
    assert not engine.busy
    steps = iter(range(3))
    step = engine.step

    def fail() -> list[OutputDelta]:
        if next(steps, None) is None:
            raise RuntimeError("out of luck")
        return step()

    with monkeypatch.context() as patched:
        patched.setattr(engine, "step", fail)
        with pytest.raises(RuntimeError, match="out of luck"):
            list(engine.serve(puller(requests(prompts))))
    assert not engine.busy
    assert engine.block_manager.used == 0
    assert list(engine.serve(lambda: None)) == []


def test_a_sampled_answer_depends_on_its_own_seed_only(target: Target, prompts: Prompts) -> None:
    drawn = [request(p, sampling=Sampling(temperature=1.3, top_k=6), seed=i) for i, p in enumerate(prompts)]
    together, alone = (
        tokens_of(by_name(Engine(target, config=options(max_num_seqs=rows)).serve(puller(drawn)))) for rows in (8, 1)
    )
    assert together == alone
    (other,) = Engine(target, config=options()).generate(
        [request(prompts[3], sampling=Sampling(temperature=1.3, top_k=6), seed=77)]
    )
    assert other.tokens != together[3]


def test_the_targets_attention_and_modes_are_restored(target: Target, prompts: Prompts) -> None:
    before = target.model.config._attn_implementation
    served = Engine(target, config=options()).serve(puller([request(prompts[0], max_new_tokens=2)] * 2))
    next(served)
    assert target.model.config._attn_implementation == before
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()
