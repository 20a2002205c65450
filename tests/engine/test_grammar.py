"""Grammars: masks depend on the tokens only, and answers are the same in every way of drafting."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from chat_tokenizer import letter_tokenizer
from each import each
from engine.common import AUTO, OFF, at_depth, bytes_for, options, run_preempted, tokens_of
from engine.round_engines import round_engine
from engine.test_auto_trees import engine_with_trees
from engine.test_suffix_rounds import extend_every_round
from eyas.drafter.checkpoint import load_drafter
from eyas.engine.config import EngineConfig
from eyas.engine.engine import Engine
from eyas.engine.output import OutputDelta, RequestOutput
from eyas.engine.request import FinishReason, Request, Speculation
from eyas.engine.speculation.draft import Tree
from eyas.engine.suffix.config import SuffixConfig
from eyas.errors import UserError
from eyas.grammar.compile import MOST_CHARACTERS, PARSER_LIMITS
from eyas.grammar.llguidance import LlGuidance
from eyas.sampling import Sampling

if TYPE_CHECKING:
    from engine.common import Prompts
    from eyas.drafter.model import Drafter
    from eyas.target.model import Target

BIRD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "wingspan_cm": {"type": "integer", "minimum": 10, "maximum": 400},
        "diet": {"enum": ["fish", "mice", "birds"]},
    },
    "required": ["name", "wingspan_cm", "diet"],
    "additionalProperties": False,
}
SHORT = {
    "type": "object",
    "properties": {"a": {"enum": ["red", "green", "grey"]}, "b": {"type": "string", "maxLength": 6}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
WAYS = [OFF, at_depth(1), at_depth(3), at_depth(5), AUTO]


@pytest.fixture(scope="module")
def letters(tiny_target: Target) -> Target:
    return replace(tiny_target, tokenizer=letter_tokenizer())


@pytest.fixture(scope="module")
def guidance(letters: Target) -> LlGuidance:
    return LlGuidance(letters.tokenizer, letters.facts.vocab_size)


@pytest.fixture(scope="module")
def short(letters: Target, tiny_drafter: Drafter, guidance: LlGuidance) -> tuple[list[Request], list[RequestOutput]]:
    """Requests for a short object, and their answers with chains of drafts."""
    asked = requests(letters, guidance.json_schema(SHORT))
    return asked, Engine(letters, tiny_drafter, config=options()).generate(asked)


def requests(target: Target, grammar: Any, ways: Any = WAYS, **changes: Any) -> list[Request]:
    """One question in every way of drafting, greedy and sampled."""
    samplings = (Sampling(), Sampling(temperature=0.9, top_p=0.95), Sampling(temperature=1.5, repetition_penalty=1.2))
    asked: dict[str, Any] = {"prompt": tuple(range(5, 25)), "max_new_tokens": 60, "stop_ids": target.stop_ids()}
    return [
        Request(**asked | changes, sampling=sampling, seed=seed, grammar=grammar, speculation=way)
        for seed, sampling in enumerate(samplings)
        for way in ways
    ]


def check_json(answers: list[Any], keys: set[str], ways: int = len(WAYS)) -> None:
    """Every way gives the same answer, which satisfies the schema."""
    for first in range(0, len(answers), ways):
        alike = answers[first : first + ways]
        assert len({answer.tokens for answer in alike}) == 1
        assert {answer.finished for answer in alike} == {FinishReason.STOP}
        assert set(json.loads(alike[0].text)) == keys
    assert len({answer.tokens for answer in answers}) > 1, "sampling makes a difference"


# --- masks -------------------------------------------------------------------------------------------------------


def test_masks_are_a_function_of_the_tokens(guidance: LlGuidance, letters: Target) -> None:
    chance = random.Random(1)
    stops = sorted(letters.stop_ids())
    for grammar in (guidance.json_schema(SHORT), guidance.regex("(ab|a[bc]){2,4}x*"), guidance.choice(["ab", "abc"])):
        matcher = grammar.matcher(prompt_length=2, stop_ids=stops)
        tokens = [7, 7]
        while True:
            for _ in range(4):  # look ahead along allowed and forbidden drafts
                drafts: list[int] = []
                for _ in range(chance.randrange(5)):
                    mask_V = matcher.mask(tokens, drafts)
                    lawful_ids = [] if mask_V is None else mask_V.nonzero()[:, 0].tolist()
                    drafts.append(chance.choice(lawful_ids or [9]) if chance.random() < 0.8 else chance.randrange(96))
                fresh = grammar.matcher(prompt_length=2, stop_ids=stops).mask([*tokens, *drafts], [])
                seen = matcher.mask(tokens, drafts)
                expected = fresh_or_none(grammar, tokens, drafts, stops)
                assert (seen is None) == (expected is None)
                if seen is not None and expected is not None:
                    assert torch.equal(seen, expected)
                    assert fresh is not None
                    assert torch.equal(seen, fresh)
            mask_V = matcher.mask(tokens, [])
            assert mask_V is not None
            token = chance.choice(mask_V.nonzero()[:, 0].tolist())
            tokens.append(token)
            if token in stops:
                assert matcher.mask(tokens[:-1], [token]) is None
                break
        assert matcher.failure is None


def fresh_or_none(grammar: Any, tokens: list[int], drafts: list[int], stops: list[int]) -> Any:
    """The mask behind drafts, computed step by step by fresh matchers."""
    for count in range(len(drafts)):
        mask_V = grammar.matcher(prompt_length=2, stop_ids=stops).mask([*tokens, *drafts[:count]], [])
        if mask_V is None or not mask_V[drafts[count]] or drafts[count] in stops:
            return None
    return grammar.matcher(prompt_length=2, stop_ids=stops).mask([*tokens, *drafts], [])


def test_the_end_is_allowed_where_the_grammar_is_satisfied_and_alone_where_it_is_complete(
    guidance: LlGuidance, letters: Target
) -> None:
    encode = letters.tokenizer.encode
    matcher = guidance.regex("ab?").matcher(prompt_length=0, stop_ids=[1, 3])
    allowed = [matcher.mask(encode(text), []).nonzero()[:, 0].tolist() for text in ("", "a", "ab")]  # type: ignore[union-attr]
    assert allowed == [encode("a"), [1, 3, *encode("b")], [1, 3]]


# --- answers -----------------------------------------------------------------------------------------------------


def test_every_way_of_drafting_gives_one_answer(letters: Target, short: Any) -> None:
    asked, answers = short
    alone = [Engine(letters).generate([replace(one, speculation=OFF)])[0].tokens for one in asked[:: len(WAYS)]]
    check_json(answers, {"a", "b"})
    assert tokens_of(answers[:: len(WAYS)]) == alone
    assert sum(answer.stats.accepted for answer in answers) > 0


@each("beside", [False, True])
def test_suffix_drafts_give_the_same_answer(
    letters: Target, tiny_drafter: Drafter, guidance: LlGuidance, beside: bool
) -> None:
    ways = (OFF, Speculation(mode="fixed", depth=6, method="suffix"), Speculation(method="suffix"))
    asked = requests(letters, guidance.json_schema(SHORT), ways)
    suffix = replace(options(), suffix=SuffixConfig(max_spec_factor=4.0))
    engine = Engine(letters, tiny_drafter if beside else None, config=suffix)
    for _ in range(2):  # the second time the answers can be drafted
        answers = engine.generate(asked)
        check_json(answers, {"a", "b"}, ways=len(ways))
    alone = [Engine(letters).generate([one])[0].tokens for one in asked[:: len(ways)]]
    assert [answer.tokens for answer in answers[:: len(ways)]] == alone
    assert sum(answer.stats.suffix_accepted for answer in answers) > 0


def test_chains_continued_by_suffix_drafts_give_the_same_answer(
    letters: Target, tiny_drafter: Drafter, guidance: LlGuidance, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a grammar that forbids the target's most frequent character and leaves the drafter something to guess."""
    (free,) = Engine(letters).generate(requests(letters, None, [OFF], prompt=prompts[-1])[:1])
    grammar = guidance.regex(f"[^{re.escape(Counter(free.text).most_common(1)[0][0])}]+")
    asked = requests(letters, grammar, [AUTO], prompt=prompts[-1])
    alone = [Engine(letters).generate([replace(one, speculation=OFF)])[0].tokens for one in asked]
    assert free.tokens not in alone
    engine = Engine(letters, tiny_drafter, config=replace(options(), suffix=SuffixConfig(max_spec_factor=4.0)))
    extend_every_round(monkeypatch, engine)
    continued = 0

    def count(delta: OutputDelta) -> None:
        nonlocal continued
        continued += delta.drafted > delta.suffix_drafted > 0

    for _ in range(2):  # the second time the answers can be drafted
        assert tokens_of(engine.generate(asked, on_piece=count)) == alone
    assert continued


