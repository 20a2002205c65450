"""Options of chat requests for the template, checked in the prompt that the engine gets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from chat_tokenizer import letter_tokenizer
from each import each
from eyas.serve.protocol.completions import ChatCompletionRequest
from eyas.serve.protocol.request_policy import RequestPolicy

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}[quick]{% endif %}"
    "{% if reasoning_effort %}[{{ reasoning_effort }}]{% endif %}"
    "{% if budget %}{{ 7 // budget }}{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>{% endif %}"
)
ASKED = [{"role": "user", "content": "Hi"}]
BEGUN = [*ASKED, {"role": "assistant", "content": "It is"}]


@pytest.fixture
def thinker(target: Any, new_server: Any) -> Iterator[Any]:
    """A server whose template has variables."""
    with new_server(target=replace(target, tokenizer=letter_tokenizer(template=TEMPLATE))) as client:
        yield client


def prompt_of(client: Any, **fields: Any) -> str:
    """The prompt as text."""
    builder = client.application.context.request_builder
    body = ChatCompletionRequest.model_validate({"messages": ASKED} | fields)
    prompt = builder.chat(body, None).requests[0].prompt
    return str(client.engine.target.tokenizer.decode(prompt))


def test_variables_reach_the_template(thinker: Any) -> None:
    assert prompt_of(thinker) == "<|im_start|>Hi<|im_end|><|im_start|>"
    assert prompt_of(thinker, chat_template_kwargs={"enable_thinking": False, "unused": [1]}) == (
        "<|im_start|>Hi<|im_end|>[quick]<|im_start|>"
    )
    assert "[low]" in prompt_of(thinker, reasoning_effort="low")
    assert "[high]" in prompt_of(thinker, reasoning_effort="high", chat_template_kwargs={"reasoning_effort": "low"})
    assert thinker.chat(reasoning_effort="high", chat_template_kwargs={"enable_thinking": True}).status == 200


def test_request_variables_override_the_operators(target: Any, new_server: Any) -> None:
    variables = {"enable_thinking": False, "reasoning_effort": "low"}
    tokenizer = letter_tokenizer(template=TEMPLATE)
    with new_server(target=replace(target, tokenizer=tokenizer, template_variables=variables)) as client:
        assert prompt_of(client) == "<|im_start|>Hi<|im_end|>[quick][low]<|im_start|>"
        assert "[quick]" not in prompt_of(client, chat_template_kwargs={"enable_thinking": True})
        assert "[high]" in prompt_of(client, reasoning_effort="high")


def test_the_end_of_the_prompt_can_be_chosen(thinker: Any) -> None:
    assert prompt_of(thinker, add_generation_prompt=False) == "<|im_start|>Hi<|im_end|>"
    assert (
        prompt_of(thinker, messages=BEGUN, continue_final_message=True) == "<|im_start|>Hi<|im_end|><|im_start|>It is"
    )
    fields = {"messages": BEGUN, "continue_final_message": True, "add_generation_prompt": False}
    assert thinker.chat(**fields).status == 200


@each(
    ("fields", "parts"),
    [
        ({"chat_template_kwargs": {"messages": []}}, ["chat_template_kwargs", "messages"]),
        ({"chat_template_kwargs": {"tools": []}}, ["tools", "the field tools says it"]),
        ({"chat_template_kwargs": {"tokenize": False}}, ["tokenize"]),
        ({"chat_template_kwargs": {"chat_template": "x"}}, ["chat_template"]),
        ({"chat_template_kwargs": {"eos_token": "x"}}, ["eos_token"]),
        ({"chat_template_kwargs": {"self": 1}}, ["self"]),
        ({"chat_template_kwargs": []}, ["chat_template_kwargs"]),
        ({"chat_template_kwargs": {"budget": "x"}}, ["template", "refuses"]),
        ({"chat_template_kwargs": {str(number): 1 for number in range(33)}}, ["chat_template_kwargs", "32"]),
        ({"reasoning_effort": "huge"}, ["reasoning_effort", "huge", "low"]),
        ({"chat_template": "{{ messages }}"}, ["chat_template", "--trust-request-chat-template"]),
        ({"messages": BEGUN, "continue_final_message": True, "add_generation_prompt": True}, ["both true"]),
        ({"messages": [{"role": "user", "content": ""}], "continue_final_message": True}, ["no content"]),
    ],
)
def test_wrong_template_options_are_named(thinker: Any, fields: dict[str, Any], parts: list[str]) -> None:
    thinker.chat(**fields).assert_refused(400, *parts)
    thinker.all_back()


def test_a_template_of_the_request_needs_the_operators_trust(new_server: Any) -> None:
    with new_server(policy=RequestPolicy(trust_request_chat_template=True)) as client:
        assert prompt_of(client, chat_template="{{ messages[0].content }}!") == "Hi!"
        client.chat(chat_template="{{ oops(").assert_refused(400, "template", "refuses")
        client.chat(chat_template="{{ ''.__class__.__mro__[1].__subclasses__() }}").assert_refused(400, "template")
        client.chat(chat_template="{{ 1 // 0 }}").assert_refused(400, "template", "refuses")
