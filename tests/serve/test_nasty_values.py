"""Whatever a body holds, the answer is an answer or a refusal, never a failure, and nothing is left behind."""

from __future__ import annotations

import asyncio
import random
from typing import Any

NASTY: list[Any] = [
    None, True, False, 0, -1, 1, 2, 7, 95, 96, 2**31, 2**63, 2**64, 10**40, -(2**63), 0.0, -0.0, 1e-300, 1e-5, 0.5,
    1.0, 1e30, 1e308, -1e308, 5e-324, "", "a", "0", "\x00", "\ud7ff", "😀", "</s>", "<|im_start|>", "a" * 300, [], [[]],
    [0], [1, 2], [95], [96], [-1], [2**70],
    ["a"], ["a", "b"], ["", ""], [None], [[1], [2]], [["a"]], [{}], {}, {"a": 1},
    {"0": 1}, {"95": -100}, {"0": 1e400}, {"0": 100, "1": 100}, {"-1": 1}, {"mode": "off"},
    {"mode": "fixed", "depth": 7},
    {"mode": "fixed", "depth": 2**70}, {"include_usage": True}, {"type": "text"}, [{"role": "user", "content": ""}],
    [{"role": "assistant", "content": "x"}], [{"role": "user", "content": []}],
    [{"role": "tool", "content": "x", "tool_call_id": ""}], [{"type": "function", "function": {"name": "f"}}],
    {"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": "", "schema": {}}}, {"regex": "[a-c]*"},
    {"choice": ["", "a"]}, {"json": {"type": "string", "maxLength": 2}}, {"json": "0"}, {"grammar": "start: \"a\"+"},
    {"type": "integer"}, "(a|b)*", "start: start", "[", "required",
]  # fmt: skip
FIELDS = [
    "model", "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "logprobs",
    "frequency_penalty", "repetition_penalty", "logit_bias", "n", "seed", "stop", "stop_token_ids", "ignore_eos",
    "stream", "stream_options", "speculative", "user", "prompt", "messages", "top_logprobs", "max_completion_tokens",
    "tools", "tool_choice", "parallel_tool_calls", "response_format", "structured_outputs", "guided_json",
    "guided_regex", "guided_choice", "guided_grammar", "colour",
    "metadata", "store", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "service_tier", "verbosity",
    "chat_template_kwargs", "reasoning_effort", "chat_template", "add_generation_prompt", "continue_final_message",
    "include_stop_str_in_output", "allowed_token_ids", "skip_special_tokens", "spaces_between_special_tokens",
    "truncate_prompt_tokens", "return_token_ids", "return_tokens_as_token_ids",
    "echo", "prompt_logprobs", "bad_words",
]  # fmt: skip


def nasty_bodies(count: int) -> list[tuple[str, dict[str, Any]]]:
    """Good bodies with one to three fields gone wrong, each value in each field at least likely to come."""
    chance = random.Random(0)
    bodies = []
    for number in range(count):
        path, body = "/v1/completions", {"prompt": "abc", "max_tokens": 3}
        if number % 3 == 0:
            path, body = "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3}
        for field in chance.sample(FIELDS, chance.choice([1, 1, 2, 3])):
            body[field] = chance.choice(NASTY)
        bodies.append((path, body))
    return bodies


def test_extreme_values_never_cause_a_500(client: Any) -> None:
    good = client.complete().json["choices"]
    wrong = []

    async def ask(path: str, body: dict[str, Any]) -> None:
        try:
            reply = await client.send("POST", path, json=body)
        except ValueError:
            return  # the client itself cannot write this as JSON
        if reply.status not in (200, 400, 404):
            wrong.append((path, body, reply.status, reply.text))
        if reply.status == 200 and '"error"' in reply.text:
            wrong.append((path, body, reply.status, reply.text))

    async def main() -> None:
        for path, body in nasty_bodies(700):
            await ask(path, body)

    asyncio.run(main())
    assert not wrong, wrong[0]
    assert client.complete().json["choices"] == good
    assert client.application.context.engine_client.supervisor.failed_steps == 0
    client.all_back()
