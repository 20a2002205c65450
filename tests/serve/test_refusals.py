"""Unsupported fields and values are refused by name, with the limit and the fix, in OpenAI's format."""

from __future__ import annotations

from typing import Any

from each import each
from eyas.serve.protocol.completions import NEUTRAL_VALUES


@each(
    ("fields", "parts"),
    [
        ({"temperture": 1}, ["temperture", "did you mean temperature"]),
        ({"colour": "red"}, ["colour", "leave it out"]),
        ({"tools": [{"type": "function"}]}, ["tools", "not supported yet"]),
        ({"suffix": "end"}, ["suffix", "not supported yet"]),
        ({"priority": 3}, ["priority", "3", "--scheduling-policy priority"]),
        ({"best_of": 2}, ["best_of", "2"]),
        ({"temperature": -1}, ["temperature", "-1", "0"]),
        ({"temperature": 1e-9}, ["temperature", "1e-09", "0 for greedy"]),
        ({"temperature": "hot"}, ["temperature", "hot", "number"]),
        ({"temperature": True}, ["temperature", "True", "number"]),
        ({"top_p": 0}, ["top_p", "0", "greater than 0"]),
        ({"top_k": -2}, ["top_k", "-2"]),
        ({"min_p": 2}, ["min_p", "2", "1"]),
        ({"presence_penalty": 3}, ["presence_penalty", "3", "2"]),
        ({"repetition_penalty": 0}, ["repetition_penalty", "0"]),
        ({"max_tokens": 0}, ["max_tokens", "0", "echo", "1"]),
        ({"prompt_logprobs": 21}, ["prompt_logprobs", "21", "20"]),
        ({"max_tokens": 1000}, ["max_tokens 1000", "256", "250 or fewer"]),
        ({"max_tokens": 10**30}, ["max_tokens", "256"]),
        ({"min_tokens": 9}, ["min_new_tokens", "9", "8"]),
        ({"n": 0}, ["n is 0", "1"]),
        ({"n": 1000}, ["n is 1000", "128"]),
        ({"seed": 2**63}, ["seed", str(2**63)]),
        ({"stop": ["a", 3]}, ["stop", "list of strings"]),
        ({"stop": [""]}, ["stop string is empty"]),
        ({"stop": list("abcdefghijklmnopqrst")}, ["stop", "20", "16"]),
        ({"logit_bias": {"x": 1}}, ["logit_bias", "token ids"]),
        ({"logit_bias": {"96": 1}}, ["96", "95"]),
        ({"logit_bias": {"3": 101}}, ["101", "3", "100"]),
        ({"logprobs": 21}, ["logprobs", "21", "20"]),
        ({"prompt": {"text": "a"}}, ["prompt", "a string, a list of strings"]),
        ({"prompt": []}, ["prompt", "empty"]),
        ({"prompt": ""}, ["0 tokens"]),
        ({"prompt": [[]]}, ["0 tokens"]),
        ({"prompt": [96]}, ["96", "95"]),
        ({"prompt": [-1]}, ["-1", "0"]),
        ({"prompt": [1, "a"]}, ["prompt", "a list of token ids"]),
        ({"prompt": "a" * 300}, ["300 tokens", "255"]),
        ({"speculative": {"mode": "deep"}}, ["speculative.mode", "deep", "auto"]),
        ({"speculative": {"mode": "fixed"}}, ["fixed", "depth"]),
        ({"speculative": {"mode": "fixed", "depth": 99}}, ["depth 99", "7"]),
        ({"speculative": {"mode": "auto", "depth": 2}}, ["auto", "depth 2"]),
        ({"speculative": {"depht": 2}}, ["speculative.depht"]),
    ],
)
def test_a_bad_field_is_named(client: Any, fields: dict[str, Any], parts: list[str]) -> None:
    for stream in (False, True):
        client.complete(**fields, stream=stream).assert_refused(400, *parts)
    client.all_back()


