"""Parses an OpenAI event stream, as bytes with arrival times, into an answer with its latencies.

Parsing happens after the stream was read, so that it does not delay the reading of other streams.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import pairwise
from typing import Any

from eyas.bench.counters import DraftCounts, draft_counts_of_event
from eyas.remote.address import error_message

Arrival = tuple[float, bytes]


@dataclass(frozen=True, kw_only=True)
class StreamedAnswer:
    """A request with its answer or error. Times are seconds since the run began."""

    key: str
    category: str
    turn: int
    sent: float
    first: float | None = None
    """Arrival of the first text."""
    last: float | None = None
    """Arrival of the last text or of the finish reason."""
    text: str = ""
    tokens: int = 0
    prompt_tokens: int = 0
    chunk_gaps: tuple[float, ...] = ()
    """Seconds between arrivals of text."""
    event_gaps: tuple[float, ...] = ()
    """Seconds between events with a choice: the inter-token latency of `vllm bench serve`."""
    draft_counts: DraftCounts | None = None
    error: str | None = None

    @property
    def seconds(self) -> float:
        return (self.last if self.last is not None else self.sent) - self.sent

    @property
    def time_to_first_token(self) -> float | None:
        return None if self.first is None else self.first - self.sent

    @property
    def time_per_output_token(self) -> float | None:
        if self.first is None or self.last is None or self.tokens < 2:
            return None
        return (self.last - self.first) / (self.tokens - 1)

    @property
    def chunks(self) -> int:
        """Number of pieces in which the text came."""
        return len(self.chunk_gaps) + (self.first is not None)

    @property
    def digest(self) -> str:
        return sha256(self.text.encode()).hexdigest()[:16]


class StreamError(Exception):
    """The bytes are not an OpenAI event stream."""


def parse_stream(asked: StreamedAnswer, arrivals: Sequence[Arrival]) -> StreamedAnswer:
    """The answer in a complete stream, or the error in it."""
    try:
        return _parse_events(asked, _events(arrivals))
    except StreamError as error:
        return replace(asked, error=str(error))


def _parse_events(asked: StreamedAnswer, events: Sequence[tuple[float, Mapping[str, Any]]]) -> StreamedAnswer:
    text: list[str] = []
    shown: list[float] = []
    chosen: list[float] = []
    usage: Mapping[str, Any] | None = None
    draft_counts: DraftCounts | None = None
    finished = False
    for when, event in events:
        if "error" in event:
            raise StreamError(f"the server ended the stream with an error: {error_message(event)}")
        if isinstance(event.get("usage"), dict):
            usage = event["usage"]
        draft_counts = draft_counts_of_event(event) or draft_counts
        choices = event.get("choices")
        if not isinstance(choices, list):
            raise StreamError(f"an event without choices: {_short(event)}")
        if choices:
            piece, ended = _choice(choices[0])
            finished = finished or ended
            chosen.append(when)
            if piece:
                text.append(piece)
                if not shown or when > shown[-1]:
                    shown.append(when)
    if not finished:
        raise StreamError(f"the stream broke off after {len(chosen)} events")
    if usage is None or not isinstance(usage.get("completion_tokens"), int):
        raise StreamError("the stream told no usage; tokens cannot be counted (stream_options.include_usage)")
    return replace(
        asked,
        first=shown[0] if shown else chosen[0],
        last=chosen[-1],
        text="".join(text),
        tokens=usage["completion_tokens"],
        prompt_tokens=usage.get("prompt_tokens") or 0,
        chunk_gaps=_between(shown),
        event_gaps=_between(chosen),
        draft_counts=draft_counts,
    )


def _events(arrivals: Sequence[Arrival]) -> list[tuple[float, Mapping[str, Any]]]:
    """The events, each with the arrival time of its last byte."""
    events: list[tuple[float, Mapping[str, Any]]] = []
    rest = b""
    for when, data in arrivals:
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue  # an empty line, a keep-alive comment, or an event name
            payload = line[5:].strip()
            if payload == b"[DONE]":
                continue
            try:
                event = json.loads(payload)
            except ValueError as error:
                raise StreamError(f"an event is no JSON: {_short(payload)}") from error
            if not isinstance(event, dict):
                raise StreamError(f"an event is no object: {_short(payload)}")
            events.append((when, event))
    if not events:
        raise StreamError(f"no events in what came: {_short(b''.join(data for _, data in arrivals))}")
    return events


def _choice(choice: object) -> tuple[str, bool]:
    """The text of a choice, and whether it has a finish reason."""
    if not isinstance(choice, dict):
        raise StreamError(f"a choice is no object: {_short(choice)}")
    delta = choice.get("delta")
    said = (
        [delta.get(name) for name in ("reasoning_content", "reasoning", "content")] if isinstance(delta, dict) else []
    )
    text = "".join(part for part in (*said, choice.get("text")) if isinstance(part, str))
    return text, choice.get("finish_reason") is not None


def _between(times: Sequence[float]) -> tuple[float, ...]:
    return tuple(later - earlier for earlier, later in pairwise(times))


def _short(what: object) -> str:
    text = what.decode("utf-8", "replace") if isinstance(what, bytes) else str(what)
    text = " ".join(text.split())
    return repr(text if len(text) <= 120 else f"{text[:117]}...")
