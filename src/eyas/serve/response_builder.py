"""From deltas to the JSON of OpenAI's answers, whole or in chunks. Pure functions of what the engine gave."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from eyas.engine.output import OutputDelta, SpecDecodeStats
from eyas.engine.request import FinishReason
from eyas.serve.supervisor import add_stats
from eyas.serve.token_text import TokenText
from eyas.serve.tool_parser import ParsedDelta, ToolCallParser

Kind = Literal["chat", "text"]
_ID_PREFIXES = {"chat": "chatcmpl", "text": "cmpl"}
_OBJECT_NAMES = {
    ("chat", False): "chat.completion",
    ("chat", True): "chat.completion.chunk",
    ("text", False): "text_completion",
    ("text", True): "text_completion",
}


@dataclass(kw_only=True)
class ChoiceOutput:
    """What came of one choice so far."""

    tally: SpecDecodeStats = field(default_factory=SpecDecodeStats)
    deltas: list[OutputDelta] = field(default_factory=list)
    tool_parser: ToolCallParser | None = None
    """Finds tool calls, where there are tools."""
    parsed: ParsedDelta = field(default_factory=ParsedDelta)
    """What the newest delta came to."""

    def append(self, delta: OutputDelta, token_text: TokenText) -> None:
        """Hear one more delta."""
        self.deltas.append(delta)
        self.parsed = ParsedDelta(content=delta.text)
        if self.tool_parser is not None:
            text = "".join(
                token_text.special(token) + text_part
                for token, text_part in zip(delta.tokens, delta.texts, strict=True)
            )
            self.parsed = self.tool_parser.feed(text, last=delta.finished is not None)

    @property
    def finish_reason(self) -> str | None:
        """Why it ended, if it has: with calls to make, by OpenAI's own word."""
        finished = self.deltas[-1].finished
        if finished is FinishReason.STOP and self.tool_parser is not None and self.tool_parser.calls:
            return "tool_calls"
        return None if finished is None else finished.value

    @property
    def message(self) -> dict[str, Any]:
        """The whole message of a chat."""
        content = (
            self.tool_parser.content if self.tool_parser is not None else "".join(delta.text for delta in self.deltas)
        )
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if self.tool_parser is None or not self.tool_parser.calls:
            return message
        calls = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in self.tool_parser.calls
        ]
        return message | {"content": content or None, "tool_calls": calls}

    @property
    def delta_message(self) -> dict[str, Any]:
        """The newest delta as a chat's delta."""
        message: dict[str, Any] = {"content": self.parsed.content} if self.parsed.content else {}
        if self.parsed.calls:
            message["tool_calls"] = [
                {"index": call.index}
                | ({"id": call.started.id, "type": "function"} if call.started is not None else {})
                | {"function": ({"name": call.started.name} if call.started else {}) | {"arguments": call.arguments}}
                for call in self.parsed.calls
            ]
        return message

    @property
    def tokens(self) -> int:
        """How many, a stop token included."""
        return sum(len(delta.tokens) for delta in self.deltas)