@each(
    ("fields", "parts"),
    [
        ({"messages": []}, ["messages"]),
        ({"messages": [{"role": "tool", "content": "x"}]}, ["messages.0.tool_call_id", "missing"]),
        (
            {"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]},
            ["messages.0.role", "tool", "template of tiny does not mention tools", "user"],
        ),
        ({"messages": [{"role": "user"}]}, ["messages.0.content", "missing"]),
        ({"messages": [{"role": "user", "content": 5}]}, ["messages.0.content", "text parts"]),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, ["messages.0.content", "text parts"]),
        ({"messages": [{"role": "user", "content": "x", "nickname": "y"}]}, ["messages.0.nickname"]),
        ({"max_completion_tokens": 9}, ["max_tokens 8", "max_completion_tokens 9"]),
        ({"echo": True}, ["echo", "not supported yet"]),
        ({"max_tokens": 0}, ["max_tokens", "0", "1"]),
        ({"top_logprobs": 2}, ["top_logprobs 2", "logprobs true"]),
        ({"logprobs": 2}, ["logprobs", "2"]),
        ({"tool_choice": "always"}, ["tool_choice", "none, auto, required"]),
        ({"messages": [{"role": "narrator", "content": "x"}]}, ["messages.0.role", "narrator", "assistant"]),
        ({"messages": [{"content": "x"}]}, ["messages.0.role", "None"]),
        ({"messages": [{"role": "assistant"}]}, ["messages.0.content", "tool_calls"]),
    ],
)
def test_a_bad_chat_is_named(client: Any, fields: dict[str, Any], parts: list[str]) -> None:
    client.chat(**fields).assert_refused(400, *parts)


def test_fields_with_neutral_values_are_accepted(client: Any) -> None:
    plain = client.complete().json["choices"]
    for name, values in NEUTRAL_VALUES.items():
        for value in (None, *values):
            assert client.complete(**{name: value}).json["choices"] == plain, name
    assert client.complete(stop=None, seed=None, n=None, stream_options=None).json["choices"] == plain


@each(
    ("content", "parts"),
    [
        (b"{", ["no JSON"]),
        (b"", ["no JSON"]),
        (b"[]", ["no JSON object"]),
        (b"7", ["no JSON object"]),
        (b'{"prompt": "a", "temperature": NaN}', ["temperature", "finite"]),
        (b'{"prompt": "\\ud800"}', ["no JSON"]),
        (b'{"prompt": "\xff"}', ["no JSON"]),
        (b'{"max_tokens": 3}', ["prompt is missing"]),
        (b"[" * 10_000, ["no JSON"]),
    ],
)
def test_a_body_that_is_no_json_object_is_refused(client: Any, content: bytes, parts: list[str]) -> None:
    kind = {"content-type": "application/json"}
    client.post("/v1/completions", content=content, headers=kind).assert_refused(400, *parts)


def test_only_json_is_read(client: Any) -> None:
    client.post("/v1/completions", content=b"{}", headers={"content-type": "text/plain"}).assert_refused(
        415, "text/plain", "application/json"
    )


def test_options_of_streams_are_for_streams(client: Any) -> None:
    client.complete(stream_options={"include_usage": True}).assert_refused(400, "stream_options", "stream true")


def test_requests_for_another_model_get_404(client: Any) -> None:
    client.complete(model="gpt-5").assert_refused(404, "gpt-5", "tiny")
    assert client.complete(model="tiny").status == 200


def test_unknown_paths_and_methods_are_refused_in_the_same_format(client: Any) -> None:
    client.get("/v1/images").assert_refused(404)
    reply = client.get("/v1/completions")
    reply.assert_refused(405)
    assert reply.headers["allow"] == "POST"
    client.get("/v1/models/other").assert_refused(404, "other", "tiny")


def test_the_schema_describes_every_field(client: Any) -> None:
    document = client.get("/openapi.json").json
    assert set(document["paths"]) >= {"/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/metrics"}
    assert set(document["paths"]["/v1/drafter"]) == {"get", "post"}
    chat = document["components"]["schemas"]["ChatCompletionRequest"]
    assert chat["additionalProperties"] is False
    assert {"messages", "speculative", "logit_bias", "max_completion_tokens"} <= set(chat["properties"])
    assert {"response_format", "structured_outputs", "guided_json", "tools", "tool_choice"} <= set(chat["properties"])
