"""/tokenize and /detokenize: vLLM's shapes, the prompts that the engine gets, and the server's limits."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

import pytest

from each import each
from eyas.serve.model_info import ServerLimits
from eyas.serve.monitoring.json_logging import JsonFormatter

if TYPE_CHECKING:
    from eyas.target.model import Target

MESSAGES = [{"role": "user", "content": "Hello"}]


def test_a_prompt_comes_back_as_its_tokens(client: Any, target: Target) -> None:
    reply = client.post("/tokenize", {"model": "tiny", "prompt": "abcabc", "add_special_tokens": False}).json
    ids = target.tokenizer.encode("abcabc", add_special_tokens=False)
    assert reply == {"count": 6, "max_model_len": 256, "tokens": ids, "token_strs": None}
    named = client.post("/tokenize", {"prompt": "abc", "return_token_strs": True}).json
    assert named["token_strs"] == target.tokenizer.convert_ids_to_tokens(named["tokens"])
    assert client.post("/detokenize", {"model": "tiny", "tokens": ids}).json == {"prompt": "abcabc"}
    assert client.post("/tokenize", {"prompt": "a" * 300}).json["count"] == 300  # counting goes beyond the context


def test_messages_are_tokenized_as_a_chat_renders_them(client: Any, target: Target) -> None:
    reply = client.post("/tokenize", {"messages": MESSAGES, "add_special_tokens": False}).json
    assert reply["tokens"] == target.encode_chat(MESSAGES)
    assert reply["count"] == client.chat("Hello").json["usage"]["prompt_tokens"]
    closed = client.post("/tokenize", {"messages": MESSAGES, "add_generation_prompt": False}).json["tokens"]
    assert closed == reply["tokens"][: len(closed)]
    assert len(closed) < reply["count"]
    begun = [*MESSAGES, {"role": "assistant", "content": "Well"}]
    told = client.post("/tokenize", {"messages": begun, "continue_final_message": True}).json["tokens"]
    assert target.tokenizer.decode(told).endswith("Well")


@each(
    ("path", "body", "parts"),
    [
        ("/tokenize", {}, ["prompt and messages", "missing"]),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, ["prompt and messages", "both given"]),
        ("/tokenize", {"prompt": 5}, ["prompt", "string"]),
        ("/tokenize", {"prompt": "a", "colour": 1}, ["colour"]),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, ["add_generation_prompt", "messages"]),
        ("/tokenize", {"messages": MESSAGES, "add_special_tokens": True}, ["add_special_tokens", "template"]),
        (
            "/tokenize",
            {"messages": MESSAGES, "add_generation_prompt": True, "continue_final_message": True},
            ["continue_final_message", "add_generation_prompt"],
        ),
        ("/detokenize", {"tokens": [96]}, ["96", "95"]),
        ("/detokenize", {"tokens": [-1]}, ["-1", "0"]),
        ("/detokenize", {"tokens": [1] * 257}, ["257", "256"]),
        ("/detokenize", {"tokens": "a"}, ["tokens"]),
    ],
)
def test_a_bad_field_is_named(client: Any, path: str, body: dict[str, Any], parts: list[str]) -> None:
    client.post(path, body).assert_refused(400, *parts)


def test_another_model_is_not_found(client: Any) -> None:
    client.post("/tokenize", {"model": "huge", "prompt": "a"}).assert_refused(404, "huge", "tiny")


def test_limits_and_keys_hold_here_too(new_server: Any) -> None:
    with new_server(keys=("secret",), limits=ServerLimits(body_bytes=1000)) as client:
        key = {"authorization": "Bearer secret"}
        for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [5]})):
            client.post(path, body).assert_refused(401, "key")
            assert client.post(path, body, headers=key).status == 200
        client.post("/tokenize", {"prompt": "a" * 1000}, headers=key).assert_refused(413, "1,000")
        client.application.context.admission.drain()
        client.post("/tokenize", {"prompt": "a"}, headers=key).assert_refused(503, "shutting down")


def test_one_line_in_the_log_without_the_text(client: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="eyas"):
        client.post("/tokenize", {"prompt": "secret"})
        client.post("/tokenize", {"prompt": "secret", "colour": "secret"})
    lines = [json.loads(JsonFormatter().format(record)) for record in caplog.records if record.name.startswith("eyas")]
    assert [(line["path"], line["status"], line["outcome"]) for line in lines] == [
        ("/tokenize", 200, "ok"),
        ("/tokenize", 400, "unknown_parameter"),
    ]
    assert "secret" not in json.dumps(lines)
