"""Build OpenAI's response JSON, whole or in chunks, from engine outputs. Pure functions."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from eyas.engine.output import OutputDelta, SpecDecodeStats
from eyas.engine.request import FinishReason
from eyas.serve.api_error import ApiError
from eyas.serve.builders.choice_extras import ChoiceExtras, Kind
from eyas.serve.builders.spec_decode_metrics import spec_decode_metrics
from eyas.serve.builders.token_text import TokenText
from eyas.serve.parsers.base import ParsedDelta
from eyas.serve.parsers.output_parser import OutputParser
from eyas.serve.protocol.completions import StreamOptions
from eyas.serve.supervisor import add_stats

_ID_PREFIXES = {"chat": "chatcmpl", "text": "cmpl"}
_OBJECT_NAMES = {
    ("chat", False): "chat.completion",
    ("chat", True): "chat.completion.chunk",
    ("text", False): "text_completion",
    ("text", True): "text_completion",
}


@dataclass(kw_only=True)
class ChoiceOutput:
    """The output of one choice so far."""

    stats: SpecDecodeStats = field(default_factory=SpecDecodeStats)
    deltas: list[OutputDelta] = field(default_factory=list)
    parser: OutputParser | None = None
    """Tells reasoning and tool calls from content; None if all is content."""
    reasoning_fields: tuple[str, ...] = ()
    """The fields of a message that hold reasoning; none if the server has no reasoning parser."""
    newest: Sequence[OutputDelta] = ()
    """The deltas that came last, which make one event of a stream."""
    parsed: ParsedDelta = field(default_factory=ParsedDelta)
    """Content, reasoning and tool calls of these."""
    tokens: int = 0
    """Their number so far, stop token included."""

    def append(self, deltas: Sequence[OutputDelta], token_text: TokenText) -> None:
        """Add the newest outputs."""
        self.newest = deltas
        self.deltas += deltas
        self.tokens += sum(len(delta.tokens) for delta in deltas)
        if self.parser is None:
            self.parsed = ParsedDelta(content="".join(delta.text for delta in deltas))
            return
        markers = self.parser.markers
        texts = [
            (mark if (mark := token_text.special(token)) in markers else "") + text
            for delta in deltas
            for token, text in zip(delta.tokens, delta.texts, strict=True)
        ]
        self.parsed = self.parser.feed(texts, last=deltas[-1].finished is not None)

    @property
    def first(self) -> bool:
        """Whether nothing came before the newest deltas."""
        return len(self.deltas) == len(self.newest)

    @property
    def finish_reason(self) -> str | None:
        """Why it ended, if it has; tool_calls if it ended with calls."""
        finished = self.deltas[-1].finished
        if finished is FinishReason.STOP and self.parser is not None and self.parser.calls:
            return "tool_calls"
        return None if finished is None else finished.value

    @property
    def message(self) -> dict[str, Any]:
        """The whole chat message."""
        if self.parser is None:
            return {"role": "assistant", "content": "".join(delta.text for delta in self.deltas)}
        calls = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in self.parser.calls
        ]
        reasoning = self.parser.reasoning or None
        content = self.parser.content or (None if calls or reasoning else "")
        message: dict[str, Any] = {"role": "assistant", "content": content}
        message |= dict.fromkeys(self.reasoning_fields, reasoning)
        return message | ({"tool_calls": calls} if calls else {})

    @property
    def delta_message(self) -> dict[str, Any]:
        """The newest outputs as the delta of a chat chunk."""
        reasoning = self.parsed.reasoning
        message: dict[str, Any] = dict.fromkeys(self.reasoning_fields, reasoning) if reasoning else {}
        if self.parsed.content:
            message["content"] = self.parsed.content
        if self.parsed.calls:
            message["tool_calls"] = [
                {"index": call.index}
                | ({"id": call.started.id, "type": "function"} if call.started is not None else {})
                | {"function": ({"name": call.started.name} if call.started else {}) | {"arguments": call.arguments}}
                for call in self.parsed.calls
            ]
        return message


@dataclass(frozen=True, kw_only=True)
class ResponseMeta:
    """What all chunks of one response share."""

    kind: Kind
    request_id: str
    model: str
    created: int
    prompt_tokens: int
    answers_per_prompt: int
    details: bool
    """Whether the request asked for speculation details per token."""
    extras: ChoiceExtras
    """What vLLM says beside OpenAI's fields."""
    num_spec_tokens: int | None
    """The deepest draft; None without drafts."""

    def envelope(self, *, choices: list[dict[str, Any]], chunk: bool) -> dict[str, Any]:
        """The response object around choices."""
        return {
            "id": f"{_ID_PREFIXES[self.kind]}-{self.request_id}",
            "object": _OBJECT_NAMES[self.kind, chunk],
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


class ResponseFormatter(Protocol):
    """Turns outputs into what a route sends: a whole response, or the events of a stream."""

    def whole(self, choices: Sequence[ChoiceOutput]) -> dict[str, Any]:
        """The response of a request that does not stream."""

    def delta(self, index: int, choice: ChoiceOutput) -> Iterator[dict[str, Any]]:
        """The events of the newest outputs of a choice."""

    def end(self, choices: Sequence[ChoiceOutput]) -> Iterator[dict[str, Any]]:
        """The last events of a stream."""

    def failed(self, failure: ApiError) -> dict[str, Any]:
        """The last event of a stream that failed."""


class CompletionFormatter:
    """Formats chat and text completions."""

    def __init__(self, meta: ResponseMeta, token_text: TokenText, options: StreamOptions | None) -> None:
        self._meta, self._token_text = meta, token_text
        self._include_usage = options is not None and options.include_usage
        self._continuous = options is not None and options.include_usage and options.continuous_usage_stats

    def whole(self, choices: Sequence[ChoiceOutput]) -> dict[str, Any]:
        """The response of a request that does not stream."""
        return full_response(self._meta, choices, self._token_text)

    def delta(self, index: int, choice: ChoiceOutput) -> Iterator[dict[str, Any]]:
        """The chunks of the newest outputs of a choice."""
        if choice.first:
            first = first_chunk(self._meta, index, choice.deltas[0], self._token_text)
            if first is not None:
                yield self._counted(first, 0)
        if (chunk := stream_chunk(self._meta, index, choice, self._token_text)) is not None:
            yield self._counted(chunk, choice.tokens)

    def end(self, choices: Sequence[ChoiceOutput]) -> Iterator[dict[str, Any]]:
        """The usage, if it was asked for."""
        if self._include_usage:
            yield usage_chunk(self._meta, choices)

    def failed(self, failure: ApiError) -> dict[str, Any]:
        """The error."""
        return failure.body

    def _counted(self, chunk: dict[str, Any], made: int) -> dict[str, Any]:
        """A chunk with the counts of its choice so far, if they were asked for."""
        if not self._continuous:
            return chunk
        prompt = self._meta.prompt_tokens
        return chunk | {"usage": {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}}


def full_response(meta: ResponseMeta, choices: Sequence[ChoiceOutput], token_text: TokenText) -> dict[str, Any]:
    """The response of a request that does not stream."""
    bodies = []
    for index, choice in enumerate(choices):
        body: dict[str, Any] = {"index": index}
        text = meta.extras.echo_text(index) + "".join(delta.text for delta in choice.deltas)
        body |= {"message": choice.message} if meta.kind == "chat" else {"text": text}
        logprobs = _logprobs(meta, choice.deltas, token_text, len(meta.extras.echo_text(index)))
        body["logprobs"] = meta.extras.with_echo(index, choice.deltas[0], logprobs, token_text)
        body["finish_reason"] = choice.finish_reason
        body |= meta.extras.choice(meta.kind, index, choice.deltas, token_text, first=True)
        if meta.details:
            body["speculative"] = _token_details(choice.deltas) | speculative_usage([choice.stats])
        bodies.append(body)
    envelope = meta.envelope(choices=bodies, chunk=False)
    envelope |= meta.extras.response(meta.kind, choices[0].deltas[0], token_text)
    return envelope | {"usage": usage(meta, choices)} | metrics(meta, choices)


def first_chunk(meta: ResponseMeta, index: int, first: OutputDelta, token_text: TokenText) -> dict[str, Any] | None:
    """The first chunk of a choice: the role in a chat, the prompt if it is echoed; else None."""
    if meta.kind == "text":
        if not meta.extras.echoes:
            return None
        logprobs = meta.extras.with_echo(index, first, None, token_text)
        echo = {"index": index, "text": meta.extras.echo_text(index), "logprobs": logprobs, "finish_reason": None}
        return meta.envelope(choices=[echo], chunk=True)
    choice = {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    return meta.envelope(choices=[choice], chunk=True) | meta.extras.response(meta.kind, first, token_text)


def stream_chunk(meta: ResponseMeta, index: int, choice: ChoiceOutput, token_text: TokenText) -> dict[str, Any] | None:
    """The chunk of the newest outputs; None if there is nothing to send."""
    newest, logprobs = choice.newest, None
    if newest[0].logprobs is not None:
        earlier = choice.deltas[: -len(newest)]
        before = len(meta.extras.echo_text(index)) + sum(len(delta.text) for delta in earlier)
        logprobs = _logprobs(meta, newest, token_text, before)
    message = choice.delta_message
    quiet = logprobs is None and not meta.details and not meta.extras.return_token_ids
    if not message and newest[-1].finished is None and quiet:
        return None  # held back: part of a character, a possible stop string, marker or tool call
    body: dict[str, Any] = {"index": index}
    body |= {"delta": message} if meta.kind == "chat" else {"text": "".join(delta.text for delta in newest)}
    body["logprobs"] = logprobs
    body["finish_reason"] = choice.finish_reason
    body |= meta.extras.choice(meta.kind, index, newest, token_text, first=choice.first)
    if meta.details:
        body["speculative"] = _token_details(newest) | speculative_usage([choice.stats])
    return meta.envelope(choices=[body], chunk=True)


def usage_chunk(meta: ResponseMeta, choices: Sequence[ChoiceOutput]) -> dict[str, Any]:
    """The last chunk of a stream with include_usage."""
    return meta.envelope(choices=[], chunk=True) | {"usage": usage(meta, choices)} | metrics(meta, choices)


def metrics(meta: ResponseMeta, choices: Sequence[ChoiceOutput]) -> dict[str, Any]:
    """vLLM's `metrics`. It describes one answer, so several have none."""
    if len(choices) != 1 or meta.num_spec_tokens is None:
        return {}
    (choice,) = choices
    figures = spec_decode_metrics(
        choice.stats, choice.deltas, num_spec_tokens=meta.num_spec_tokens, detailed=meta.details
    )
    return {"metrics": {"speculative_decoding": figures}}


def usage(meta: ResponseMeta, choices: Sequence[ChoiceOutput]) -> dict[str, Any]:
    """Token counts, and counts of speculation."""
    made = sum(choice.tokens for choice in choices)
    reasoning = sum(choice.parser.reasoning_tokens for choice in choices if choice.parser is not None)
    told = any(choice.reasoning_fields for choice in choices)
    return {
        "prompt_tokens": meta.prompt_tokens,
        "prompt_tokens_details": {"cached_tokens": _cached_tokens(meta, choices)},
        "completion_tokens": made,
        "total_tokens": meta.prompt_tokens + made,
        **({"completion_tokens_details": {"reasoning_tokens": reasoning}} if told else {}),
        "speculative": speculative_usage(choice.stats for choice in choices),
    }


def _cached_tokens(meta: ResponseMeta, choices: Sequence[ChoiceOutput]) -> int:
    """Prompt tokens that the prefix cache had, over all prompts: a prompt with several answers counts once.

    The cache is kept apart by key and salt, so this tells nothing of anybody else's prompts.
    """
    firsts = [choice.deltas[0] for choice in choices[:: meta.answers_per_prompt] if choice.deltas]
    return sum(delta.num_cached_tokens for delta in firsts)


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
        "suffix_drafted_tokens": stats.suffix_drafted,
        "suffix_accepted_tokens": stats.suffix_accepted,
    }


def _token_details(deltas: Sequence[OutputDelta]) -> dict[str, Any]:
    """Each token, its text, the draft depth it was accepted from (0: the target sampled it), and who proposed it."""
    return {
        "tokens": [token for delta in deltas for token in delta.tokens],
        "texts": [text for delta in deltas for text in delta.texts],
        "depths": [depth for delta in deltas for depth in delta.depths],
        "sources": [source for delta in deltas for source in delta.sources],
    }


def _logprobs(
    meta: ResponseMeta, deltas: Sequence[OutputDelta], token_text: TokenText, offset: int
) -> dict[str, Any] | None:
    if deltas[0].logprobs is None:
        return None
    entries = [entry for delta in deltas for entry in delta.logprobs or ()]
    as_ids = meta.extras.tokens_as_ids
    if meta.kind == "chat":
        return {"content": [token_text.chat_logprobs(entry, as_ids) for entry in entries], "refusal": None}
    return token_text.completion_logprobs(entries, [text for delta in deltas for text in delta.texts], offset, as_ids)
