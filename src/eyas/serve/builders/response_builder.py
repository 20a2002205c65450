"""Builds OpenAI's response JSON, whole or in chunks, from engine outputs."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal

from eyas.engine.output import OutputDelta, SpecDecodeStats
from eyas.engine.request import FinishReason
from eyas.serve.api_error import ApiError
from eyas.serve.builders.request_builder import EngineRequests
from eyas.serve.builders.token_text import TokenText
from eyas.serve.parsers.base import OutputParser, ParsedDelta
from eyas.serve.protocol.completions import CompletionRequest, GenerationRequest
from eyas.serve.supervisor import add_stats

Kind = Literal["chat", "text"]
Json = dict[str, Any]
_ID_PREFIXES = {"chat": "chatcmpl", "text": "cmpl"}


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
    """Content, reasoning and tool calls of the newest deltas."""
    tokens: int = 0
    """Tokens so far, stop token included."""

    def append(self, deltas: Sequence[OutputDelta], token_text: TokenText) -> None:
        """Add the newest outputs."""
        self.newest = deltas
        self.deltas += deltas
        self.tokens += sum(len(delta.tokens) for delta in deltas)
        if self.parser is None:
            self.parsed = ParsedDelta(content=_text_of(deltas))
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
    def message(self) -> Json:
        """The whole chat message."""
        if self.parser is None:
            return {"role": "assistant", "content": _text_of(self.deltas)}
        calls, reasoning = [call.message for call in self.parser.calls], self.parser.reasoning or None
        content = self.parser.content or (None if calls or reasoning else "")
        message = {"role": "assistant", "content": content} | dict.fromkeys(self.reasoning_fields, reasoning)
        return message | ({"tool_calls": calls} if calls else {})

    @property
    def delta_message(self) -> Json:
        """The newest outputs as the delta of a chat chunk."""
        reasoning = self.parsed.reasoning
        message: Json = dict.fromkeys(self.reasoning_fields, reasoning) if reasoning else {}
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


class ResponseFormatter(ABC):
    """Turns the outputs of one request into what a route sends: a whole response, or the events of a stream."""

    def __init__(
        self,
        request_id: str,
        *,
        model: str,
        created: int,
        body: GenerationRequest,
        engine_requests: EngineRequests,
        num_spec_tokens: int | None,
        token_text: TokenText,
    ) -> None:
        """`num_spec_tokens` is the deepest draft; None without drafts."""
        self._request_id, self._model, self._created = request_id, model, created
        self._body, self._engine_requests, self._token_text = body, engine_requests, token_text
        self._num_spec_tokens = num_spec_tokens
        self._details = body.speculative is not None and body.speculative.details

    @abstractmethod
    def whole(self, choices: Sequence[ChoiceOutput]) -> Json:
        """The response of a request that does not stream."""

    @abstractmethod
    def delta(self, index: int, choice: ChoiceOutput) -> Iterator[Json]:
        """The events of the newest outputs of a choice."""

    @abstractmethod
    def end(self, choices: Sequence[ChoiceOutput]) -> Iterator[Json]:
        """The last events of a stream."""

    @abstractmethod
    def failed(self, failure: ApiError) -> Json:
        """The last event of a stream that failed."""

    def usage(self, choices: Sequence[ChoiceOutput]) -> Json:
        """Token counts, and counts of speculation."""
        made = sum(choice.tokens for choice in choices)
        prompt = self._engine_requests.prompt_tokens
        # A prompt with several answers counts once. The cache is kept apart by key and salt, so this tells nothing
        # about anybody else's prompts.
        cached = sum(choice.deltas[0].num_cached_tokens for choice in choices[:: self._body.n] if choice.deltas)
        reasoning = sum(choice.parser.reasoning_tokens for choice in choices if choice.parser is not None)
        has_reasoning = any(choice.reasoning_fields for choice in choices)
        return {
            "prompt_tokens": prompt,
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens": made,
            "total_tokens": prompt + made,
            **({"completion_tokens_details": {"reasoning_tokens": reasoning}} if has_reasoning else {}),
            "speculative": speculative_usage(choice.stats for choice in choices),
        }

    def metrics(self, choices: Sequence[ChoiceOutput]) -> Json:
        """vLLM's `metrics`. They describe one answer, so several have none."""
        if len(choices) != 1 or self._num_spec_tokens is None:
            return {}
        (choice,) = choices
        stats = choice.stats
        at_least = [stats.drafts, *stats.accepted_at]
        at_least += [0] * max(1, self._num_spec_tokens + 2 - len(at_least))
        figures: Json = {
            "mean_acceptance_length": stats.acceptance_length,
            "draft_acceptance_rate": stats.accepted / max(1, stats.drafted),
            # Steps that accepted exactly 0, 1, 2, ... draft tokens, from those that accepted at least as many.
            "acceptance_histogram": [count - more for count, more in pairwise(at_least)],
            "num_spec_steps": stats.drafts,
            "num_accepted_draft_tokens": stats.accepted,
            "num_draft_tokens": stats.drafted,
            "num_spec_tokens": self._num_spec_tokens,
        }
        if self._details:  # as with vLLM's --per-request-spec-decode-metrics detailed
            own_steps = [(one.drafted, one.accepted) for one in choice.deltas if one.drafted]
            steps = own_steps if stats.steps is None else stats.steps
            figures["per_step_accepted"] = [accepted for _, accepted in steps]
            figures["per_step_drafted"] = [drafted for drafted, _ in steps]
        return {"metrics": {"speculative_decoding": figures}}