@each("chosen", [False, True])
def test_trees_give_the_same_answer(letters: Target, tiny_drafter: Drafter, short: Any, chosen: bool) -> None:
    asked, expected = short
    tree = Tree(depth=3, width=3, budget=8)
    if chosen:
        engine = engine_with_trees(letters, tiny_drafter, tree)
    else:
        engine = Engine(letters, tiny_drafter, config=options(tree=tree))
    answers = engine.generate(asked)
    check_json(answers, {"a", "b"})
    assert tokens_of(answers) == tokens_of(expected)
    assert not chosen or engine.controller.report()["rows_in_trees"] > 0


def test_rounds_on_a_device_give_the_same_answer(letters: Target, tiny_drafter: Drafter, guidance: LlGuidance) -> None:
    asked = requests(letters, guidance.json_schema(SHORT), (at_depth(1), at_depth(3), AUTO))[:6]
    free = [replace(one, grammar=None) for one in asked]
    expected = Engine(letters, tiny_drafter, config=options()).generate([*asked, *free])
    by_request = dict(zip([*asked, *free], expected, strict=True))
    for share in ([*asked, *free], asked[1:2], asked[1::3]):  # the last two are drafted and verified at once
        answers = round_engine(letters, tiny_drafter, options()).generate(share)
        assert tokens_of(answers) == [by_request[one].tokens for one in share]


