"""Builds responses of /v1/responses: the response object, and the typed events of its stream.

An answer is a list of items: reasoning, a message, function calls. In a stream one item is open at a time; it is added,
grows by deltas, and is done before the next is added.
"""

import secrets
from collections.abc import Iterator, Sequence
from typing import Any

from eyas.engine.request import FinishReason
from eyas.serve.api_error import ApiError
from eyas.serve.builders.response_builder import ChoiceOutput, Json, ResponseFormatter
from eyas.serve.protocol.completions import ChatCompletionRequest
from eyas.serve.protocol.responses import ResponsesRequest


class ResponsesFormatter(ResponseFormatter):
    """Formats the answer to one request; `body` is the chat completion that it was rewritten as."""

    def __init__(
        self, request_id: str, *, request: ResponsesRequest, body: ChatCompletionRequest, **facts: Any
    ) -> None:
        super().__init__(request_id, body=body, **facts)
        self._base = self._unanswered(request, body)
        self._items: list[Json] = []
        """Items of the stream so far; the last may be open."""
        self._open = False
        self._unsent: list[Any] = []
        """Log probabilities of tokens whose text was not sent yet."""
        self._sequence = 0

    def whole(self, choices: Sequence[ChoiceOutput]) -> Json:
        (choice,) = choices
        message, parser, items = choice.message, choice.parser, []
        if parser is not None and parser.reasoning:
            items.append(_reasoning_item(parser.reasoning))
        if message["content"]:
            entries = [entry for delta in choice.deltas for entry in self._logprobs(delta.logprobs)]
            items.append(_message_item(message["content"], entries[parser.reasoning_tokens if parser else 0 :]))
        items += [
            _call_item(call["id"], call["function"]["name"], call["function"]["arguments"])
            for call in message.get("tool_calls", ())
        ]
        return self._response(choice, items)

    def delta(self, _: int, choice: ChoiceOutput) -> Iterator[Json]:
        if not self._sequence:
            for kind in ("response.created", "response.in_progress"):
                yield self._event(kind, response=self._base)
        parsed = choice.parsed
        for delta in choice.newest:
            self._unsent += self._logprobs(delta.logprobs)
        if parsed.reasoning:
            self._unsent = []
            yield from self._text("reasoning", parsed.reasoning, [])
        for call in parsed.calls:
            if call.started is None:
                yield from self._arguments(call.arguments)
        if parsed.content:
            logprobs, self._unsent = self._unsent, []
            yield from self._text("message", parsed.content, logprobs)
        for call in parsed.calls:
            if call.started is not None:
                yield from self._close()
                yield from self._add(_call_item(call.started.id, call.started.name, ""))
                yield from self._arguments(call.arguments)

    def end(self, choices: Sequence[ChoiceOutput]) -> Iterator[Json]:
        (choice,) = choices
        yield from self._close(whole=choice.deltas[-1].finished is not FinishReason.LENGTH)
        response = self._response(choice, self._items)
        yield self._event(f"response.{response['status']}", response=response)

    def failed(self, failure: ApiError) -> Json:
        error = {"code": failure.code or "server_error", "message": failure.message}
        return self._event("response.failed", response=self._base | {"status": "failed", "error": error})

    def _text(self, kind: str, text: str, logprobs: list[Any]) -> Iterator[Json]:
        """More text of a message or of reasoning."""
        if not self._open or self._items[-1]["type"] != kind:
            yield from self._close()
            empty = _message_item("", []) if kind == "message" else _reasoning_item("")
            yield from self._add(empty)
            (part,) = empty["content"]
            yield self._event("response.content_part.added", **self._at(), content_index=0, part=dict(part))
        part = self._items[-1]["content"][0]
        part["text"] += text
        if kind == "reasoning":
            yield self._event("response.reasoning_text.delta", **self._at(), content_index=0, delta=text)
            return
        part["logprobs"] += logprobs
        yield self._event("response.output_text.delta", **self._at(), content_index=0, delta=text, logprobs=logprobs)

    def _arguments(self, text: str) -> Iterator[Json]:
        """More arguments of the open function call."""
        if text:
            self._items[-1]["arguments"] += text
            yield self._event("response.function_call_arguments.delta", **self._at(), delta=text)

    def _add(self, item: Json) -> Iterator[Json]:
        self._items.append(item)
        self._open = True
        shown = item | {"status": "in_progress"} | ({"content": []} if "content" in item else {})
        yield self._event("response.output_item.added", output_index=len(self._items) - 1, item=shown)

    def _close(self, *, whole: bool = True) -> Iterator[Json]:
        """Finish the open item, if there is one; `whole` unless the answer was cut in it."""
        if not self._open:
            return
        item, self._open = self._items[-1], False
        item["status"] = "completed" if whole else "incomplete"
        if item["type"] == "function_call":
            yield self._event("response.function_call_arguments.done", **self._at(), arguments=item["arguments"])
        else:
            (part,) = item["content"]
            if item["type"] == "message":
                done = {"text": part["text"], "logprobs": part["logprobs"]}
                yield self._event("response.output_text.done", **self._at(), content_index=0, **done)
            else:
                text = part["text"]
                yield self._event("response.reasoning_text.done", **self._at(), content_index=0, text=text)
            yield self._event("response.content_part.done", **self._at(), content_index=0, part=part)
        yield self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _at(self) -> Json:
        """Where the open item is."""
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}

    def _event(self, kind: str, **fields: Any) -> Json:
        self._sequence += 1
        return {"type": kind, "sequence_number": self._sequence - 1} | fields

    def _logprobs(self, entries: Sequence[Any] | None) -> list[Any]:
        return [self._token_text.chat_logprobs(entry) for entry in entries or ()]

    def _response(self, choice: ChoiceOutput, items: list[Json]) -> Json:
        """The response once it has ended."""
        cut = choice.deltas[-1].finished is FinishReason.LENGTH
        if cut and items:
            items[-1]["status"] = "incomplete"
        return self._base | {
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": items,
            "usage": self._usage([choice]),
            **self.metrics([choice]),
        }

    def _unanswered(self, request: ResponsesRequest, chat: ChatCompletionRequest) -> Json:
        """The response before it has output: what was asked, or the default that applies."""
        text = request.text.model_dump(by_alias=True, exclude_none=True) if request.text is not None else {}
        reasoning = request.reasoning
        return {
            "id": f"resp_{self._request_id}",
            "object": "response",
            "created_at": self._created,
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "max_tool_calls": None,
            "metadata": request.metadata or {},
            "model": self._model,
            "output": [],
            "parallel_tool_calls": chat.parallel_tool_calls,
            "previous_response_id": None,
            "reasoning": {"effort": reasoning.effort if reasoning is not None else None, "summary": None},
            "service_tier": "default",
            "store": False,
            "temperature": chat.temperature,
            "text": {"format": {"type": "text"}} | text,
            "tool_choice": request.tool_choice or "auto",
            "tools": request.tools or [],
            "top_logprobs": request.top_logprobs or 0,
            "top_p": chat.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": chat.user,
        }

    def _usage(self, choices: Sequence[ChoiceOutput]) -> Json:
        """The usage of a chat completion under the names of this API."""
        usage = self.usage(choices)
        reasoning = usage.get("completion_tokens_details", {}).get("reasoning_tokens", 0)
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"] | {"cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": reasoning},
            "total_tokens": usage["total_tokens"],
            "speculative": usage["speculative"],
        }


def _message_item(text: str, logprobs: list[Any]) -> Json:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
    return {"id": _id("msg"), "type": "message", "role": "assistant", "status": "completed", "content": [part]}


def _reasoning_item(text: str) -> Json:
    part = {"type": "reasoning_text", "text": text}
    return {"id": _id("rs"), "type": "reasoning", "status": "completed", "summary": [], "content": [part]}


def _call_item(call_id: str, name: str, arguments: str) -> Json:
    return {
        "id": _id("fc"),
        "type": "function_call",
        "status": "completed",
        "call_id": call_id,
        "name": name,
        "arguments": arguments,
    }


def _id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(16)}"
