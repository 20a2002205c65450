"""Suffix drafts change when a token is computed, never which one; no text is drafted for another caller."""

from copy import deepcopy
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch

from each import each
from engine.common import AUTO, OFF, Prompts, at_depth, options, request, requests, run, tokens_of
from eyas.drafter.model import Drafter
from eyas.engine.config import EngineConfig
from eyas.engine.engine import Engine
from eyas.engine.output import OutputDelta
from eyas.engine.request import FinishReason, Request, SequenceState, Speculation
from eyas.engine.suffix.config import SuffixConfig
from eyas.engine.suffix.drafts import SuffixDrafts
from eyas.errors import UserError
from eyas.kernels import suffix_index
from eyas.sampling import Sampling
from eyas.target.model import Target
from tiny import language

SUFFIX = Speculation(method="suffix")
FORCED = Speculation(mode="fixed", depth=6, method="suffix")


def with_suffix(**changes: Any) -> EngineConfig:
    suffix = changes.pop("suffix", SuffixConfig(max_spec_factor=4.0))
    return options(**{"suffix": suffix, "max_model_len": 256, **changes})


@pytest.fixture(scope="module")
def quoting() -> Prompts:
    """Prompts that repeat themselves, so that there is something to copy."""
    rows = language(8, 20, torch.Generator().manual_seed(5)).tolist()
    return [(*row, *row[: 4 + number], *row) for number, row in enumerate(rows)]


SAMPLINGS = {
    "greedy": {},
    "sampled": {"sampling": Sampling(temperature=0.9, top_p=0.9), "seed": 3},
    "penalised": {"sampling": Sampling(temperature=0.7, repetition_penalty=1.3, presence_penalty=0.4), "seed": 5},
    "top k": {"sampling": Sampling(temperature=1.0, top_k=4), "seed": 7},
    "biased": {"sampling": Sampling(logit_bias={3: 4.0, 5: -3.0})},
    "minimum": {"stop_ids": frozenset(range(20)), "min_new_tokens": 9},
    "bad words": {"bad_words": ((4,), (5, 6)), "sampling": Sampling(temperature=0.8), "seed": 2},
    "logprobs": {"logprobs": 3},
    "stop string": {"stop_strings": ("Q", "ab")},
}


@each("changes", SAMPLINGS.values())
@each("speculation", [SUFFIX, FORCED, AUTO])
@pytest.mark.parametrize("drafter", [False, True], ids=["alone", "beside a drafter"])
def test_answers_with_suffix_drafts_are_those_without(
    target: Target,
    tiny_drafter: Drafter,
    quoting: Prompts,
    changes: dict[str, Any],
    speculation: Speculation,
    drafter: bool,
) -> None:
    made = tiny_drafter if drafter else None
    asked = requests(quoting, max_new_tokens=40, speculation=OFF, **changes)
    expected = run(Engine(target, made, config=with_suffix(suffix=None)), asked)
    engine = Engine(target, made, config=with_suffix())
    answers = run(engine, [replace(one, speculation=speculation) for one in asked])
    for answer, plain in zip(answers, expected, strict=True):
        assert (answer.tokens, answer.text, answer.finished) == (plain.tokens, plain.text, plain.finished)
        if answer.logprobs is not None and plain.logprobs is not None:
            assert [one.token for one in answer.logprobs] == [one.token for one in plain.logprobs]
    if speculation is FORCED:
        assert engine.stats.suffix_drafted > 0
        assert engine.stats.suffix_accepted > 0


def test_every_accepted_token_has_a_source(target: Target, tiny_drafter: Drafter, quoting: Prompts) -> None:
    engine = Engine(target, tiny_drafter, config=with_suffix())
    cut = accepted = suffix = 0
    sources: list[str] = []
    for delta in deltas_of(engine, requests(quoting, max_new_tokens=40)):
        assert len(delta.sources) == len(delta.tokens)
        sources += delta.sources
        accepted += delta.accepted
        suffix += delta.suffix_accepted
        cut += delta.accepted - (len(delta.sources) - delta.sources.count("target"))
    assert engine.stats.accepted == accepted > engine.stats.suffix_accepted == suffix > 0
    # Accepted drafts behind the end of an answer have no token.
    assert len(sources) - sources.count("target") == accepted - cut
    assert suffix - cut <= sources.count("suffix") <= suffix