def test_preemption_does_not_show(letters: Target, tiny_drafter: Drafter, short: Any) -> None:
    asked, expected = short
    memory = bytes_for(24, letters, tiny_drafter)
    engine = Engine(letters, tiny_drafter, config=options(max_model_len=88, memory=memory))
    assert tokens_of(run_preempted(engine, asked)) == tokens_of(expected)


@pytest.mark.slow
@pytest.mark.default
def test_a_real_schema_on_the_default_target(default_target: Target) -> None:
    drafter = load_drafter("smollm2-eagle3.1").float()
    drafter = drafter.share_target(default_target.embedding(), default_target.head())
    grammar = LlGuidance(default_target.tokenizer, default_target.facts.vocab_size).json_schema(BIRD)
    prompt = default_target.encode_chat([{"role": "user", "content": "Describe the barn owl as JSON."}])
    ways = (at_depth(4), AUTO)
    asked = requests(default_target, grammar, ways, prompt=tuple(prompt), max_new_tokens=48)[:4]
    beside = replace(asked[0], grammar=None, max_new_tokens=8)
    alone = Engine(default_target, config=EngineConfig(memory=2**28, max_model_len=512))
    plain = tokens_of(alone.generate([replace(one, speculation=OFF) for one in asked[::2]]))
    chains = Engine(default_target, drafter, config=EngineConfig(memory=2**28, max_model_len=512))
    answers = chains.generate([*asked, beside])[:-1]
    check_json(answers, set(BIRD["required"]), 2)  # type: ignore[call-overload]
    assert tokens_of(answers[::2]) == plain
    assert all(answer.stats.accepted > 0 for answer in answers[::2])
    tree = Tree(depth=4, width=3, budget=8)
    trees = Engine(default_target, drafter, config=EngineConfig(memory=2**28, max_model_len=512, tree=tree))
    assert tokens_of(trees.generate(asked[::2])) == plain


# --- limits ------------------------------------------------------------------------------------------------------


def test_an_answer_may_be_too_short_for_its_grammar(letters: Target, guidance: LlGuidance) -> None:
    (answer,) = Engine(letters).generate(requests(letters, guidance.json_schema(SHORT), max_new_tokens=4)[:1])
    assert answer.finished is FinishReason.LENGTH
    assert len(answer.tokens) == 4


