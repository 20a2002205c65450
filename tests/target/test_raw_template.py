"""`--raw`: plain text as the tokenizer itself would begin it, and its continuation."""

from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from chat_tokenizer import chat_tokenizer, with_bos
from each import each
from eyas.errors import UserError
from eyas.target.chat_template import ChatFormat
from eyas.target.template_override import apply_format


def sentencepiece_like(scheme: str) -> PreTrainedTokenizerFast:
    """Words begin with a sign for the space before them, the first one too."""
    words = ["<s>", "</s>", "<unk>", "▁", *"abcdefghijklmnopqrstuvwxyzHW"]
    backend = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    backend.decoder = decoders.Metaspace(prepend_scheme=scheme, split=False)
    backend.add_tokens([AddedToken(token, special=True, normalized=False) for token in ("<s>", "</s>")])
    return with_bos(PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>"))


def raw(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    tokenizer.chat_template = None
    apply_format(tokenizer, ChatFormat(raw=True))
    return tokenizer


def rendered(tokenizer: PreTrainedTokenizerFast, *messages: Any, opening: bool = True) -> str:
    turns = [{"role": role, "content": content} for role, content in messages]
    return str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=opening))


@each(
    "tokenizer",
    [
        chat_tokenizer(""),
        chat_tokenizer("", bos="<s>"),  # it has a BOS but does not put it before plain text
        with_bos(chat_tokenizer("", bos="<s>")),
        with_bos(chat_tokenizer("", bos="<s>"), suffix="</s>"),
        sentencepiece_like("first"),
        sentencepiece_like("always"),
    ],
)
def test_a_prompt_has_the_ids_of_plain_text(tokenizer: PreTrainedTokenizerFast) -> None:
    raw(tokenizer)
    text = "What is a falcon"
    ids = tokenizer.encode(rendered(tokenizer, ("user", text)), add_special_tokens=False)
    plain = tokenizer.encode(text)
    assert ids == (plain[:-1] if plain[-1] == tokenizer.eos_token_id else plain)


def test_the_answer_continues_the_text_and_ends_it() -> None:
    tokenizer = with_bos(raw(with_bos(chat_tokenizer("", bos="<s>"))))
    asked = ("system", "S"), ("user", "Once")
    assert rendered(tokenizer, *asked) == "<s>S\nOnce"
    assert rendered(tokenizer, *asked, ("assistant", " upon"), opening=False) == "<s>S\nOnce upon</s>"
    more = (*asked, ("assistant", " upon"), ("user", "More"))
    assert rendered(tokenizer, *more) == "<s>S\nOnce upon\nMore"


def test_contents_in_parts_and_text_that_looks_like_a_template() -> None:
    tokenizer = raw(chat_tokenizer(""))
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "{{ b }}"}]
    assert rendered(tokenizer, ("user", parts)) == "a {{ b }}"
    assert rendered(tokenizer, ("user", "  x\n\n")) == "  x\n\n"


def test_tool_calls_are_refused() -> None:
    tokenizer = raw(chat_tokenizer(""))
    with pytest.raises(Exception, match="no place for tool calls"):
        tokenizer.apply_chat_template([{"role": "assistant", "tool_calls": [{"id": "1"}]}], tokenize=False)


def test_raw_and_a_template_exclude_each_other() -> None:
    with pytest.raises(UserError, match="give one of them"):
        ChatFormat(raw=True, template="{{ messages }}")


def test_variables_that_are_not_the_templates_are_refused() -> None:
    for name in ("tools", "messages", "eos_token", "tokenize"):
        with pytest.raises(UserError, match=f"chat_template_kwargs has '{name}'"):
            apply_format(chat_tokenizer("{{ messages }}"), ChatFormat(variables={name: 1}))
