"""Requests of real clients, from their source or their traffic: each gets an answer."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from chat_tokenizer import letter_tokenizer
from each import each
from serve.conftest import serve

if TYPE_CHECKING:
    from eyas.drafter.model import Drafter
    from eyas.target.model import Target

HELLO = [{"role": "user", "content": "Hello"}]
CHAT: dict[str, dict[str, Any]] = {
    "Open WebUI, a chat": {
        "stream": True,
        "model": "tiny",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Well"},
            {"role": "user", "content": [{"type": "text", "text": "Go on"}]},
        ],
        "stream_options": {"include_usage": True},
        "temperature": 0.8,
        "top_p": 0.9,
        "min_p": 0.1,
        "frequency_penalty": 0.5,
        "presence_penalty": 0.5,
        "seed": 42,
        "stop": ["\n\n"],
        "max_tokens": 8,
        "logit_bias": {"5": 1},
    },
    "Open WebUI, the title of a chat": {
        "model": "tiny",
        "messages": HELLO,
        "stream": False,
        "max_completion_tokens": 8,
    },
    "guidellm": {
        "model": "tiny",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}],
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "max_completion_tokens": 8,
        "stop": None,
        "ignore_eos": True,
    },
    "vllm bench serve": {
        "model": "tiny",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}],
        "max_completion_tokens": 8,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.0,
        "ignore_eos": True,
    },
    "LangChain and LiteLLM": {
        "model": "tiny",
        "messages": [
            {"role": "user", "content": "Hi", "name": "ann"},
            {
                "role": "assistant",
                "content": "Well",
                "refusal": None,
                "annotations": [],
                "audio": None,
                "function_call": None,
                "tool_calls": None,
            },
            {"role": "user", "content": "Go on"},
        ],
        "stream": False,
        "temperature": 0.7,
        "n": 1,
        "max_tokens": 8,
        "user": "ann",
    },
}


@each("body", CHAT.values())
def test_a_chat_is_answered(client: Any, body: dict[str, Any]) -> None:
    reply = client.post("/v1/chat/completions", body)
    assert reply.status == 200, reply.text
    if body["stream"]:
        assert reply.events[-1]["usage"]["completion_tokens"] > 0
    else:
        assert reply.json["usage"]["completion_tokens"] > 0


def test_vllm_bench_serve_completes_and_aligns_its_prompts(client: Any) -> None:
    body = {
        "model": "tiny",
        "prompt": "Hello",
        "repetition_penalty": 1.0,
        "max_tokens": 8,
        "logprobs": None,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.0,
        "ignore_eos": True,
    }
    assert client.post("/v1/completions", body).events[-1]["usage"]["completion_tokens"] == 8
    asked = {"model": "tiny", "prompt": "Hello", "add_special_tokens": False}
    tokens = client.post("/tokenize", asked).json["tokens"]
    assert client.post("/detokenize", {"model": "tiny", "tokens": tokens[:3]}).json["prompt"] == "Hel"
    assert "\nvllm:spec_decode_num_drafts_total{" in client.get("/metrics").text
    (card,) = client.get("/v1/models").json["data"]
    assert {"id", "root"} <= set(card)


def test_open_webui_uses_the_responses_api(client: Any) -> None:
    body = {
        "model": "tiny",
        "stream": True,
        "temperature": 0.8,
        "instructions": "Be brief.",
        "max_output_tokens": 8,
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Well"}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Go on"}]},
        ],
    }
    reply = client.post("/v1/responses", body)
    assert reply.status == 200
    assert "event: response.output_text.delta" in reply.text


def test_the_name_of_a_speaker_reaches_the_template(target: Target, tiny_drafter: Drafter) -> None:
    template = "{% for m in messages %}{{ m.name or '-' }}:{{ m.content }}{% endfor %}"
    with serve(replace(target, tokenizer=letter_tokenizer(template)), tiny_drafter) as client:
        messages = [{"role": "user", "content": "a", "name": "ann"}, {"role": "assistant", "content": "b"}]
        tokens = client.post("/tokenize", {"messages": messages}).json["tokens"]
        assert client.post("/detokenize", {"tokens": tokens}).json["prompt"] == "ann:a-:b"