@dataclass(frozen=True, kw_only=True)
class ResponseMeta:
    """What all parts of one answer have in common."""

    kind: Kind
    request_id: str
    model: str
    created: int
    prompt_tokens: int
    details: bool
    """Whether the request wants to see how it was drafted for."""

    def envelope(self, *, choices: list[dict[str, Any]], chunk: bool) -> dict[str, Any]:
        """The frame around choices."""
        return {
            "id": f"{_ID_PREFIXES[self.kind]}-{self.request_id}",
            "object": _OBJECT_NAMES[self.kind, chunk],
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


def full_response(meta: ResponseMeta, choices: Sequence[ChoiceOutput], token_text: TokenText) -> dict[str, Any]:
    """The answer of a request that does not stream."""
    bodies = []
    for index, choice in enumerate(choices):
        body: dict[str, Any] = {"index": index}
        text = "".join(delta.text for delta in choice.deltas)
        body |= {"message": choice.message} if meta.kind == "chat" else {"text": text}
        body["logprobs"] = _logprobs(meta, choice.deltas, token_text, 0)
        body["finish_reason"] = choice.finish_reason
        if meta.details:
            body["speculative"] = _token_details(choice.deltas) | speculative_usage([choice.tally])
        bodies.append(body)
    return meta.envelope(choices=bodies, chunk=False) | {"usage": usage(meta, choices)}


def role_chunk(meta: ResponseMeta, index: int) -> dict[str, Any] | None:
    """The chunk that begins a choice: a chat says who speaks."""
    if meta.kind == "text":
        return None
    choice = {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    return meta.envelope(choices=[choice], chunk=True)


def stream_chunk(meta: ResponseMeta, index: int, choice: ChoiceOutput, token_text: TokenText) -> dict[str, Any] | None:
    """The chunk of the newest delta, if it has anything to tell."""
    delta = choice.deltas[-1]
    logprobs = None
    if delta.logprobs is not None:
        before = sum(len(earlier.text) for earlier in choice.deltas[:-1])
        logprobs = _logprobs(meta, [delta], token_text, before)
    message = choice.delta_message
    if not message and delta.finished is None and logprobs is None and not meta.details:
        return None  # held back: half a character, what may become a stop string, or what may become a call
    body: dict[str, Any] = {"index": index}
    body |= {"delta": message} if meta.kind == "chat" else {"text": delta.text}
    body["logprobs"] = logprobs
    body["finish_reason"] = choice.finish_reason
    if meta.details:
        body["speculative"] = _token_details([delta]) | speculative_usage([choice.tally])
    return meta.envelope(choices=[body], chunk=True)


def usage_chunk(meta: ResponseMeta, choices: Sequence[ChoiceOutput]) -> dict[str, Any]:
    """The last chunk, where usage was asked for."""
    return meta.envelope(choices=[], chunk=True) | {"usage": usage(meta, choices)}


def usage(meta: ResponseMeta, choices: Sequence[ChoiceOutput]) -> dict[str, Any]:
    """Tokens, and how speculation went."""
    made = sum(choice.tokens for choice in choices)
    return {
        "prompt_tokens": meta.prompt_tokens,
        "completion_tokens": made,
        "total_tokens": meta.prompt_tokens + made,
        "speculative": speculative_usage(choice.tally for choice in choices),
    }


def speculative_usage(stats: Iterable[SpecDecodeStats]) -> dict[str, Any]:
    """Counts of speculation over all choices, with the acceptance length."""
    total = SpecDecodeStats()
    for one in stats:
        add_stats(total, one)
    length = round(total.acceptance_length, 4) if total.drafts else None
    return speculative_counts(total) | {"acceptance_length": length}


def speculative_counts(stats: SpecDecodeStats) -> dict[str, Any]:
    """Counts of speculation by the names that the API gives them."""
    return {
        "passes": stats.passes,
        "drafts": stats.drafts,
        "drafted_tokens": stats.drafted,
        "accepted_tokens": stats.accepted,
        "accepted_by_depth": list(stats.accepted_at),
    }


def _token_details(deltas: Sequence[OutputDelta]) -> dict[str, Any]:
    """Each token, its text, and the draft depth it was accepted from; 0 is the target's own."""
    return {
        "tokens": [token for delta in deltas for token in delta.tokens],
        "texts": [text for delta in deltas for text in delta.texts],
        "depths": [depth for delta in deltas for depth in delta.depths],
    }


def _logprobs(
    meta: ResponseMeta, deltas: Sequence[OutputDelta], token_text: TokenText, offset: int
) -> dict[str, Any] | None:
    if deltas[0].logprobs is None:
        return None
    entries = [entry for delta in deltas for entry in delta.logprobs or ()]
    if meta.kind == "chat":
        return {"content": [token_text.chat_logprobs(entry) for entry in entries], "refusal": None}
    return token_text.completion_logprobs(entries, [text for delta in deltas for text in delta.texts], offset)
