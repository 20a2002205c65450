"""The mask marks what the target would generate: every assistant turn with its closing token, nothing else."""

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from chat_tokenizer import CHATML, masked_runs
from eyas.data.chat_encoder import ChatEncoder, Encoded
from eyas.data.conversations import Conversation, Message
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
    "{% endfor %}"
)
FORGETS_THINKING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' and not loop.last %}"
    "{{ m['content'].split('</think>')[-1] }}{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
OPENS_OTHERWISE = (
    "{% for m in messages %}({{ m['role'] }}){{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}[assistant speaks]{% endif %}"
)


def tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    """One token per byte, and one pair that merges across the end of an opening: a newline and an 'x'."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    newline = "Ċ"
    vocab = {letter: i for i, letter in enumerate([*letters, f"{newline}x"])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[(newline, "x")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, eos_token="</s>")


def encode(template: str, messages: list[Message], *, finished: bool = True) -> tuple[PreTrainedTokenizerFast, Encoded]:
    chosen = tokenizer(template)
    stops = chosen.convert_tokens_to_ids(["</s>", "<|im_end|>"])
    conversation = Conversation(messages=tuple(messages), where="f:1", finished=finished)
    return chosen, ChatEncoder(chosen, stops).encode(conversation)


def turns(*texts: str) -> list[Message]:
    return [{"role": "user" if i % 2 == 0 else "assistant", "content": text} for i, text in enumerate(texts)]


@pytest.mark.parametrize(
    ("template", "closing"),
    [(CHATML, "<|im_end|>"), (MISTRAL, "</s>"), (MARKED, "<|im_end|>"), (BARE, "\n")],
    ids=["chatml", "mistral", "markers", "bare"],
)
def test_every_answer_is_masked_with_its_closing_token_and_nothing_else(template: str, closing: str) -> None:
    chosen, encoded = encode(template, turns("Hi", "Hello, you", "And?", "Bye"))
    assert masked_runs(chosen, encoded) == [f"Hello, you{closing}", f"Bye{closing}"]


@pytest.mark.parametrize(
    ("template", "closing"),
    [(CHATML, "<|im_end|>"), (MISTRAL, "</s>"), (MARKED, "<|im_end|>")],
    ids=["chatml", "mistral", "markers"],
)
def test_the_closing_token_of_an_answer_that_a_length_ended_is_not_masked(template: str, closing: str) -> None:
    messages = turns("Hi", "Hello, you", "And?", "Bye and")
    chosen, encoded = encode(template, messages, finished=False)
    assert masked_runs(chosen, encoded) == [f"Hello, you{closing}", "Bye and"]
    assert encoded.ids == encode(template, messages)[1].ids


def test_ids_are_those_of_the_tokenizers_own_template() -> None:
    messages = turns("Hi", "Hello")
    chosen, encoded = encode(CHATML, messages)
    theirs = chosen.apply_chat_template([dict(m) for m in messages], return_dict=False)
    assert list(encoded.ids) == theirs


def test_system_prompts_and_thinking_are_kept() -> None:
    messages: list[Message] = [{"role": "system", "content": "Be brief."}, *turns("Hi", "<think>Hm</think>Hello")]
    chosen, encoded = encode(CHATML, messages)
    assert "Be brief." in str(chosen.decode(encoded.ids))
    assert masked_runs(chosen, encoded) == ["<think>Hm</think>Hello<|im_end|>"]


def test_a_token_across_the_opening_is_not_masked() -> None:
    # "assistant\n" + "xy": newline and x merge into one token, which no target would have generated.
    chosen, encoded = encode(CHATML, turns("Hi", "xy"))
    assert masked_runs(chosen, encoded) == ["y<|im_end|>"]


def test_a_conversation_without_answers_has_an_empty_mask() -> None:
    _, encoded = encode(CHATML, turns("Hi"))
    assert encoded.trainable == 0


def test_a_template_that_forgets_earlier_thinking_is_refused_only_where_it_matters() -> None:
    chosen, encoded = encode(FORGETS_THINKING, turns("Hi", "<think>Hm</think>Hello"))
    assert masked_runs(chosen, encoded) == ["<think>Hm</think>Hello<|im_end|>"]
    with pytest.raises(UserError, match=r"f:1: .* rewrites turn 2 .* one record per answer"):
        encode(FORGETS_THINKING, turns("Hi", "<think>Hm</think>Hello", "And?", "Bye"))


def test_a_template_that_opens_a_turn_otherwise_is_refused() -> None:
    with pytest.raises(UserError, match=r"f:1: .* turn 2 otherwise .* generation"):
        encode(OPENS_OTHERWISE, turns("Hi", "Hello"))


def test_markers_that_mark_nothing_are_refused() -> None:
    template = MARKED.replace("m['role'] == 'assistant'", "m['role'] == 'nobody'")
    with pytest.raises(UserError, match="marks nothing"):
        encode(template, turns("Hi", "Hello"))


def test_a_tokenizer_without_a_template_is_refused() -> None:
    with pytest.raises(UserError, match="no chat template"):
        ChatEncoder(tokenizer(None), [])


def test_what_the_template_refuses_is_said_with_its_line() -> None:
    with pytest.raises(UserError, match=r"f:1: .*no such order"):
        encode("{{ raise_exception('no such order') }}", turns("Hi", "Hello"))