@each(
    ("make", "reason"),
    [
        (lambda g: g.json_schema({"type": "objekt"}), "objekt"),
        (lambda g: g.json_schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (lambda g: g.json_schema("{"), "EOF"),
        (lambda g: g.json_schema("false"), "object schema"),
        (lambda g: g.json_schema({"enum": []}), "Unsatisfiable"),
        (lambda g: g.json_schema({"$ref": "#"}), "no text satisfies it"),
        (lambda g: g.json_schema({"$ref": "http://elsewhere.invalid/x"}), "elsewhere.invalid"),
        (lambda g: g.regex("(a"), "unclosed group"),
        (lambda g: g.regex("(?=a)b"), "look-around"),
        (lambda g: g.regex(r"[^\s\S]"), "no text satisfies it"),
        (lambda g: g.regex("é"), "no text satisfies it"),  # no token has these bytes
        (lambda g: g.grammar("start: foo"), "foo"),
        (lambda g: g.choice([]), "0 choices"),
        (lambda g: g.regex("a" * (MOST_CHARACTERS + 1)), f"{MOST_CHARACTERS:,}"),
    ],
)
def test_what_cannot_be_followed_is_refused_with_the_reason(guidance: LlGuidance, make: Any, reason: str) -> None:
    with pytest.raises(UserError, match=reason.replace("?", r"\?")):
        make(guidance)


def test_no_other_option_may_decide_where_an_answer_ends(letters: Target, guidance: LlGuidance) -> None:
    grammar = guidance.choice(["yes", "no"])
    asked: dict[str, Any] = {"prompt": (5,), "sampling": Sampling(), "max_new_tokens": 4, "grammar": grammar}
    with pytest.raises(UserError, match="stop token"):
        Request(**asked)
    with pytest.raises(UserError, match="min_new_tokens"):
        Request(**asked, stop_ids=frozenset({1}), min_new_tokens=2)
    with pytest.raises(UserError, match="allowed_tokens"):
        Request(**asked | {"sampling": Sampling(allowed_tokens=frozenset({9}))}, stop_ids=frozenset({1}))
    other = LlGuidance(letters.tokenizer, 97).choice(["yes"])
    with pytest.raises(UserError, match="97"):
        Engine(letters).submit(Request(**asked | {"grammar": other}, stop_ids=frozenset({1})))


def test_stop_ids_that_do_not_exist_stop_nothing(letters: Target, guidance: LlGuidance) -> None:
    (first, *_) = requests(letters, guidance.choice(["yes"]), max_new_tokens=9)
    stops = frozenset({2**40, -3})
    engine = Engine(letters)
    (answer,) = engine.generate([replace(first, stop_ids=stops | letters.stop_ids())])
    assert (answer.text, answer.finished) == ("yes", FinishReason.STOP)
    (answer,) = engine.generate([replace(first, stop_ids=stops)])
    assert answer.finished is FinishReason.ERROR


def test_a_lexer_that_other_requests_filled_is_renewed(letters: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of one grammar share its lexer; none may fail because of the others' text."""
    monkeypatch.setitem(PARSER_LIMITS, "max_lexer_states", 30)
    chance, guidance = random.Random(1), LlGuidance(letters.tokenizer, letters.facts.vocab_size)
    shared = guidance.regex("([a-m].{0,30}[n-z]){1,9}")
    renewed = 0
    for _ in range(12):
        matcher, tokens = shared.matcher(prompt_length=0, stop_ids=[1]), list[int]()
        alone = guidance.regex("([a-m].{0,30}[n-z]){1,9}").matcher(prompt_length=0, stop_ids=[1])
        for _ in range(6):
            mask_V, expected_V = matcher.mask(tokens, []), alone.mask(tokens, [])
            assert mask_V is not None, matcher.failure
            assert expected_V is not None
            assert torch.equal(mask_V, expected_V)
            tokens.append(chance.choice([token for token in mask_V.nonzero()[:, 0].tolist() if token != 1]))
        renewed += matcher._renewed
    assert renewed > 0
    assert not shared.exhausted


class _Failing:
    """A grammar that becomes too complex after two tokens."""

    vocab_size = 96

    def matcher(self, *, prompt_length: int, stop_ids: Any) -> Any:
        self.failure: str | None = None
        self._start = prompt_length
        return self

    def mask(self, tokens: Any, drafts: Any) -> Any:
        if len(tokens) - self._start >= 2:
            self.failure = "too complex"
            return None
        return torch.ones(96, dtype=torch.bool)


def test_a_grammar_that_fails_ends_its_own_request_only(letters: Target, tiny_drafter: Drafter) -> None:
    failing, *others = requests(letters, None, max_new_tokens=12)[:4]
    engine = Engine(letters, tiny_drafter, config=options())
    expected = engine.generate(others)
    answer, *beside = engine.generate([replace(failing, grammar=_Failing()), *others])
    assert answer.finished is FinishReason.ERROR
    assert tokens_of(beside) == tokens_of(expected)
