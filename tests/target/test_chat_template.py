"""Templates differ in what they take the arguments of a call for."""

import pytest

from chat_tokenizer import letter_tokenizer
from each import each
from eyas.target.chat_template import ChatTemplateOptions, render_chat

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


def test_a_template_that_fails_otherwise_is_not_tried_again() -> None:
    tokenizer = letter_tokenizer()
    tokenizer.chat_template = "{{ 'a' + 1 }}"
    with pytest.raises(TypeError, match="concatenate"):
        render_chat(tokenizer, MESSAGES[:1], None, ChatTemplateOptions())
