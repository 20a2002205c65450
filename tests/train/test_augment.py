"""A share of the conversations is rendered in another way, by seed and index alone, and only if that is correct."""

from collections import Counter

import pytest
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from chat_tokenizer import CHATML, chat_tokenizer, masked_runs
from each import each
from eyas.data.chat_encoder import ChatEncoder
from eyas.data.conversations import Conversation, Message, Sample
from eyas.errors import UserError
from eyas.train.corpus.augment import SYSTEM_PROMPTS, Augmenter
from eyas.train.corpus.encoding import encode_conversations
from eyas.train.recipe import Augmentation
from eyas.train.recipe_file import read_recipe

DEFAULT_SYSTEM = "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nBe good.<|im_end|>\n{% endif %}" + CHATML
WITH_BOS = "<s>" + DEFAULT_SYSTEM
REFUSES_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML
UNLIKE_A_SYSTEM_TURN = "A chat:\n" + CHATML

QUESTION: Message = {"role": "user", "content": "Hi"}
ANSWER: Message = {"role": "assistant", "content": "Hello, you"}
SYSTEM: Message = {"role": "system", "content": "Be bad."}


def rendered(
    kind: str, tokenizer: PreTrainedTokenizerBase, stops: list[int], *messages: Message
) -> tuple[str, list[str], str | None]:
    """Rendered text, its masked parts, and the kind that was applied."""
    encoder = ChatEncoder(tokenizer, stops)
    augmenter = Augmenter(encoder, tokenizer, Augmentation(**{kind: 1.0}), seed=0)
    (encoded,), applied = augmenter.encode(Conversation(messages=messages, where="f:1"), 0)
    return str(tokenizer.decode(encoded.ids)), masked_runs(tokenizer, encoded), applied


def with_template(template: str) -> tuple[PreTrainedTokenizerFast, list[int]]:
    chosen = chat_tokenizer(template, bos="<s>")
    return chosen, chosen.convert_tokens_to_ids(["</s>", "<|im_end|>"])


TURNS = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello, you<|im_end|>"
ANSWERED = ["Hello, you<|im_end|>"]


@each("before", [(), (SYSTEM,)])
@each(("template", "left"), [(CHATML, TURNS), (DEFAULT_SYSTEM, TURNS), (WITH_BOS, "<s>" + TURNS)])
def test_no_system_removes_the_system_turn(template: str, left: str, before: tuple[Message, ...]) -> None:
    made = rendered("no_system", *with_template(template), *before, QUESTION, ANSWER)
    assert made == (left, ANSWERED, "no_system")


def test_a_prefix_unlike_a_system_turn_stays_and_is_counted() -> None:
    text, masked, outcome = rendered("no_system", *with_template(UNLIKE_A_SYSTEM_TURN), QUESTION, ANSWER)
    assert (text, masked, outcome) == ("A chat:\n" + TURNS, ANSWERED, "no_system impossible")


def test_no_bos_removes_only_the_bos_token() -> None:
    default = "<|im_start|>system\nBe good.<|im_end|>\n"
    made = rendered("no_bos", *with_template(WITH_BOS), QUESTION, ANSWER)
    assert made == (default + TURNS, ANSWERED, "no_bos")


def test_a_template_without_bos_stays_and_is_counted() -> None:
    made = rendered("no_bos", *with_template(CHATML), QUESTION, ANSWER)
    assert made == (TURNS, ANSWERED, "no_bos impossible")


def test_a_bos_token_that_opens_every_turn_stays_and_is_counted() -> None:
    chosen = chat_tokenizer(CHATML, bos="<|im_start|>")
    made = rendered("no_bos", chosen, chosen.convert_tokens_to_ids(["<|im_end|>"]), QUESTION, ANSWER)
    assert made == (TURNS, ANSWERED, "no_bos impossible")


def test_no_template_writes_contents_as_lines() -> None:
    made = rendered("no_template", *with_template(WITH_BOS), SYSTEM, QUESTION, ANSWER, QUESTION, ANSWER)
    assert made == ("Be bad.\nHi\nHello, you\nHi\nHello, you", ["Hello, you", "Hello, you"], "no_template")


@each("before", [(), (SYSTEM,)])
def test_varied_system_replaces_the_system_prompt(before: tuple[Message, ...]) -> None:
    text, masked, outcome = rendered("varied_system", *with_template(DEFAULT_SYSTEM), *before, QUESTION, ANSWER)
    assert text in [f"<|im_start|>system\n{prompt}<|im_end|>\n{TURNS}" for prompt in SYSTEM_PROMPTS]
    assert (masked, outcome) == (ANSWERED, "varied_system")


