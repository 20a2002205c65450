"""`--chat-template`: read, tried and taken, or refused."""

from pathlib import Path

import pytest

from chat_tokenizer import letter_tokenizer
from each import each
from eyas.errors import UserError
from eyas.target.chat_template import ChatFormat
from eyas.target.template_override import apply_format, read_template, set_template

TEMPLATE = "{% for message in messages %}{{ message.content }}!{% endfor %}"


def test_a_file_or_the_template_itself(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text(TEMPLATE)
    assert read_template(str(file)) == TEMPLATE
    assert read_template(TEMPLATE) == TEMPLATE
    assert read_template("{% for" + "x" * 5000) == "{% for" + "x" * 5000  # longer than a file's name may be


@each("argument", ["nowhere.jinja", ".", ""])
def test_neither_is_refused(argument: str) -> None:
    with pytest.raises(UserError, match=r"--chat-template .*cannot be read"):
        read_template(argument)


def test_conversations_are_written_by_it() -> None:
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
def test_one_that_cannot_write_is_refused(template: str, part: str) -> None:
    with pytest.raises(UserError, match=part):
        set_template(letter_tokenizer(), template)
