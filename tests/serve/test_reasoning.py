"""Reasoning: told apart from content, counted, free of grammars, and given back to templates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import openai
import pytest
import torch

from eyas.engine.request import FinishReason
from eyas.errors import UserError
from eyas.grammar.after_reasoning import AfterReasoningGrammar
from eyas.serve.parsers import harmony
from eyas.serve.parsers.registry import choose_formats
from serve.conftest import serve
from serve.parser_cases import offered
from serve.scripted import joined, script, with_template
from serve.test_sockets import running

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from eyas.drafter.model import Drafter
    from eyas.target.model import Target

THINK = ("<think>", "</think>")
TURNS = (
    "{# <tool_call> </think> #}{% if tools %}{{ tools[0].function.name }}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}:{{ m.reasoning_content }}|{{ m.reasoning }}|"
    "{{ m.thinking }}|{{ m.content }}<|im_end|>{% endfor %}<|im_start|>END"
)
OPEN, UNSAID, CLOSED = (TURNS.replace("END", end) for end in ("<think>", "", "<think></think>"))


@pytest.fixture(scope="module")
def open_client(target: Target, tiny_drafter: Drafter) -> Iterator[Any]:
    """A template that opens the reasoning."""
    with serve(with_template(target, OPEN, THINK), tiny_drafter, reasoning_parser="qwen3") as client:
        yield client


@pytest.fixture
def thinking(open_client: Any) -> Iterator[Any]:
    """A server with an engine that a test may script."""
    generate = open_client.application.context.engine_client.generate
    yield open_client
    open_client.application.context.engine_client.generate = generate


def test_reasoning_and_content_come_in_fields_of_their_own(thinking: Any) -> None:
    script(thinking, "I add.</think>It is 4.")
    reply = thinking.chat().json
    message = {"role": "assistant", "content": "It is 4.", "reasoning": "I add."}
    assert reply["choices"][0]["message"] == message
    assert reply["usage"]["completion_tokens_details"] == {"reasoning_tokens": len("I add.")}
    streamed = thinking.chat(stream=True, stream_options={"include_usage": True})
    assert joined(streamed) == {"content": "It is 4.", "reasoning": "I add."}
    assert streamed.events[-1]["usage"]["completion_tokens_details"] == {"reasoning_tokens": 6}
    deltas = [event["choices"][0]["delta"] for event in streamed.events if event["choices"]]
    assert not any("reasoning_content" in delta for delta in deltas)


def test_an_answer_cut_while_thinking_is_all_reasoning(thinking: Any) -> None:
    script(thinking, "I ad", finished=FinishReason.LENGTH)
    (choice,) = thinking.chat().json["choices"]
    assert choice["message"] == {"role": "assistant", "content": None, "reasoning": "I ad"}
    assert choice["finish_reason"] == "length"


def test_calls_come_behind_reasoning(thinking: Any) -> None:
    script(thinking, 'Hm.</think>\n<tool_call>{"name": "now", "arguments": {}}</tool_call>')
    message = thinking.chat(tools=offered()).json["choices"][0]["message"]
    assert message["reasoning"] == "Hm."
    assert message["content"] is None
    assert message["tool_calls"][0]["function"] == {"name": "now", "arguments": "{}"}
    assert joined(thinking.chat(tools=offered(), stream=True)) == {"reasoning": "Hm.", "tool_calls": [["now", "{}"]]}
    unasked = thinking.chat(tools=offered(), tool_choice="none").json["choices"][0]["message"]
    assert unasked["content"].strip().startswith("<tool_call>")


def test_the_openai_client_finds_the_reasoning(target: Target, tiny_drafter: Drafter) -> None:
    spoken = with_template(target, OPEN, THINK)
    with serve(spoken, tiny_drafter, reasoning_parser="qwen3") as client, running(client) as server:
        script(client, "I add.</think>4")
        asking = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        ask: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "?"}]}
        message = asking.chat.completions.create(**ask).choices[0].message
        assert message.reasoning == "I add."
        assert message.content == "4"
        # An answer goes back as it came.
        ask["messages"] += [message, {"role": "user", "content": "Sure?"}]
        parts = [chunk.choices[0].delta for chunk in asking.chat.completions.create(**ask, stream=True)]
        assert "".join(getattr(part, "reasoning", None) or "" for part in parts) == "I add."


def test_a_prompt_that_closes_the_reasoning_leaves_only_content(target: Target, tiny_drafter: Drafter) -> None:
    closed = with_template(target, CLOSED, THINK)
    with serve(closed, tiny_drafter, reasoning_parser="deepseek_r1", reasoning_content_alias=True) as client:
        script(client, "It is 4.")
        reply = client.chat().json
        message = reply["choices"][0]["message"]
        assert message == {"role": "assistant", "content": "It is 4.", "reasoning": None, "reasoning_content": None}
        assert reply["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


def test_the_reasoning_content_alias_can_be_enabled(target: Target, tiny_drafter: Drafter) -> None:
    unsaid = with_template(target, UNSAID, THINK)
    with serve(unsaid, tiny_drafter, reasoning_parser="auto", reasoning_content_alias=True) as client:
        script(client, "<think>Hm.</think>4")
        message = client.chat().json["choices"][0]["message"]
        assert message == {"role": "assistant", "content": "4", "reasoning": "Hm.", "reasoning_content": "Hm."}
        assert joined(client.chat(stream=True)) == {"content": "4", "reasoning": "Hm.", "reasoning_content": "Hm."}
        text = client.complete().json["choices"][0]["text"]
        assert text == "<think>Hm.</think>4".replace("<think>", "").replace("</think>", "")


def test_without_a_reasoning_parser_all_is_content(target: Target, tiny_drafter: Drafter) -> None:
    with serve(with_template(target, UNSAID), tiny_drafter) as client:
        script(client, "<think>Hm.</think>4")
        reply = client.chat().json
        assert reply["choices"][0]["message"] == {"role": "assistant", "content": "<think>Hm.</think>4"}
        assert "completion_tokens_details" not in reply["usage"]


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
def test_reasoning_in_messages_reaches_the_template_under_all_its_names(thinking: Any, field: str) -> None:
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", field: "c"},
        {"role": "assistant", "content": None, field: "d"},
        {"role": "user", "content": "e"},
    ]
    seen: list[Any] = []
    tokenizer = thinking.application.context.engine_client.target.tokenizer
    apply = tokenizer.apply_chat_template
    tokenizer.apply_chat_template = lambda *given, **named: seen.append(apply(*given, **named)) or seen[-1]
    try:
        script(thinking, "x</think>y")
        assert thinking.chat(messages=messages).status == 200
    finally:
        del tokenizer.apply_chat_template
    prompt = seen[0]
    assert "assistant:c|c|c|b" in prompt
    assert "assistant:d|d|d|" in prompt
    assert "user:|||e" in prompt
    thinking.chat(messages=[{"role": "assistant"}]).assert_refused(400, "messages.0.content", "tool_calls")


def test_a_grammar_waits_for_the_end_of_reasoning(target: Target, tiny_drafter: Drafter) -> None:
    """The tiny target is made to end its thoughts by a bias; the rest keeps to the grammar, drafted or not."""
    for template in (OPEN, UNSAID, CLOSED):
        spoken = with_template(target, template, THINK)
        end, begin = (spoken.tokenizer.convert_tokens_to_ids(mark) for mark in ("</think>", "<think>"))
        with serve(spoken, tiny_drafter, reasoning_parser="qwen3") as client:
            told = []
            for mode in ({"mode": "off"}, {"mode": "fixed", "depth": 3}):
                fields: dict[str, Any] = {"structured_outputs": {"regex": "(yes|no)!"}, "max_tokens": 60}
                fields["speculative"] = mode | {"details": True}
                bias = {str(end): 8, str(begin): 8}
                told.append(client.chat(**fields, temperature=1, seed=5, logit_bias=bias).json["choices"][0])
            assert told[0]["message"] == told[1]["message"]
            assert told[0]["message"]["content"] in ("yes!", "no!"), (template, told[0])
            tokens = told[0]["speculative"]["tokens"]
            assert (end in tokens) == (template != CLOSED)
            assert (tokens[0] == begin) or template != UNSAID
            client.all_back()


class Letters:
    """A grammar whose answer is tokens 5 and 6."""

    vocab_size = 10

    def matcher(self, *, prompt_length: int, stop_ids: Collection[int]) -> LettersMatcher:
        return LettersMatcher(prompt_length)


class LettersMatcher:
    failure = None

    def __init__(self, prompt_length: int) -> None:
        self._prompt_length = prompt_length

    def mask(self, tokens: Sequence[int], drafts: Sequence[int]) -> Any:
        path = [*tokens[self._prompt_length :], *drafts]
        if path != [5, 6, 0][: len(path)] or len(path) > 2:
            return None
        mask = torch.zeros(10, dtype=torch.bool)
        mask[[5, 6, 0][len(path)]] = True
        return mask


def allowed(mask: Any) -> list[int] | None:
    return None if mask is None else [int(token) for token in mask.nonzero()[:, 0]]


def test_the_mask_is_a_function_of_the_tokens_alone() -> None:
    anything = list(range(10))
    opened = AfterReasoningGrammar(Letters(), ends=[[9]]).matcher(prompt_length=2, stop_ids=[0])
    assert allowed(opened.mask([1, 9], [])) == anything  # the prompt's own end does not count
    assert allowed(opened.mask([1, 9], [3, 9])) == [5]
    assert allowed(opened.mask([1, 9], [3, 9, 5])) == [6]
    assert opened.mask([1, 9], [9, 7]) is None
    assert opened.mask([1, 9], [3, 0]) is None
    assert allowed(opened.mask([1, 9, 3], [])) == anything
    assert allowed(opened.mask([1, 9, 3, 9], [])) == [5]
    assert allowed(opened.mask([1, 9, 3, 9, 5], [6])) == [0]
    unsaid = AfterReasoningGrammar(Letters(), ends=[[9]], start=8)
    matcher = unsaid.matcher(prompt_length=1, stop_ids=[0])
    assert allowed(matcher.mask([1], [])) == [5, 8]
    assert allowed(matcher.mask([1], [8])) == anything
    assert allowed(matcher.mask([1], [8, 9])) == [5]
    assert allowed(matcher.mask([1], [5])) == [6]
    assert allowed(matcher.mask([1, 5], [])) == [6]
    assert allowed(matcher.mask([1, 5], [6])) == [0]
    sequence = AfterReasoningGrammar(Letters(), ends=[[7, 8], [7, 6, 8]]).matcher(prompt_length=0, stop_ids=[0])
    assert allowed(sequence.mask([8], [7])) == anything
    assert allowed(sequence.mask([8, 7], [6, 8])) == [5]
    assert allowed(sequence.mask([8, 7], [8, 5])) == [6]
    assert allowed(sequence.mask([8, 7, 6, 8], [])) == [5]


def test_harmony_is_detected_and_its_grammar_applies_in_the_final_channel(
    target: Target, tiny_drafter: Drafter
) -> None:
    spoken = with_template(target, TURNS.replace("END", "{# <|channel|>analysis<|message|> #}"), harmony.MARKERS)
    with serve(spoken, tiny_drafter) as client:
        script(
            client, "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>final<|message|>4<|return|>"
        )
        message = client.chat().json["choices"][0]["message"]
        assert message == {"role": "assistant", "content": "4", "reasoning": "Hm"}
        support = client.application.context.request_builder.reasoning_support
        grammar = support.after_reasoning(Letters(), [1], "response_format")
        header = spoken.tokenizer.encode("<|channel|>final<|message|>")
        assert isinstance(grammar, AfterReasoningGrammar)
        assert header[-1] == spoken.tokenizer.convert_tokens_to_ids("<|message|>")
        assert allowed(grammar.matcher(prompt_length=1, stop_ids=[]).mask([1, *header], [])) == [5]


def test_formats_are_chosen_together() -> None:
    gpt_oss, qwen = "<|channel|>analysis<|message|>", "<tool_call></think>"

    def names(*given: Any) -> tuple[str | None, str | None]:
        tool, reasoning = choose_formats(*given)
        return tool.name if tool else None, reasoning.name if reasoning else None

    assert names(qwen, None, None) == ("hermes", None)
    assert names(qwen, None, "auto") == ("hermes", "qwen3")
    assert names(qwen, "glm", "deepseek_r1") == ("glm45", "deepseek_r1")
    assert names(gpt_oss, None, None) == ("openai", "openai_gptoss")
    assert names("", None, "gpt_oss") == ("openai", "openai_gptoss")
    assert names("", None, "auto") == (None, None)
    for tool, reasoning in (("hermes", "harmony"), (None, "qwen3"), ("openai", "qwen3")):
        with pytest.raises(UserError, match="harmony is one format for both"):
            choose_formats(gpt_oss, tool, reasoning)
    with pytest.raises(UserError, match="reasoning parser 'odd'"):
        choose_formats("", None, "odd")
