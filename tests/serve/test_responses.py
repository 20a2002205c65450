"""/v1/responses: the chat completion of the same conversation, as OpenAI's Responses API tells it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field

from each import each
from serve.conftest import serve
from serve.scripted import script, with_template
from serve.test_operation import fail_once
from serve.test_reasoning import OPEN, THINK
from serve.test_sockets import running
from serve.test_tools import CALLS, speaking

if TYPE_CHECKING:
    from eyas.drafter.model import Drafter
    from eyas.target.model import Target

TOOLS = [
    {"type": "function", "name": "wind", "parameters": {"type": "object", "properties": {"place": {"enum": ["sea"]}}}},
    {"type": "function", "name": "now", "description": "The time.", "strict": True},
]


def respond(client: Any, **fields: Any) -> Any:
    return client.post("/v1/responses", {"input": "Hello", "max_output_tokens": 8, "temperature": 0} | fields)


def events(reply: Any) -> list[Any]:
    """The events of a stream, each under its own name."""
    found = []
    for block in reply.text.strip().split("\n\n"):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def without_ids(response: Any) -> Any:
    """Without what differs from one request to the next: ids, times, and what the prefix cache had."""
    usage = response["usage"] and response["usage"] | {"input_tokens_details": None}
    output = [
        {key: value for key, value in item.items() if key not in ("id", "call_id")} for item in response["output"]
    ]
    return {key: value for key, value in response.items() if key not in ("id", "created_at")} | {
        "output": output,
        "usage": usage,
    }


def test_an_answer_is_that_of_the_chat_completion(client: Any) -> None:
    chat = client.chat("Hello").json
    reply = respond(client, metadata={"run": "7"}, store=True, user="someone").json
    (message,) = reply["output"]
    assert message["content"][0]["text"] == chat["choices"][0]["message"]["content"]
    assert message["role"] == "assistant"
    assert reply["object"] == "response"
    assert reply["id"].startswith("resp_")
    assert reply["model"] == "tiny"
    assert reply["store"] is False
    assert reply["metadata"] == {"run": "7"}
    usage, told = reply["usage"], chat["usage"]
    assert usage["input_tokens"] == told["prompt_tokens"]
    assert usage["output_tokens"] == told["completion_tokens"]
    assert usage["total_tokens"] == told["total_tokens"]
    assert usage["input_tokens_details"]["cached_tokens"] >= 0
    assert usage["output_tokens_details"] == {"reasoning_tokens": 0}
    assert usage["speculative"]["passes"] > 0
    client.all_back()


def test_answers_that_end_early_are_incomplete(client: Any) -> None:
    reply = respond(client, ignore_eos=True).json
    assert reply["status"] == reply["output"][-1]["status"] == "incomplete"
    assert reply["incomplete_details"] == {"reason": "max_output_tokens"}
    assert events(respond(client, ignore_eos=True, stream=True))[-1]["type"] == "response.incomplete"


def test_items_are_the_messages_of_a_chat(client: Any) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Well"},
        {"role": "user", "content": "Go on"},
    ]
    expected = client.chat(messages=messages).json
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {
            "type": "message",
            "id": "msg_1",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Well", "annotations": []}],
        },
        {"type": "message", "role": "user", "content": "Go on"},
    ]
    reply = respond(client, input=items, instructions="Be brief.").json
    assert reply["usage"]["input_tokens"] == expected["usage"]["prompt_tokens"]
    assert reply["output"][0]["content"][0]["text"] == expected["choices"][0]["message"]["content"]


def test_a_stream_tells_every_stage_and_joins_to_the_whole(client: Any) -> None:
    fields = {"max_output_tokens": 24, "temperature": 0.8, "seed": 5, "speculative": {"mode": "fixed", "depth": 3}}
    whole, streamed = respond(client, **fields).json, events(respond(client, **fields, stream=True))
    kinds = [event["type"] for event in streamed]
    deltas = [event for event in streamed if event["type"] == "response.output_text.delta"]
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * len(deltas),
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        f"response.{whole['status']}",
    ]
    assert len(deltas) > 1
    assert streamed[0]["response"]["status"] == "in_progress"
    text = "".join(event["delta"] for event in deltas)
    assert text == whole["output"][0]["content"][0]["text"] == streamed[-4]["text"]
    assert without_ids(streamed[-1]["response"]) == without_ids(whole)
    assert {event["item_id"] for event in deltas} == {streamed[-1]["response"]["output"][0]["id"]}


def test_logprobs_come_if_they_are_included(client: Any) -> None:
    fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "ignore_eos": True}
    whole = respond(client, **fields).json["output"][0]["content"][0]["logprobs"]
    assert len(whole) == 8
    assert all(len(entry["top_logprobs"]) == 2 for entry in whole)
    streamed = events(respond(client, **fields, stream=True))
    deltas = [event for event in streamed if event["type"] == "response.output_text.delta"]
    told = [entry for event in deltas for entry in event["logprobs"]]
    assert [entry["token"] for entry in told] == [entry["token"] for entry in whole]  # numbers round by the batch


def test_a_stream_that_fails_ends_with_response_failed(new_server: Any) -> None:
    with new_server() as client:
        fail_once(client.engine, RuntimeError("boom"), after=3)
        last = events(respond(client, max_output_tokens=64, ignore_eos=True, stream=True))[-1]
        assert last["type"] == "response.failed"
        assert last["response"]["status"] == "failed"
        assert last["response"]["error"]["code"] == "engine_failed"


@each(
    ("fields", "parts"),
    [
        ({"previous_response_id": "resp_1"}, ["previous_response_id", "whole conversation"]),
        ({"conversation": "conv_1"}, ["conversation", "whole conversation"]),
        ({"background": True}, ["background"]),
        ({"prompt": {"id": "pmpt_1"}}, ["prompt", "instructions and input"]),
        ({"prompt_logprobs": 0}, ["prompt_logprobs", "/v1/chat/completions"]),
        ({"return_token_ids": True}, ["return_token_ids", "/v1/chat/completions"]),
        ({"truncation": "auto"}, ["truncation", "disabled"]),
        ({"messages": []}, ["messages", "use input"]),
        ({"max_tokens": 5}, ["max_tokens", "max_output_tokens"]),
        ({"response_format": {"type": "json_object"}}, ["response_format", "text.format"]),
        ({"n": 2}, ["n is", "several requests"]),
        ({"input": []}, ["input", "empty"]),
        ({"input": 5}, ["input"]),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, ["input.0", "whole conversation"]),
        ({"input": [{"type": "computer_call"}]}, ["input.0.type", "computer_call", "function_call_output"]),
        ({"input": [{"role": "narrator", "content": "a"}]}, ["input.0.role", "user"]),
        ({"input": [{"role": "user"}]}, ["input.0.content", "missing"]),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            ["input.0.content.0", "input_image", "text"],
        ),
        ({"tools": [{"type": "web_search"}]}, ["tools.0.type", "web_search", "functions"]),
        ({"tools": [{"type": "function"}]}, ["tools.0.name", "missing"]),
        ({"tool_choice": {"type": "mcp"}}, ["tool_choice", "function"]),
        ({"include": ["file_search_call.results"]}, ["include", "file_search_call.results"]),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, ["text.format.schema", "missing"]),
        ({"text": {"verbosity": "low"}}, ["text.verbosity", "medium"]),
        ({"stream_options": {"include_usage": True}}, ["stream_options.include_usage"]),
        ({"max_output_tokens": 1000}, ["max_output_tokens 1000", "256"]),
        ({"max_output_tokens": 0}, ["max_output_tokens", "1"]),
        ({"colour": "red"}, ["colour"]),
        ({"temperature": "hot"}, ["temperature", "hot"]),
        (
            {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "bird"}}}},
            ["text.format.schema"],
        ),
    ],
)
def test_a_bad_field_is_named(client: Any, fields: dict[str, Any], parts: list[str]) -> None:
    respond(client, **fields).assert_refused(400, *parts)
    client.all_back()


def test_numbers_and_depths_beyond_all_bounds_are_refused(client: Any) -> None:
    for value in (b"1" * 5000, b"[" * 10_000 + b"]" * 10_000):
        body = b'{"input": "a", "seed": ' + value + b"}"
        client.post("/v1/responses", content=body, headers={"content-type": "application/json"}).assert_refused(400)


def test_another_model_is_not_found_and_a_key_is_needed(client: Any, new_server: Any) -> None:
    respond(client, model="huge").assert_refused(404, "huge", "tiny")
    with new_server(keys=("secret",)) as guarded:
        respond(guarded).assert_refused(401, "key")


class Bird(BaseModel):
    kind: Literal["owl", "kite"]
    eggs: int = Field(ge=1, le=9)


def test_the_openai_client_creates_streams_and_parses(new_server: Any) -> None:
    with new_server() as client, running(client) as server:
        asking = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        answer = asking.responses.create(
            model="tiny", input="Hello", instructions="Be brief.", max_output_tokens=12, temperature=0
        )
        assert answer.output_text
        assert answer.usage is not None
        assert answer.usage.output_tokens <= 12
        deltas = []
        with asking.responses.stream(model="tiny", input="Hello", text_format=Bird, temperature=1) as stream:
            for event in stream:
                if event.type == "response.output_text.delta":
                    deltas.append(event.delta)
            final = stream.get_final_response()
        assert isinstance(final.output_parsed, Bird)
        assert "".join(deltas) == final.output_text
        parsed = asking.responses.parse(model="tiny", input="A bird!", text_format=Bird, temperature=1)
        assert isinstance(parsed.output_parsed, Bird)
        again = asking.responses.create(  # what came back is taken as input
            model="tiny",
            input=[{"role": "user", "content": "Hello"}, *answer.output, {"role": "user", "content": "More"}],  # type: ignore[list-item]
            max_output_tokens=4,
        )
        assert again.usage is not None
        assert again.usage.input_tokens > answer.usage.input_tokens
        with pytest.raises(openai.BadRequestError, match="previous_response_id"):
            asking.responses.create(model="tiny", input="More", previous_response_id=answer.id)
        with pytest.raises(openai.NotFoundError, match="nothing is stored"):
            asking.responses.retrieve(answer.id)
        with pytest.raises(openai.NotFoundError, match="embedding"):
            asking.embeddings.create(model="tiny", input="Hello")


def test_reasoning_is_an_item_and_comes_back_as_one(target: Target, tiny_drafter: Drafter) -> None:
    with serve(with_template(target, OPEN, THINK), tiny_drafter, reasoning_parser="qwen3") as client:
        generate = client.application.context.engine_client.generate
        script(client, "I add.</think>It is 4.")
        whole = respond(client).json
        reasoning, message = whole["output"]
        assert reasoning["content"] == [{"type": "reasoning_text", "text": "I add."}]
        assert message["content"][0]["text"] == "It is 4."
        assert whole["usage"]["output_tokens_details"] == {"reasoning_tokens": 6}
        streamed = events(respond(client, stream=True))
        kinds = list(dict.fromkeys(event["type"] for event in streamed))
        assert kinds == [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
            "response.reasoning_text.delta",
            "response.reasoning_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.output_text.delta",
            "response.output_text.done",
            "response.completed",
        ]
        assert without_ids(streamed[-1]["response"]) == without_ids(whole)
        client.application.context.engine_client.generate = generate
        told = {"role": "assistant", "content": "It is 4.", "reasoning": "I add."}
        messages = [{"role": "user", "content": "2+2?"}, told, {"role": "user", "content": "Sure?"}]
        items = [messages[0], reasoning, message, messages[2]]
        expected = client.post("/tokenize", {"messages": messages}).json["count"]
        assert respond(client, input=items).json["usage"]["input_tokens"] == expected
        cut = respond(client, input=[messages[0], reasoning, messages[2]])
        assert cut.status == 200, cut.text  # the answer ended while it reasoned
        unthought = [messages[0], told | {"reasoning": None}, messages[2]]
        assert expected > client.post("/tokenize", {"messages": unthought}).json["count"]


@pytest.fixture(scope="module")
def tooled(target: Target, tiny_drafter: Drafter) -> Iterator[Any]:
    with serve(speaking(target, "hermes"), tiny_drafter) as client:
        yield client


def test_a_required_function_is_called(tooled: Any) -> None:
    fields = {"tools": TOOLS, "tool_choice": {"type": "function", "name": "wind"}, "max_output_tokens": 100}
    (call,) = respond(tooled, **fields).json["output"]
    assert (call["type"], call["name"], call["status"]) == ("function_call", "wind", "completed")
    assert isinstance(json.loads(call["arguments"]), dict)
    assert call["call_id"] != call["id"]
    streamed = events(respond(tooled, **fields, stream=True))
    parts = [event for event in streamed if event["type"] == "response.function_call_arguments.delta"]
    (done,) = [event for event in streamed if event["type"] == "response.function_call_arguments.done"]
    assert "".join(part["delta"] for part in parts) == done["arguments"] == call["arguments"]
    assert streamed[-1]["response"]["output"][0]["arguments"] == call["arguments"]


def test_voluntary_calls_and_their_results(target: Target, tiny_drafter: Drafter) -> None:
    with serve(speaking(target, "hermes"), tiny_drafter) as client, running(client) as server:
        generate = client.application.context.engine_client.generate
        script(client, CALLS["hermes"])
        asking = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        ask: dict[str, Any] = {"model": "tiny", "tools": TOOLS}
        whole = asking.responses.create(input="?", **ask)
        told = [(item.type, getattr(item, "arguments", None)) for item in whole.output]
        assert told == [("message", None), ("function_call", '{"place": "sea"}'), ("function_call", "{}")]
        with asking.responses.stream(input="?", **ask) as stream:
            kinds = [event.type for event in stream]
            final = stream.get_final_response()
        assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 3
        assert [(item.type, getattr(item, "arguments", None)) for item in final.output] == told
        client.application.context.engine_client.generate = generate
        results: list[Any] = [
            {"type": "function_call_output", "call_id": item.call_id, "output": "calm"}
            for item in whole.output
            if item.type == "function_call"
        ]
        reply = asking.responses.create(
            input=[{"role": "user", "content": "?"}, *whole.output, *results], max_output_tokens=4, **ask
        )
        calls = [item for item in whole.output if item.type == "function_call"]
        messages = [
            {"role": "user", "content": "?"},
            {
                "role": "assistant",
                "content": "Well.",
                "tool_calls": [
                    {"id": c.call_id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
                    for c in calls
                ],
            },
            *({"role": "tool", "tool_call_id": c.call_id, "content": "calm"} for c in calls),
        ]
        tools = [{"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}} for tool in TOOLS]
        prompt = client.post("/tokenize", {"messages": messages, "tools": tools}).json
        assert reply.usage is not None
        assert reply.usage.input_tokens == prompt["count"]
