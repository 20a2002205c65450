"""Answers become the message that a client would send back: what the template has fields for is told apart."""

from types import SimpleNamespace
from typing import Any, cast

from chat_tokenizer import chat_tokenizer
from each import each
from eyas.serve.builders.answer_reader import AnswerReader, ReadAnswer
from eyas.target.model import Target

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
TAGS = "<think></think>{{ tools }}<tool_call>"
KNOWN = TAGS + "{% for m in messages %}{{ m.thinking }}{% endfor %}"
IN_CALLS = TAGS + "{% for m in messages %}{% if m.tool_calls %}{{ m.reasoning_content }}{% endif %}{% endfor %}"
UNKNOWN = TAGS + "{# block['thinking'] #}"
HARMONY = "<|channel|>analysis<|message|>"


def read(template: str, prompt: str, text: str, tools: list[dict[str, Any]] | None = None) -> ReadAnswer:
    tokenizer = chat_tokenizer(template)
    reader = AnswerReader(cast(Target, SimpleNamespace(tokenizer=tokenizer)))
    answer = reader.read(tokenizer.encode(prompt), tools or [])
    for letter in text:
        answer.feed(letter)
    return answer


@each("template", [KNOWN, IN_CALLS])
def test_reasoning_has_a_field_where_the_template_has_one(template: str) -> None:
    answer = read(template, "assistant\n", "<think>\nHm\n</think>\n\nHi")
    assert answer.message() == {"role": "assistant", "content": "\n\nHi", "reasoning_content": "\nHm\n"}
    assert (answer.thinking_tokens, answer.tokens) == (len("<think>\nHm\n</think>"), 23)


def test_reasoning_stays_in_the_content_where_the_template_has_no_field() -> None:
    answer = read(UNKNOWN, "assistant\n", "<think>\nHm\n</think>\n\nHi")
    assert answer.message() == {"role": "assistant", "content": "<think>\nHm\n</think>\n\nHi"}
    assert answer.thinking_tokens == 19


@each(
    ("prompt", "text", "thinking"),
    [
        ("a\n<think>\n", "Hm", 2),
        ("a\n<think>\n", "Hm</thin", 8),
        ("a\n<think>\n\n</think>\n\n", "Hm", 0),
        ("a\n", "Hm", 0),
    ],
)
def test_reading_knows_whether_reasoning_has_ended(prompt: str, text: str, thinking: int) -> None:
    assert read(KNOWN, prompt, text).thinking_tokens == thinking


def test_harmony_channels_are_separated() -> None:
    text = "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>final<|message|>Hi"
    answer = read(HARMONY, "<|start|>assistant", text)
    assert answer.message() == {"role": "assistant", "content": "Hi", "reasoning_content": "Hm"}
    assert answer.thinking_tokens == text.index("<|start|>")


def test_calls_are_parsed_if_tools_were_offered() -> None:
    text = '<tool_call>{"name": "look", "arguments": {"at": 1}}</tool_call>'
    assert read(KNOWN, "a\n", text).message() == {"role": "assistant", "content": text}
    (call,) = read(KNOWN, "a\n", text, [TOOL]).message()["tool_calls"]
    assert call["function"] == {"name": "look", "arguments": '{"at": 1}'}
    assert read(KNOWN, "a\n", text, [{"odd": 1}]).message()["content"] == text


def test_a_template_without_formats_leaves_text_as_it_is() -> None:
    answer = read("{{ messages }}", "a", "<think>Hi</s>")
    assert answer.message() == {"role": "assistant", "content": "<think>Hi</s>"}
    assert answer.thinking_tokens == 0
