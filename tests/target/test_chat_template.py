"""Chat templates: tool calls, `--chat-template` and `--raw`."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from chat_tokenizer import chat_tokenizer, letter_tokenizer, with_bos
from each import each
from eyas.errors import UserError
from eyas.target.chat_template import (
    ChatFormat,
    ChatTemplateOptions,
    apply_format,
    read_template,
    render_chat,
    set_template,
)

CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "Rome", "sky": "blåu"}},
}
MESSAGES = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
OF_CALLS = "{% for m in messages %}{% for c in m.tool_calls or [] %}%s{% endfor %}{% endfor %}"


@each("written", ["'' + c.function.arguments", "c.function.arguments | tojson"])
def test_arguments_are_written_whether_a_template_wants_text_or_an_object(written: str) -> None:
    tokenizer = letter_tokenizer()
    tokenizer.chat_template = OF_CALLS.replace("%s", "{{ " + written + " }}")
    assert render_chat(tokenizer, MESSAGES, None, ChatTemplateOptions()) == '{"city": "Rome", "sky": "blåu"}'
    assert CALL["function"]["arguments"] == {"city": "Rome", "sky": "blåu"}, "the caller's own stay what they are"


def test_a_template_with_another_error_is_not_tried_again() -> None:
    tokenizer = letter_tokenizer()
    tokenizer.chat_template = "{{ 'a' + 1 }}"
    with pytest.raises(TypeError, match="concatenate"):
        render_chat(tokenizer, MESSAGES[:1], None, ChatTemplateOptions())


TEMPLATE = "{% for message in messages %}{{ message.content }}!{% endfor %}"


def test_a_file_or_the_template_itself(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text(TEMPLATE)
    assert read_template(str(file)) == TEMPLATE
    assert read_template(TEMPLATE) == TEMPLATE
    assert read_template("{% for" + "x" * 5000) == "{% for" + "x" * 5000  # longer than a file's name may be


@each("argument", ["nowhere.jinja", ".", ""])
def test_an_argument_that_is_neither_file_nor_template_is_refused(argument: str) -> None:
    with pytest.raises(UserError, match=r"--chat-template .*cannot be read"):
        read_template(argument)


def test_a_given_template_renders_conversations() -> None:
    tokenizer = letter_tokenizer()
    set_template(tokenizer, TEMPLATE)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False) == "ab!"


def test_a_template_is_tried_with_the_variables_of_the_run() -> None:
    template = "{{ messages[0].content + suffix }}"
    tokenizer = letter_tokenizer()
    apply_format(tokenizer, ChatFormat(template=template, variables={"suffix": "?"}))
    assert tokenizer.chat_template == template
    with pytest.raises(UserError, match="mend it"):
        apply_format(tokenizer, ChatFormat(template=template))


@each(
    ("template", "part"),
    [
        ("{% for message in messages %}", "mend it"),
        ("{{ nothing.at.all }}", "undefined"),
        ("{{ raise_exception('system first') }}", "system first"),
        ("{{ messages[0].content + 1 }}", "mend it"),
        ("{{ messages.__class__.__mro__ }}", "mend it"),  # the sandbox
        ("always the same", "leaves out what the user says"),
    ],
)
def test_a_template_that_cannot_render_is_refused(template: str, part: str) -> None:
    with pytest.raises(UserError, match=part):
        set_template(letter_tokenizer(), template)


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
