"""A drafter is trained on answers of its own target, by fingerprint or name."""

from dataclasses import replace

import pytest

from each import each
from eyas.data.author_check import AuthorCheck
from eyas.data.conversations import Conversation, Sample
from eyas.errors import UserError

CHECK = AuthorCheck(source="models/Qwen3-8B", fingerprint="cafe", vocab_size=10)
OURS = Conversation(
    messages=({"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}),
    where="answers.jsonl:3",
    samples=(Sample(prompt_ids=(1, 2), answer_ids=(3, 9)),),
    author="qwen3-8b-q8_0.gguf",
    author_fingerprint="cafe",
)


def test_the_weights_decide_and_not_the_name() -> None:
    assert CHECK(OURS) is OURS
    with pytest.raises(
        UserError, match=r"answers\.jsonl:3: these answers are by models/Qwen3-8B, and the drafter is for"
    ):
        CHECK(replace(OURS, author="models/Qwen3-8B", author_fingerprint="beef"))
    with pytest.raises(UserError, match=r"or set data\.allow_other_authors to true"):
        CHECK(replace(OURS, author_fingerprint="beef", samples=()))
    other = replace(OURS, author_fingerprint="beef")
    assert replace(CHECK, allow_others=True)(other) is other


@each("name", ["Qwen/Qwen3-8B", "qwen3-8b", "/data/Qwen3-8B/", "C:\\models\\Qwen3-8B"])
def test_names_decide_where_weights_are_unknown(name: str) -> None:
    served = replace(OURS, author=name, author_fingerprint=None)
    assert CHECK(served) is served
    with pytest.raises(UserError, match="these answers are by Qwen/Qwen3-4B, and the drafter is for models/Qwen3-8B"):
        CHECK(replace(served, author="Qwen/Qwen3-4B"))


def test_conversations_without_an_author_pass() -> None:
    for given in (
        replace(OURS, author=None, author_fingerprint=None),
        replace(OURS, author="a column that is called target", author_fingerprint=None, samples=()),
    ):
        assert CHECK(given) is given


@each("sample", [Sample(prompt_ids=(10,), answer_ids=(1,)), Sample(prompt_ids=(1,), answer_ids=(10,))])
def test_tokens_outside_the_vocabulary_are_always_refused(sample: Sample) -> None:
    foreign = replace(OURS, samples=(*OURS.samples, sample))
    for check in (CHECK, replace(CHECK, allow_others=True)):
        with pytest.raises(UserError, match="a sample has token 10 and models/Qwen3-8B knows 0 to 9"):
            check(foreign)
