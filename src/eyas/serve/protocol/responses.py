"""The body of /v1/responses, and the chat completion that it asks for.

OpenAI's Responses API is a second way to write a chat completion: items for messages, `text.format` for
`response_format`. A body is rewritten as the body of /v1/chat/completions, and one route serves both. Fields that are
not OpenAI's (`seed`, `top_k`, `speculative`, ...) pass through, and are checked there.
"""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from eyas.serve.api_error import ApiError, invalid, unsupported
from eyas.serve.protocol.bounds import at_most
from eyas.serve.protocol.completions import Count, JsonObjects, WireModel

Model = TypeVar("Model", bound=BaseModel)
LOGPROBS = "message.output_text.logprobs"
ENCRYPTED_REASONING = "reasoning.encrypted_content"
SEND_ALL = "nothing is stored here; send the whole conversation as input"
NO_PLACE = "a response of this API has no place for what it asks; use /v1/chat/completions"
REFUSED_FIELDS = {
    "previous_response_id": SEND_ALL,
    "conversation": SEND_ALL,
    "prompt": "no prompt templates are kept here; send instructions and input",
    "context_management": "nothing is compacted here; send a shorter input",
    "max_tool_calls": "it limits built-in tools, and there are none; use parallel_tool_calls",
    "moderation": "nothing is moderated here; leave it out",
    "prompt_logprobs": NO_PLACE,
    "return_token_ids": NO_PLACE,
    "return_tokens_as_token_ids": NO_PLACE,
}
"""Fields that cannot be honoured; null and false are fine."""
CHAT_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "logprobs": "include",
    "n": "several requests",
}
"""Fields of chat completions, and their names here."""


class JsonTextFormat(WireModel):
    """`text.format`: text, any JSON object, or JSON by a schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextConfig(WireModel):
    """`text`."""

    format: JsonTextFormat | None = None
    verbosity: Literal["medium"] | None = Field(None, description="No model here knows another.")


class ReasoningConfig(WireModel):
    """`reasoning`."""

    effort: str | None = None
    summary: Literal["auto", "concise", "detailed"] | None = Field(
        None, description="No effect: reasoning is returned whole, not summed up."
    )
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class ResponsesStreamOptions(WireModel):
    """`stream_options`."""

    include_obfuscation: Literal[False] | None = Field(None, description="Streams are not padded.")


class ResponsesRequest(WireModel):
    """The body of /v1/responses. Fields that are not listed go on to the chat completion."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    model: str | None = None
    input: str | JsonObjects
    instructions: str | None = None
    max_output_tokens: Count | None = None
    text: TextConfig | None = None
    tools: JsonObjects | None = None
    tool_choice: str | dict[str, Any] | None = None
    reasoning: ReasoningConfig | None = None
    include: list[str] | None = Field(None, fail_fast=True)
    top_logprobs: int | None = Field(None, ge=0, le=20)
    truncation: Literal["disabled"] | None = Field(None, description="Inputs that are too long are refused.")
    background: Literal[False] | None = Field(None, description="Answers come with the request.")
    stream_options: ResponsesStreamOptions | None = None
    metadata: Annotated[dict[str, str] | None, at_most(16)] = Field(None, description="Returned, not kept.")
    store: bool | None = Field(
        None, description='Nothing can be fetched later. false keeps the answer from --learn unless "learn" is true.'
    )


class _Item(BaseModel):
    """An item of the input. Clients send items of answers back, so fields that the model does not see are ignored."""

    model_config = ConfigDict(extra="ignore", strict=True)


class InputMessageItem(_Item):
    """A message."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | JsonObjects


class FunctionCallItem(_Item):
    """A function call of an earlier answer."""

    call_id: str
    name: str
    arguments: str


class FunctionCallOutputItem(_Item):
    """The result of a function call."""

    call_id: str
    output: str | JsonObjects


class ReasoningItem(_Item):
    """The reasoning of an earlier answer."""

    content: JsonObjects | None = None
    summary: JsonObjects | None = None
    encrypted_content: None = None


class ResponsesFunctionTool(WireModel):
    """A function that the model may call."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


ITEMS: dict[str, type[_Item]] = {
    "message": InputMessageItem,
    "function_call": FunctionCallItem,
    "function_call_output": FunctionCallOutputItem,
    "reasoning": ReasoningItem,
}
TEXT_PARTS = {
    "input_text": "text",
    "output_text": "text",
    "text": "text",
    "reasoning_text": "text",
    "refusal": "refusal",
}
"""Content parts with text, and the field that holds it."""


def chat_body(body: ResponsesRequest) -> bytes:
    """The body of the chat completion that this request asks for."""
    extra = dict(body.model_extra or {})
    for field, why in REFUSED_FIELDS.items():
        value = extra.pop(field, None)
        if value is not None and value is not False:
            raise unsupported(field, f"{field} is not served: {why}")
    for field, instead in CHAT_NAMES.items():
        if field in extra:
            message = f"{field} is a field of /v1/chat/completions; use {instead}"
            raise invalid(field, message, code="unknown_parameter")
    chat = extra | {"messages": _messages(body)}
    chat |= {"model": body.model, "max_completion_tokens": body.max_output_tokens, "store": body.store}
    chat |= {"response_format": _response_format(body)} | _tools(body) | _logprobs(body)
    if body.reasoning is not None:
        chat["reasoning_effort"] = body.reasoning.effort
    try:
        return json.dumps({name: value for name, value in chat.items() if value is not None}).encode()
    except ValueError:  # Python writes no integer of thousands of digits
        raise ApiError(400, "the body has a number with too many digits; shorten it", code="invalid_value") from None