def test_a_template_that_refuses_system_prompts_gets_none() -> None:
    made = rendered("varied_system", *with_template(REFUSES_SYSTEM), QUESTION, ANSWER)
    assert made == (TURNS, ANSWERED, "varied_system impossible")


def test_sampled_answers_keep_their_prompt_and_are_counted() -> None:
    chosen, stops = with_template(CHATML)
    said = Conversation(messages=(QUESTION, ANSWER), where="f:1", samples=(Sample(prompt_ids=(1,), answer_ids=(2,)),))
    for kind in ("no_system", "no_bos", "no_template", "varied_system"):
        encoder = ChatEncoder(chosen, stops)
        augmenter = Augmenter(encoder, chosen, Augmentation(**{kind: 1.0}), seed=0)
        assert augmenter.encode(said, 0) == (encoder.encode(said), f"{kind} impossible")


@pytest.mark.slow
def test_shares_hold_are_counted_and_are_deterministic() -> None:
    chosen, stops = with_template(WITH_BOS)
    given = [Conversation(messages=(QUESTION, ANSWER), where="f:1")] * 1000
    wanted = Augmentation(no_system=0.1, no_bos=0.2, no_template=0.3, varied_system=0.1)

    def encoded(seed: int) -> tuple[list[int], Counter[str]]:
        corpus, counts = encode_conversations(given, chosen, stops, max_length=500, augmentation=wanted, seed=seed)
        return corpus.ids.tolist(), counts.augmented

    ids, done = encoded(1)
    assert {name: round(count / 1000, 1) for name, count in done.items()} == wanted.shares
    assert encoded(1) == (ids, done)
    assert encoded(2)[0] != ids


def test_without_shares_nothing_changes() -> None:
    chosen, stops = with_template(WITH_BOS)
    given = [Conversation(messages=(QUESTION, ANSWER), where="f:1")]
    plain, _ = encode_conversations(given, chosen, stops, max_length=500)
    off, counts = encode_conversations(given, chosen, stops, max_length=500, augmentation=Augmentation())
    assert plain.ids.tolist() == off.ids.tolist()
    assert not counts.augmented


def test_an_augmented_conversation_is_cut_at_turns_like_any_other() -> None:
    chosen, stops = with_template(WITH_BOS)
    long: Message = {"role": "assistant", "content": "w" * 100}
    given = [Conversation(messages=(QUESTION, ANSWER, QUESTION, long), where="f:1")]
    corpus, counts = encode_conversations(
        given, chosen, stops, max_length=60, augmentation=Augmentation(no_template=1.0)
    )
    assert str(chosen.decode(corpus.ids.tolist())) == "Hi\nHello, you"
    assert (counts.kept, counts.cut, counts.augmented) == (1, 1, Counter(no_template=1))


@each(
    ("shares", "message"),
    [
        ({"no_bos": 1.5}, r"data\.augment\.no_bos is 1\.5"),
        ({"no_system": -0.1}, r"data\.augment\.no_system is -0\.1"),
        ({"no_template": float("nan")}, "nan"),
        ({"no_system": 0.6, "no_bos": 0.6}, r"sum to 1\.2"),
    ],
)
def test_bad_shares_are_refused(shares: dict[str, float], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_recipe({"data": {"files": ["a.jsonl"], "augment": shares}, "output": {"folder": "runs/a"}})


@pytest.mark.slow
@pytest.mark.default
def test_the_default_targets_own_system_prompt_can_be_removed_and_replaced() -> None:
    from eyas.target.text import load_tokenizer

    tokenizer, stop_ids = load_tokenizer("smollm2")
    stops = sorted(stop_ids)
    (row,) = ChatEncoder(tokenizer, stops).encode(Conversation(messages=(QUESTION, ANSWER), where="f:1"))
    plain = str(tokenizer.decode(row.ids))
    assert "named SmolLM" in plain
    assert rendered("no_system", tokenizer, stops, QUESTION, ANSWER) == (TURNS, ANSWERED, "no_system")
    assert rendered("no_system", tokenizer, stops, SYSTEM, QUESTION, ANSWER) == (TURNS, ANSWERED, "no_system")
    assert rendered("no_bos", tokenizer, stops, QUESTION, ANSWER) == (plain, ANSWERED, "no_bos impossible")
    text, masked, outcome = rendered("varied_system", tokenizer, stops, QUESTION, ANSWER)
    assert "named SmolLM" not in text
    assert (text.endswith(TURNS), masked, outcome) == (True, ANSWERED, "varied_system")
    bare = rendered("no_template", tokenizer, stops, QUESTION, ANSWER)
    assert bare == ("Hi\nHello, you", ["Hello, you"], "no_template")
