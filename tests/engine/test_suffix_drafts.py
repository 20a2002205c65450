"""Suffix drafts change when a token is computed, never which it is; nobody's text is drafted for anybody else."""

from copy import deepcopy
from typing import Any

import pytest
import torch

from engine.test_engine import OFF, at_depth, options, request, run
from eyas.drafter.model import Drafter
from eyas.engine.config import EngineConfig
from eyas.engine.engine import Engine
from eyas.engine.request import FinishReason, SequenceState, Speculation
from eyas.engine.suffix.config import SuffixConfig
from eyas.engine.suffix.drafts import SuffixDrafts
from eyas.errors import UserError
from eyas.kernels import suffix_index
from eyas.sampling import Sampling
from eyas.target.model import Target
from tiny import language

SUFFIX = Speculation(method="suffix")
FORCED = Speculation(mode="fixed", depth=6, method="suffix")
AUTO = Speculation()


def with_suffix(**changes: Any) -> EngineConfig:
    suffix = changes.pop("suffix", SuffixConfig(max_spec_factor=4.0))
    return options(**{"suffix": suffix, "max_model_len": 256, **changes})


@pytest.fixture(scope="module")
def quoting() -> list[tuple[int, ...]]:
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


@pytest.mark.parametrize("changes", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("speculation", [SUFFIX, FORCED, AUTO], ids=["suffix", "forced", "auto"])
@pytest.mark.parametrize("drafter", [False, True], ids=["alone", "beside a drafter"])
def test_answers_with_suffix_drafts_are_those_without(
    target: Target,
    tiny_drafter: Drafter,
    quoting: list[tuple[int, ...]],
    changes: dict[str, Any],
    speculation: Speculation,
    drafter: bool,
) -> None:
    made = tiny_drafter if drafter else None
    wanted = [request(prompt, max_new_tokens=40, speculation=OFF, **changes) for prompt in quoting]
    expected = run(Engine(target, made, config=with_suffix(suffix=None)), wanted)
    engine = Engine(target, made, config=with_suffix())
    answers = run(
        engine, [request(one.prompt, max_new_tokens=40, speculation=speculation, **changes) for one in wanted]
    )
    for answer, plain in zip(answers, expected, strict=True):
        assert (answer.tokens, answer.text, answer.finished) == (plain.tokens, plain.text, plain.finished)
        if answer.logprobs is not None and plain.logprobs is not None:
            assert [one.token for one in answer.logprobs] == [one.token for one in plain.logprobs]
    if speculation is FORCED:
        assert engine.stats.suffix_drafted > 0
        assert engine.stats.suffix_accepted > 0


def test_every_accepted_token_has_a_source(
    target: Target, tiny_drafter: Drafter, quoting: list[tuple[int, ...]]
) -> None:
    engine = Engine(target, tiny_drafter, config=with_suffix())
    for prompt in quoting:
        engine.submit(request(prompt, max_new_tokens=40))
    cut = accepted = suffix = 0
    sources: list[str] = []
    while engine.busy:
        for piece in engine.step():
            assert len(piece.sources) == len(piece.tokens)
            sources += piece.sources
            accepted += piece.accepted
            suffix += piece.suffix_accepted
            cut += piece.accepted - (len(piece.sources) - piece.sources.count("target"))
    assert engine.stats.accepted == accepted > engine.stats.suffix_accepted == suffix > 0
    # What the end of an answer cut off has no token to tell of.
    assert len(sources) - sources.count("target") == accepted - cut
    assert suffix - cut <= sources.count("suffix") <= suffix


def test_another_key_never_gets_drafts_from_what_was_said_to_one(
    target: Target, quoting: list[tuple[int, ...]]
) -> None:
    """Whoever asks the same again under the same salt has the answer drafted; under another salt nothing is found."""
    fresh = tuple(language(1, 9, torch.Generator().manual_seed(77))[0].tolist())

    def drafted(engine: Engine, salt: str | None) -> int:
        before = engine.stats.suffix_drafted
        run(engine, [request(fresh, max_new_tokens=12, speculation=FORCED, cache_salt=salt)])
        return engine.stats.suffix_drafted - before

    alone = drafted(Engine(target, None, config=with_suffix()), "b")
    engine = Engine(target, None, config=with_suffix())
    assert drafted(engine, "a") == alone
    assert drafted(engine, "a") > alone, "the same caller has it drafted"
    assert drafted(engine, "b") == alone, "another does not"
    assert drafted(engine, None) == alone, "nor does one without a key"


def test_without_kept_answers_a_request_knows_its_own_text_alone(target: Target) -> None:
    fresh = tuple(language(1, 9, torch.Generator().manual_seed(77))[0].tolist())
    engine = Engine(target, None, config=with_suffix(suffix=SuffixConfig(max_cached_requests=0, max_spec_factor=4.0)))
    counts = []
    for _ in range(2):
        before = engine.stats.suffix_drafted
        run(engine, [request(fresh, max_new_tokens=12, speculation=FORCED)])
        counts.append(engine.stats.suffix_drafted - before)
    assert counts[0] == counts[1]
    assert engine._suffix is not None
    assert engine._suffix.bytes == 0


def test_rejected_drafts_never_enter_an_index(target: Target, quoting: list[tuple[int, ...]]) -> None:
    """What is kept of a caller's answers is what was answered, token by token, and nothing more."""
    engine = Engine(target, None, config=with_suffix())
    taken: list[list[int]] = []
    assert engine._suffix is not None
    add = engine._suffix.answers.add
    engine._suffix.answers.add = lambda caller, answer: (taken.append(list(answer)), add(caller, answer))[1]  # type: ignore[method-assign]
    answers = run(engine, [request(prompt, max_new_tokens=30, speculation=FORCED) for prompt in quoting])
    assert engine.stats.suffix_drafted > engine.stats.suffix_accepted, "some were rejected"
    assert sorted(taken) == sorted(list(answer.tokens) for answer in answers)


def test_nothing_is_kept_of_requests_that_ended_but_their_answers(
    target: Target, quoting: list[tuple[int, ...]]
) -> None:
    suffix = SuffixConfig(max_cached_requests=0)
    engine = Engine(target, None, config=with_suffix(suffix=suffix))
    keys = [engine.submit(request(prompt, max_new_tokens=30)) for prompt in quoting]
    for _ in range(5):
        engine.step()
    assert engine._suffix is not None
    assert engine._suffix.bytes > 0
    engine.cancel(keys[0])
    while engine.busy:
        engine.step()
    assert engine._suffix.bytes == 0


def test_what_cannot_be_drafted_is_refused(target: Target, tiny_drafter: Drafter) -> None:
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


def test_who_asks_for_a_depth_is_told_of_suffix_drafts_where_they_are_made(target: Target) -> None:
    with pytest.raises(UserError, match=r"depth 3 .* no drafter; load one or use mode auto, or use method suffix"):
        Engine(target, None, config=with_suffix()).submit(request((1, 2), speculation=at_depth(3)))
    with pytest.raises(UserError, match=r"depth 3 .* no drafter; load one or use mode auto$"):
        Engine(target, None, config=options()).submit(request((1, 2), speculation=at_depth(3)))


@pytest.mark.parametrize("speculation", [AUTO, FORCED], ids=["auto", "forced"])
def test_nothing_is_kept_of_a_request_that_was_refused(target: Target, speculation: Speculation) -> None:
    engine = Engine(target, None, config=with_suffix(max_model_len=16))
    with pytest.raises(UserError, match="shorten it"):
        engine.submit(request((1,) * 16, speculation=speculation))
    assert engine._suffix is not None
    assert not engine._suffix._seqs
    run(engine, [request((1, 2), speculation=speculation)])


TOO_LARGE = 10**400
"""For a float."""


@pytest.mark.parametrize(
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
def test_bounds_that_no_step_could_keep_to_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        SuffixConfig(**changes)


def test_numbers_that_are_large_or_without_end_are_bounds_like_others(
    target: Target, quoting: list[tuple[int, ...]]
) -> None:
    for large in (10**308, float("inf")):
        suffix = SuffixConfig(max_spec_factor=large, max_age_seconds=large, max_cached_requests=TOO_LARGE)
        engine = Engine(target, None, config=with_suffix(suffix=suffix))
        for _ in range(2):
            run(engine, [request(quoting[0], max_new_tokens=20, speculation=FORCED)])
        assert engine.stats.suffix_accepted > 0


def test_suffix_drafts_are_turned_on_by_how_they_are_made_alone() -> None:
    with pytest.raises(UserError, match=r"suffix is True; give SuffixConfig"):
        EngineConfig(suffix=True)  # type: ignore[arg-type]


def test_a_swap_keeps_texts_and_answers(target: Target, tiny_drafter: Drafter, quoting: list[tuple[int, ...]]) -> None:
    wanted = [request(prompt, max_new_tokens=40, speculation=FORCED) for prompt in quoting]
    expected = run(Engine(target, None, config=with_suffix()), wanted)
    engine = Engine(target, tiny_drafter, config=with_suffix())
    keys = [engine.submit(one) for one in wanted]
    tokens: dict[int, list[int]] = {key: [] for key in keys}
    for number in range(1000):
        for piece in engine.step():
            tokens[piece.key] += piece.tokens
        if number == 8:
            engine.swap_drafter(None)
        if not engine.busy:
            break
    assert [tuple(tokens[key]) for key in keys] == [answer.tokens for answer in expected]
    assert {answer.finished for answer in expected} == {FinishReason.LENGTH}


def test_a_swap_in_place_keeps_who_has_drafts_of_a_fixed_depth(
    target: Target, tiny_drafter: Drafter, quoting: list[tuple[int, ...]]
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


def test_a_long_prompt_is_taken_in_portions_and_drafts_begin_behind_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix_index, "PORTION", 9)
    monkeypatch.setattr(suffix_index, "PLAIN_PORTION", 9)
    drafts = SuffixDrafts(SuffixConfig(), lambda: 0.0)
    seq = SequenceState(key=0, arrival=0, request=request((*range(20), *range(20)), max_new_tokens=50))
    offers = [drafts.offer(seq, 4) for _ in range(6)]
    assert [offer is None for offer in offers] == [True, True, True, True, False, False]
    assert offers[-1] is not None
    assert offers[-1].tokens == (0, 1, 2, 3)


def test_drafts_may_be_as_many_as_there_are(target: Target, quoting: list[tuple[int, ...]]) -> None:
    engine = Engine(target, None, config=with_suffix(suffix=SuffixConfig(max_spec_factor=float("inf"))))
    run(engine, [request(quoting[0], max_new_tokens=30, speculation=FORCED)])
    assert engine.stats.suffix_drafted > 0
