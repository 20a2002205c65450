"""Messages as chat templates take them; templates differ over tool calls.

Most want arguments as an object, some as JSON text; some tell a missing content from an empty one; some want ids of
nine letters; some take no reasoning beside content in a turn with calls. The first form is the server's. The others are
for templates that refuse it or leave the calls out.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from eyas.data.answer_text import REASONING_FIELDS
from eyas.data.conversations import Message


def message_forms(messages: Sequence[Message]) -> Iterator[list[dict[str, Any]]]:
    """The messages of one conversation, in one form after the other."""
    plain = _with_calls(messages)
    yield plain
    if not any(message.get("tool_calls") for message in plain):
        return
    as_text = [_arguments_as_text(message) for message in plain]
    yield as_text
    for form in (plain, as_text):
        yield [_without_empty_content(message) for message in form]
    for form in (plain, as_text):
        yield _short_ids(form)
    yield [_without_reasoning_beside_content(message) for message in plain]


def _with_calls(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Calls and results with ids and names, arguments as objects."""
    made: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    unanswered: list[str] = []
    for message in messages:
        turn = dict(message)
        if turn.get("tool_calls"):
            turn["tool_calls"] = [_call(call, len(names) + n) for n, call in enumerate(turn["tool_calls"])]
            names |= {call["id"]: call["function"]["name"] for call in turn["tool_calls"]}
            unanswered = [call["id"] for call in turn["tool_calls"]]
        if turn["role"] == "tool":
            key = turn.setdefault("tool_call_id", unanswered[0] if unanswered else f"call{len(names):05d}")
            unanswered = [other for other in unanswered if other != key]
            if key in names:
                turn.setdefault("name", names[key])
        made.append(turn)
    return made


def _call(call: Any, number: int) -> dict[str, Any]:
    function = call.get("function") or {key: value for key, value in call.items() if key in ("name", "arguments")}
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments or "{}")
        except ValueError:
            parsed = None
        arguments = parsed if isinstance(parsed, dict) else arguments
    function = {**function, "arguments": {} if arguments is None else arguments}
    return {"id": f"call{number:05d}", "type": "function", **call, "function": function}


def _arguments_as_text(message: dict[str, Any]) -> dict[str, Any]:
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        arguments = call["function"]["arguments"]
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        calls.append({**call, "function": {**call["function"], "arguments": text}})
    return {**message, "tool_calls": calls}


def _without_empty_content(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "content": None} if message.get("tool_calls") and not message.get("content") else message


def _without_reasoning_beside_content(message: dict[str, Any]) -> dict[str, Any]:
    if not (message.get("tool_calls") and message.get("content")):
        return message
    return {key: value for key, value in message.items() if key not in REASONING_FIELDS}


def _short_ids(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Ids of nine letters and digits, in order."""
    short: dict[str, str] = {}
    made = []
    for message in messages:
        turn = dict(message)
        if turn.get("tool_calls"):
            for call in turn["tool_calls"]:
                short.setdefault(call["id"], f"call{len(short):05d}")
            turn["tool_calls"] = [{**call, "id": short[call["id"]]} for call in turn["tool_calls"]]
        if "tool_call_id" in turn:
            turn["tool_call_id"] = short.setdefault(turn["tool_call_id"], f"call{len(short):05d}")
        made.append(turn)
    return made