class CompletionFormatter(ResponseFormatter):
    """Formats chat and text completions."""

    @property
    def _kind(self) -> Kind:
        return "text" if isinstance(self._body, CompletionRequest) else "chat"

    def whole(self, choices: Sequence[ChoiceOutput]) -> Json:
        bodies = []
        for index, choice in enumerate(choices):
            echo = self._echo(index)
            body: Json = (
                {"message": choice.message} if self._kind == "chat" else {"text": echo + _text_of(choice.deltas)}
            )
            logprobs = self._with_echo(index, choice.deltas[0], self._logprobs(choice.deltas, len(echo)))
            body |= {"logprobs": logprobs, "finish_reason": choice.finish_reason}
            bodies.append({"index": index} | body | self._extras(index, choice, choice.deltas, first=True))
        response = self._envelope(bodies, chunk=False) | self._prompt_fields("chat", 0, choices[0].deltas[0])
        return response | {"usage": self.usage(choices)} | self.metrics(choices)

    def delta(self, index: int, choice: ChoiceOutput) -> Iterator[Json]:
        if choice.first and (first := self._first_chunk(index, choice.deltas[0])) is not None:
            yield self._counted(first, 0)
        if (chunk := self._chunk(index, choice)) is not None:
            yield self._counted(chunk, choice.tokens)

    def end(self, choices: Sequence[ChoiceOutput]) -> Iterator[Json]:
        if self._body.stream_options is not None and self._body.stream_options.include_usage:
            yield self._envelope([], chunk=True) | {"usage": self.usage(choices)} | self.metrics(choices)

    def failed(self, failure: ApiError) -> Json:
        return failure.body

    def _counted(self, chunk: Json, made: int) -> Json:
        """A chunk with the counts of its choice so far, if they were asked for."""
        options = self._body.stream_options
        if options is None or not (options.include_usage and options.continuous_usage_stats):
            return chunk
        prompt = self._engine_requests.prompt_tokens
        return chunk | {"usage": {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}}

    def _first_chunk(self, index: int, first: OutputDelta) -> Json | None:
        """The first chunk of a choice: the role in a chat, the prompt if it is echoed; else None."""
        if self._kind == "chat":
            message = {"role": "assistant", "content": ""}
            choice = {"index": index, "delta": message, "logprobs": None, "finish_reason": None}
            return self._envelope([choice], chunk=True) | self._prompt_fields("chat", 0, first)
        if not self._engine_requests.echoes:
            return None
        logprobs = self._with_echo(index, first, None)
        choice = {"index": index, "text": self._echo(index), "logprobs": logprobs, "finish_reason": None}
        return self._envelope([choice], chunk=True)

    def _chunk(self, index: int, choice: ChoiceOutput) -> Json | None:
        """The chunk of the newest outputs; None if there is nothing to send."""
        newest, logprobs = choice.newest, None
        if newest[0].logprobs is not None:
            earlier = choice.deltas[: -len(newest)]
            logprobs = self._logprobs(newest, len(self._echo(index)) + len(_text_of(earlier)))
        message = choice.delta_message
        quiet = logprobs is None and not self._details and not self._body.return_token_ids
        if not message and newest[-1].finished is None and quiet:
            return None  # held back: part of a character, a possible stop string, marker or tool call
        body: Json = {"delta": message} if self._kind == "chat" else {"text": _text_of(newest)}
        body |= {"logprobs": logprobs, "finish_reason": choice.finish_reason}
        return self._envelope(
            [{"index": index} | body | self._extras(index, choice, newest, first=choice.first)], chunk=True
        )

    def _envelope(self, choices: list[Json], *, chunk: bool) -> Json:
        """The response object around choices."""
        chat_object = "chat.completion.chunk" if chunk else "chat.completion"
        return {
            "id": f"{_ID_PREFIXES[self._kind]}-{self._request_id}",
            "object": chat_object if self._kind == "chat" else "text_completion",
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }

    def _extras(self, index: int, choice: ChoiceOutput, deltas: Sequence[OutputDelta], *, first: bool) -> Json:
        """Fields of a choice that OpenAI does not have; `first` if nothing of it was sent before."""
        reason = deltas[-1].stop_reason
        fields: Json = {"stop_reason": None if reason in self._engine_requests.eos_ids else reason}
        if self._body.return_token_ids:
            fields["token_ids"] = [token for delta in deltas for token in delta.tokens]
        if first:
            fields |= self._prompt_fields("text", index, deltas[0])
        if self._details:
            fields["speculative"] = _token_details(deltas) | speculative_usage([choice.stats])
        return fields

    def _prompt_fields(self, kind: Kind, index: int, first: OutputDelta) -> Json:
        """Token ids and logprobs of the prompt: in a chat of the response, in a text completion of each choice."""
        if kind != self._kind:
            return {}
        fields: Json = {}
        if self._body.return_token_ids:
            fields["prompt_token_ids"] = list(self._engine_requests.requests[index].prompt)
        if (alternatives := self._body.prompt_logprobs) is not None:
            entries = [self._token_text.prompt_logprobs(one, alternatives) for one in first.prompt_logprobs or ()]
            fields["prompt_logprobs"] = [None, *entries]  # nothing comes before the first token
        return fields

    def _echo(self, index: int) -> str:
        """The prompt, if it comes back before the answer."""
        return self._engine_requests.echoes[index].text if self._engine_requests.echoes else ""

    def _with_echo(self, index: int, first: OutputDelta, logprobs: Json | None) -> Json | None:
        """Logprobs of the echoed prompt, if there is one, then those of the answer."""
        body, echoes = self._body, self._engine_requests.echoes
        if not echoes or not isinstance(body, CompletionRequest) or body.logprobs is None:
            return logprobs
        entries = [replace(entry, top=entry.top[: body.logprobs]) for entry in first.prompt_logprobs or ()]
        echoed = echoes[index].logprobs(entries, self._token_text, body.return_tokens_as_token_ids)
        return {name: [*values, *(logprobs or {}).get(name, ())] for name, values in echoed.items()}

    def _logprobs(self, deltas: Sequence[OutputDelta], offset: int) -> Json | None:
        if deltas[0].logprobs is None:
            return None
        entries = [entry for delta in deltas for entry in delta.logprobs or ()]
        as_ids = self._body.return_tokens_as_token_ids
        if self._kind == "chat":
            return {"content": [self._token_text.chat_logprobs(entry, as_ids) for entry in entries], "refusal": None}
        texts = [text for delta in deltas for text in delta.texts]
        return self._token_text.completion_logprobs(entries, texts, offset, as_ids)


