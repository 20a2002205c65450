"""The mask marks what the target would generate: every assistant turn with its closing token, nothing else."""

import pytest
from transformers import PreTrainedTokenizerFast

from chat_tokenizer import CHATML, chat_tokenizer, masked_runs
from each import each
from eyas.data.chat_encoder import ChatEncoder, Encoded, merge
from eyas.data.conversations import Conversation, Message, Sample
from eyas.errors import UserError

SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "[INST]", "[/INST]", "<think>", "</think>")

MISTRAL = (
    "<s>{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
    "{% elif m['role'] == 'assistant' %}{{ m['content'] }}</s>{% endif %}{% endfor %}"
)
BARE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FORGETS_THINKING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' and not loop.last %}"
    "{{ m['content'].split('</think>')[-1] }}{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    """A pair merges across the end of an opening: a newline and an 'x'."""
    return chat_tokenizer(template, special=SPECIAL, merges=[("Ċ", "x")])


def encode_rows(
    template: str, messages: list[Message], *, finished: bool = True
) -> tuple[PreTrainedTokenizerFast, tuple[Encoded, ...]]:
    chosen = tokenizer(template)
    stops = chosen.convert_tokens_to_ids(["</s>", "<|im_end|>"])
    conversation = Conversation(messages=tuple(messages), where="f:1", finished=finished)
    return chosen, ChatEncoder(chosen, stops).encode(conversation)


def encode(template: str, messages: list[Message], *, finished: bool = True) -> tuple[PreTrainedTokenizerFast, Encoded]:
    """The only row, for a template that keeps earlier turns."""
    chosen, (row,) = encode_rows(template, messages, finished=finished)
    return chosen, row


def turns(*texts: str) -> list[Message]:
    return [{"role": "user" if i % 2 == 0 else "assistant", "content": text} for i, text in enumerate(texts)]


@each(
    ("template", "closing"),
    [(CHATML, "<|im_end|>"), (MISTRAL, "</s>"), (MARKED, "<|im_end|>"), (BARE, "\n")],
)
def test_every_answer_is_masked_with_its_closing_token_and_nothing_else(template: str, closing: str) -> None:
    chosen, encoded = encode(template, turns("Hi", "Hello, you", "And?", "Bye"))
    assert masked_runs(chosen, encoded) == [f"Hello, you{closing}", f"Bye{closing}"]


@each(
    ("template", "closing"),
    [(CHATML, "<|im_end|>"), (MISTRAL, "</s>"), (MARKED, "<|im_end|>")],
)
def test_the_closing_token_of_an_answer_that_a_length_ended_is_not_masked(template: str, closing: str) -> None:
    messages = turns("Hi", "Hello, you", "And?", "Bye and")
    chosen, encoded = encode(template, messages, finished=False)
    assert masked_runs(chosen, encoded) == [f"Hello, you{closing}", "Bye and"]
    assert encode(template, messages)[1].ids == (*encoded.ids, chosen.convert_tokens_to_ids(closing))


def test_ids_are_those_of_the_tokenizers_own_template() -> None:
    messages = turns("Hi", "Hello")
    chosen, encoded = encode(CHATML, messages)
    theirs = chosen.apply_chat_template([dict(m) for m in messages], return_dict=False)
    assert list(encoded.ids) == theirs[:-1]  # the newline behind the stop token, nobody has said yet


def test_prompts_that_are_tokenised_turn_by_turn_have_the_ids_of_the_whole() -> None:
    chosen = tokenizer(CHATML)
    encoder = ChatEncoder(chosen, chosen.convert_tokens_to_ids(["</s>", "<|im_end|>"]))
    messages = turns("Hi", "xy", "\nx\n x", " é\n", "<|im_end|>x", "Bye")
    assert encoder._seams
    for sample, end in zip(
        encoder.samples(Conversation(messages=tuple(messages), where="f:1")), (1, 3, 5), strict=True
    ):
        before = [dict(m) for m in messages[:end]]
        assert list(sample.prompt_ids) == chosen.apply_chat_template(
            before, add_generation_prompt=True, return_dict=False
        )


def test_system_prompts_and_thinking_are_kept() -> None:
    messages: list[Message] = [{"role": "system", "content": "Be brief."}, *turns("Hi", "<think>Hm</think>Hello")]
    chosen, encoded = encode(CHATML, messages)
    assert "Be brief." in str(chosen.decode(encoded.ids))
    assert masked_runs(chosen, encoded) == ["<think>Hm</think>Hello<|im_end|>"]


def test_an_answer_is_tokenised_apart_from_its_prompt() -> None:
    # "assistant\n" + "xy": newline and x would merge into one token, but the target generated the x alone.
    chosen, encoded = encode(CHATML, turns("Hi", "xy"))
    assert masked_runs(chosen, encoded) == ["xy<|im_end|>"]


def test_an_answer_that_later_prompts_tokenise_differently_has_its_own_row() -> None:
    chosen, rows = encode_rows(CHATML, turns("Hi", "xy", "And?", "Bye"))
    assert [masked_runs(chosen, row) for row in rows] == [["xy<|im_end|>"], ["Bye<|im_end|>"]]


def test_a_conversation_without_answers_has_no_rows() -> None:
    assert encode_rows(CHATML, turns("Hi"))[1] == ()


def test_a_template_that_drops_earlier_thinking_makes_a_row_of_every_answer() -> None:
    chosen, encoded = encode(FORGETS_THINKING, turns("Hi", "<think>Hm</think>Hello"))
    assert masked_runs(chosen, encoded) == ["<think>Hm</think>Hello<|im_end|>"]
    chosen, rows = encode_rows(FORGETS_THINKING, turns("Hi", "<think>Hm</think>Hello", "And?", "Bye"))
    assert [masked_runs(chosen, row) for row in rows] == [["<think>Hm</think>Hello<|im_end|>"], ["Bye<|im_end|>"]]
    assert "Hm" not in str(chosen.decode(rows[1].ids))


def test_a_tokenizer_without_a_template_is_refused_where_it_is_needed() -> None:
    conversation = Conversation(messages=tuple(turns("Hi", "Hello")), where="f:1")
    with pytest.raises(UserError, match="no chat template"):
        ChatEncoder(tokenizer(None), []).encode(conversation)


def test_token_ids_of_a_record_are_used_without_a_template() -> None:
    said = Sample(prompt_ids=(5, 6), answer_ids=(7, 8))
    conversation = Conversation(messages=tuple(turns("Hi", "Hello")), where="f:1", samples=(said,), finished=False)
    rows = ChatEncoder(tokenizer(None), []).encode(conversation)
    assert rows == (Encoded(ids=(5, 6, 7, 8), mask=(False, False, True, True)),)


def test_a_sample_extends_the_row_that_its_prompt_begins_with() -> None:
    first, second = Sample(prompt_ids=(1,), answer_ids=(2, 3)), Sample(prompt_ids=(1, 2, 3, 4), answer_ids=(5,))
    assert merge([first, second]) == (Encoded(ids=(1, 2, 3, 4, 5), mask=(False, True, True, False, True)),)


@each("prompt", [(1, 2), (1, 2, 9, 4), (9, 2, 3, 4)])
def test_a_sample_whose_prompt_is_another_text_starts_a_row(prompt: tuple[int, ...]) -> None:
    first, second = Sample(prompt_ids=(1,), answer_ids=(2, 3)), Sample(prompt_ids=prompt, answer_ids=(5,))
    assert merge([first, second]) == (*merge([first]), *merge([second]))


def test_a_row_is_shortened_by_whole_answers() -> None:
    row = Encoded(ids=(1, 2, 3, 4, 5, 6), mask=(False, True, True, False, True, True))
    assert row.shortened(6) is row
    assert row.shortened(5) == row.shortened(3) == Encoded(ids=(1, 2, 3), mask=(False, True, True))
    assert row.shortened(2) is None


def test_a_refusal_of_the_template_names_the_line() -> None:
    with pytest.raises(UserError, match=r"f:1: .*no such order"):
        encode("{{ raise_exception('no such order') }}", turns("Hi", "Hello"))