def deltas_of(engine: Engine, asked: list[Request]) -> list[OutputDelta]:
    """All deltas of requests that are answered together."""
    deltas: list[OutputDelta] = []
    engine.generate(asked, on_piece=deltas.append)
    return deltas


def drafted(engine: Engine, salt: str | None = None) -> int:
    """How many suffix drafts one new request causes."""
    fresh, before = language(1, 9, torch.Generator().manual_seed(77))[0].tolist(), engine.stats.suffix_drafted
    run(engine, [request(fresh, max_new_tokens=12, speculation=FORCED, cache_salt=salt)])
    return engine.stats.suffix_drafted - before


def test_answers_are_drafted_for_their_own_caller_only(target: Target) -> None:
    alone = drafted(Engine(target, None, config=with_suffix()), "b")
    engine = Engine(target, None, config=with_suffix())
    assert drafted(engine, "a") == alone
    assert drafted(engine, "a") > alone, "repeated by the same caller"
    assert drafted(engine, "b") == alone, "by another caller"
    assert drafted(engine, None) == alone, "by one without a key"


def test_without_kept_answers_a_request_knows_its_own_text_only(target: Target) -> None:
    engine = Engine(target, None, config=with_suffix(suffix=SuffixConfig(max_cached_requests=0, max_spec_factor=4.0)))
    assert drafted(engine) == drafted(engine)
    assert engine._suffix is not None
    assert engine._suffix.bytes == 0


def test_rejected_drafts_never_enter_an_index(target: Target, quoting: Prompts) -> None:
    """The texts kept of a caller's answers are exactly the answers."""
    engine = Engine(target, None, config=with_suffix())
    taken: list[list[int]] = []
    assert engine._suffix is not None
    add = engine._suffix.answers.add
    engine._suffix.answers.add = lambda caller, answer: (taken.append(list(answer)), add(caller, answer))[1]  # type: ignore[method-assign]
    answers = run(engine, requests(quoting, max_new_tokens=30, speculation=FORCED))
    assert engine.stats.suffix_drafted > engine.stats.suffix_accepted, "some were rejected"
    assert sorted(taken) == sorted(map(list, tokens_of(answers)))


def test_nothing_is_kept_of_finished_requests_but_their_answers(target: Target, quoting: Prompts) -> None:
    engine = Engine(target, None, config=with_suffix(suffix=SuffixConfig(max_cached_requests=0)))
    keys = [engine.submit(one) for one in requests(quoting, max_new_tokens=30)]
    for _ in range(5):
        engine.step()
    assert engine._suffix is not None
    assert engine._suffix.bytes > 0
    engine.cancel(keys[0])
    while engine.busy:
        engine.step()
    assert engine._suffix.bytes == 0


def test_speculation_that_the_engine_lacks_is_refused(target: Target, tiny_drafter: Drafter) -> None:
    without = Engine(target, None, config=options())
    with pytest.raises(UserError, match="suffix drafts were asked for"):
        without.submit(request((1, 2), speculation=SUFFIX))
    with pytest.raises(UserError, match="method eagle3 was asked for, but there is no drafter"):
        without.submit(request((1, 2), speculation=Speculation(method="eagle3")))
    engine = Engine(target, tiny_drafter, config=with_suffix(suffix=SuffixConfig(num_speculative_tokens=5)))
    with pytest.raises(UserError, match="depth 6 is above the 5 suffix drafts"):
        engine.submit(request((1, 2), speculation=FORCED))
    with pytest.raises(UserError, match="method 'ngram' is unknown"):
        Speculation(method="ngram")  # type: ignore[arg-type]

    with pytest.raises(UserError, match=r"depth 3 .* no drafter; load one or use mode auto, or use method suffix"):
        Engine(target, None, config=with_suffix()).submit(request((1, 2), speculation=at_depth(3)))
    with pytest.raises(UserError, match=r"depth 3 .* no drafter; load one or use mode auto$"):
        without.submit(request((1, 2), speculation=at_depth(3)))


@each("speculation", [AUTO, FORCED])
def test_nothing_is_kept_of_a_request_that_was_refused(target: Target, speculation: Speculation) -> None:
    engine = Engine(target, None, config=with_suffix(max_model_len=16))
    with pytest.raises(UserError, match="shorten it"):
        engine.submit(request((1,) * 16, speculation=speculation))
    assert engine._suffix is not None
    assert not engine._suffix._seqs
    run(engine, [request((1, 2), speculation=speculation)])