def without_answer(delta: OutputDelta) -> OutputDelta:
    """A delta without the one token that an engine chooses even if none is asked for."""
    logprobs = None if delta.logprobs is None else ()
    return replace(
        delta, tokens=(), texts=(), depths=(), logprobs=logprobs, finished=FinishReason.LENGTH, stop_reason=None
    )


def speculative_usage(stats: Iterable[SpecDecodeStats]) -> Json:
    """Counts of speculation over all choices, with the acceptance length."""
    total = SpecDecodeStats()
    for one in stats:
        add_stats(total, one)
    length = round(total.acceptance_length, 4) if total.drafts else None
    return speculative_counts(total) | {"acceptance_length": length}


def speculative_counts(stats: SpecDecodeStats) -> Json:
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


def _text_of(deltas: Sequence[OutputDelta]) -> str:
    return "".join(delta.text for delta in deltas)


def _token_details(deltas: Sequence[OutputDelta]) -> Json:
    """Each token, its text, the draft depth it was accepted from (0: sampled by the target), and who proposed it."""
    return {
        "tokens": [token for delta in deltas for token in delta.tokens],
        "texts": [text for delta in deltas for text in delta.texts],
        "depths": [depth for delta in deltas for depth in delta.depths],
        "sources": [source for delta in deltas for source in delta.sources],
    }