def _messages(body: ResponsesRequest) -> list[dict[str, Any]]:
    """The conversation. Reasoning, text and calls of one answer are one message of the assistant."""
    messages: list[dict[str, Any]] = []
    if body.instructions is not None:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    if not body.input:
        raise invalid("input", "input is an empty list; give at least one item")
    for number, given in enumerate(body.input):
        field = f"input.{number}"
        item = _item(given, field)
        if isinstance(item, InputMessageItem) and item.role != "assistant":
            messages.append({"role": item.role, "content": _text(item.content, f"{field}.content")})
        elif isinstance(item, FunctionCallOutputItem):
            text = _text(item.output, f"{field}.output")
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": text})
        elif not isinstance(item, ReasoningItem) or item.content:
            _add_to_answer(messages, item, field)
    for message in messages:
        if message["role"] == "assistant" and "tool_calls" not in message:
            message.setdefault("content", "")  # an answer that was cut in its reasoning
    return messages


def _add_to_answer(messages: list[dict[str, Any]], item: _Item, field: str) -> None:
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    if isinstance(item, FunctionCallItem):
        if last is None:
            messages.append(last := {"role": "assistant"})
        call = {"id": item.call_id, "type": "function", "function": {"name": item.name, "arguments": item.arguments}}
        last.setdefault("tool_calls", []).append(call)
        return
    key = "content" if isinstance(item, InputMessageItem) else "reasoning"
    if last is None or not {"content", "tool_calls", key}.isdisjoint(last):
        messages.append(last := {"role": "assistant"})
    if isinstance(item, InputMessageItem):
        last["content"] = _text(item.content, f"{field}.content")
    elif isinstance(item, ReasoningItem):
        last["reasoning"] = _text(item.content or [], f"{field}.content")


def _item(given: dict[str, Any], field: str) -> _Item:
    kind = given.get("type") or "message"
    if kind == "item_reference":
        raise unsupported(field, f"{field} is a reference, and {SEND_ALL}")
    if not isinstance(kind, str) or kind not in ITEMS:
        message = f"{field}.type is {kind!r:.60}; it should be {', '.join(ITEMS)}"
        raise invalid(f"{field}.type", message, code="invalid_value")
    return _validated(ITEMS[kind], given, field)


def _validated(kind: type[Model], given: Any, field: str) -> Model:
    """A valid object, or an error that names where in the body it is wrong."""
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        at = ".".join([field, *map(str, first["loc"][:1])])
        if first["type"] == "missing":
            raise invalid(at, f"{at} is missing; give it", code="missing_required_parameter") from None
        if first["type"] == "extra_forbidden":
            raise invalid(at, f"{at} is not supported; leave it out", code="unknown_parameter") from None
        limit = first["msg"].removeprefix("Input should be ")
        raise invalid(at, f"{at} should be {limit}; change it", code="invalid_value") from None


def _text(content: str | list[dict[str, Any]], field: str) -> str:
    """The text of content parts."""
    if isinstance(content, str):
        return content
    texts = []
    for number, part in enumerate(content):
        kind = part.get("type")
        text = part.get(TEXT_PARTS[kind]) if isinstance(kind, str) and kind in TEXT_PARTS else None
        if not isinstance(text, str):
            message = f"{field}.{number} is {kind!r:.60}; only parts of text are served, such as input_text"
            raise unsupported(f"{field}.{number}", message)
        texts.append(text)
    return "".join(texts)


def _response_format(body: ResponsesRequest) -> dict[str, Any] | None:
    wanted = body.text.format if body.text is not None else None
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return {"type": "json_object"}
    if wanted.schema_ is None:
        field = "text.format.schema"
        raise invalid(field, f"{field} is missing; give it", code="missing_required_parameter")
    return {"type": "json_schema", "json_schema": {"name": wanted.name or "answer", "schema": wanted.schema_}}


def _tools(body: ResponsesRequest) -> dict[str, Any]:
    tools = []
    for number, given in enumerate(body.tools or ()):
        field = f"tools.{number}"
        kind = given.get("type")
        if kind != "function":
            message = f"{field}.type is {kind!r:.60}; only functions are served, so run other tools on your side"
            raise unsupported(f"{field}.type", message)
        function = _validated(ResponsesFunctionTool, given, field).model_dump(exclude={"type"}, exclude_none=True)
        tools.append({"type": "function", "function": function})
    choice = body.tool_choice
    if isinstance(choice, Mapping):
        if choice.get("type") != "function" or not isinstance(choice.get("name"), str):
            message = 'tool_choice should be none, auto, required or {"type": "function", "name": ...}; change it'
            raise invalid("tool_choice", message, code="invalid_value")
        choice = {"type": "function", "function": {"name": choice["name"]}}
    return {"tools": tools or None, "tool_choice": choice}


def _logprobs(body: ResponsesRequest) -> dict[str, Any]:
    for wish in body.include or ():
        if wish not in (LOGPROBS, ENCRYPTED_REASONING):
            message = f"include has {wish!r:.60}; there is only {LOGPROBS} here"
            raise unsupported("include", message)
    if LOGPROBS in (body.include or ()) or body.top_logprobs:
        return {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    return {}