TOO_LARGE = 10**400
"""Too large for a float."""


@each(
    ("changes", "words"),
    [
        ({"max_tree_depth": 1}, "max_tree_depth is 1; .* from 2 to 48"),
        ({"max_tree_depth": "8"}, "max_tree_depth is '8'; it must be a whole number"),
        ({"max_tree_depth": 8.5}, "max_tree_depth is 8.5; it must be a whole number"),
        ({"max_tree_depth": None}, "max_tree_depth is None; it must be a whole number"),
        ({"num_speculative_tokens": True}, "num_speculative_tokens is True; it must be a whole number"),
        ({"max_callers": 2.0}, "max_callers is 2.0; it must be a whole number of 1 or more"),
        ({"min_token_prob": "0.1"}, "min_token_prob is '0.1'; it must be a number from 0 to 1"),
        ({"min_token_prob": float("nan")}, "min_token_prob is nan"),
        ({"min_token_prob": TOO_LARGE}, "min_token_prob is 1000"),
        ({"max_spec_factor": 0}, "max_spec_factor is 0; it must be a number above 0"),
        ({"max_spec_factor": TOO_LARGE}, "max_spec_factor is 1000.*infinity"),
        ({"max_age_seconds": TOO_LARGE}, "max_age_seconds is 1000.*infinity"),
        ({"max_age_seconds": None}, "max_age_seconds is None"),
        ({"max_age_seconds": True}, "max_age_seconds is True"),
    ],
)
def test_invalid_bounds_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        SuffixConfig(**changes)


def test_very_large_and_infinite_bounds_are_accepted(target: Target, quoting: Prompts) -> None:
    for large in (10**308, float("inf")):
        suffix = SuffixConfig(max_spec_factor=large, max_age_seconds=large, max_cached_requests=TOO_LARGE)
        engine = Engine(target, None, config=with_suffix(suffix=suffix))
        for _ in range(2):
            run(engine, [request(quoting[0], max_new_tokens=20, speculation=FORCED)])
        assert engine.stats.suffix_accepted > 0


def test_suffix_drafts_are_turned_on_by_a_config_only() -> None:
    with pytest.raises(UserError, match=r"suffix is True; give SuffixConfig"):
        EngineConfig(suffix=True)  # type: ignore[arg-type]


def test_a_swap_keeps_texts_and_answers(target: Target, tiny_drafter: Drafter, quoting: Prompts) -> None:
    asked = requests(quoting, max_new_tokens=40, speculation=FORCED)
    expected = run(Engine(target, None, config=with_suffix()), asked)
    engine, steps = Engine(target, tiny_drafter, config=with_suffix()), count()
    answers = run(engine, asked, after_step=lambda: engine.swap_drafter(None) if next(steps) == 8 else None)
    assert next(steps) > 9
    assert tokens_of(answers) == tokens_of(expected)
    assert {answer.finished for answer in expected} == {FinishReason.LENGTH}


def test_a_swap_in_place_keeps_requests_with_suffix_drafts_of_a_fixed_depth(
    target: Target, tiny_drafter: Drafter, quoting: Prompts
) -> None:
    engine = Engine(target, tiny_drafter, config=with_suffix())
    key = engine.submit(request(quoting[0], max_new_tokens=30, speculation=FORCED))
    engine.step()
    assert engine._suffix is not None
    assert engine.swap_drafter(deepcopy(tiny_drafter), in_place=True)
    assert set(engine._suffix._seqs) == {key}
    while engine.busy:
        engine.step()
    assert engine.stats.suffix_accepted > 0
    assert not engine._suffix._seqs


def test_a_long_prompt_is_indexed_in_portions_and_drafted_for_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix_index, "PORTION", 9)
    monkeypatch.setattr(suffix_index, "PLAIN_PORTION", 9)
    drafts = SuffixDrafts(SuffixConfig(), lambda: 0.0)
    seq = SequenceState(key=0, arrival=0, request=request((*range(20), *range(20)), max_new_tokens=50))
    offers = [drafts.offer(seq, 4) for _ in range(6)]
    assert [offer is None for offer in offers] == [True, True, True, True, False, False]
    assert offers[-1] is not None
    assert offers[-1].tokens == (0, 1, 2, 3)
