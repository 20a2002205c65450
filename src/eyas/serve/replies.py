"""From pieces to the JSON of OpenAI's answers, whole or in chunks. Pure functions of what the engine gave."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from eyas.engine.output import OutputDelta, SpecDecodeStats
from eyas.engine.request import FinishReason
from eyas.serve.calls import CallReader, Delta
from eyas.serve.words import Words

Kind = Literal["chat", "text"]
_IDS = {"chat": "chatcmpl", "text": "cmpl"}
_OBJECTS = {
    ("chat", False): "chat.completion",
    ("chat", True): "chat.completion.chunk",
    ("text", False): "text_completion",
    ("text", True): "text_completion",
}


@dataclass(kw_only=True)
class Heard:
    """What came of one choice so far."""

    tally: SpecDecodeStats = field(default_factory=SpecDecodeStats)
    pieces: list[OutputDelta] = field(default_factory=list)
    reader: CallReader | None = None
    """Finds tool calls, where there are tools."""
    delta: Delta = field(default_factory=Delta)
    """What the newest piece came to."""

    def take(self, piece: OutputDelta, words: Words) -> None:
        """Hear one more piece."""
        self.pieces.append(piece)
        self.delta = Delta(content=piece.text)
        if self.reader is not None:
            text = "".join(words.mark(token) + said for token, said in zip(piece.tokens, piece.texts, strict=True))
            self.delta = self.reader.feed(text, last=piece.finished is not None)

    @property
    def finish_reason(self) -> str | None:
        """Why it ended, if it has: with calls to make, by OpenAI's own word."""
        finished = self.pieces[-1].finished
        if finished is FinishReason.STOP and self.reader is not None and self.reader.calls:
            return "tool_calls"
        return None if finished is None else finished.value

    @property
    def message(self) -> dict[str, Any]:
        """The whole message of a chat."""
        content = self.reader.content if self.reader is not None else "".join(piece.text for piece in self.pieces)
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if self.reader is None or not self.reader.calls:
            return message
        calls = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in self.reader.calls
        ]
        return message | {"content": content or None, "tool_calls": calls}

    @property
    def news(self) -> dict[str, Any]:
        """The newest piece as a chat's delta."""
        told: dict[str, Any] = {"content": self.delta.content} if self.delta.content else {}
        if self.delta.calls:
            told["tool_calls"] = [
                {"index": piece.index}
                | ({"id": piece.begun.id, "type": "function"} if piece.begun is not None else {})
                | {"function": ({"name": piece.begun.name} if piece.begun else {}) | {"arguments": piece.arguments}}
                for piece in self.delta.calls
            ]
        return told

    @property
    def tokens(self) -> int:
        """How many, a stop token included."""
        return sum(len(piece.tokens) for piece in self.pieces)


@dataclass(frozen=True, kw_only=True)
class Letterhead:
    """What all parts of one answer have in common."""

    kind: Kind
    request_id: str
    model: str
    created: int
    prompt_tokens: int
    details: bool
    """Whether the request wants to see how it was drafted for."""

    def of(self, *, choices: list[dict[str, Any]], chunk: bool) -> dict[str, Any]:
        """The frame around choices."""
        return {
            "id": f"{_IDS[self.kind]}-{self.request_id}",
            "object": _OBJECTS[self.kind, chunk],
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


def whole(head: Letterhead, choices: Sequence[Heard], words: Words) -> dict[str, Any]:
    """The answer of a request that does not stream."""
    bodies = []
    for index, heard in enumerate(choices):
        body: dict[str, Any] = {"index": index}
        text = "".join(piece.text for piece in heard.pieces)
        body |= {"message": heard.message} if head.kind == "chat" else {"text": text}
        body["logprobs"] = _logprobs(head, heard.pieces, words, 0)
        body["finish_reason"] = heard.finish_reason
        if head.details:
            body["speculative"] = _origins(heard.pieces) | figures([heard.tally])
        bodies.append(body)
    return head.of(choices=bodies, chunk=False) | {"usage": usage(head, choices)}


def opening(head: Letterhead, index: int) -> dict[str, Any] | None:
    """The chunk that begins a choice: a chat says who speaks."""
    if head.kind == "text":
        return None
    choice = {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    return head.of(choices=[choice], chunk=True)


def chunk(head: Letterhead, index: int, heard: Heard, words: Words) -> dict[str, Any] | None:
    """The chunk of the newest piece, if it has anything to tell."""
    piece = heard.pieces[-1]
    logprobs = None
    if piece.logprobs is not None:
        before = sum(len(earlier.text) for earlier in heard.pieces[:-1])
        logprobs = _logprobs(head, [piece], words, before)
    news = heard.news
    if not news and piece.finished is None and logprobs is None and not head.details:
        return None  # held back: half a character, what may become a stop string, or what may become a call
    choice: dict[str, Any] = {"index": index}
    choice |= {"delta": news} if head.kind == "chat" else {"text": piece.text}
    choice["logprobs"] = logprobs
    choice["finish_reason"] = heard.finish_reason
    if head.details:
        choice["speculative"] = _origins([piece]) | figures([heard.tally])
    return head.of(choices=[choice], chunk=True)


def closing(head: Letterhead, choices: Sequence[Heard]) -> dict[str, Any]:
    """The last chunk, where usage was asked for."""
    return head.of(choices=[], chunk=True) | {"usage": usage(head, choices)}


def usage(head: Letterhead, choices: Sequence[Heard]) -> dict[str, Any]:
    """Tokens, and how speculation went."""
    made = sum(heard.tokens for heard in choices)
    return {
        "prompt_tokens": head.prompt_tokens,
        "completion_tokens": made,
        "total_tokens": head.prompt_tokens + made,
        "speculative": figures([heard.tally for heard in choices]),
    }


def figures(tallies: Sequence[SpecDecodeStats]) -> dict[str, Any]:
    """Counts of speculation, pooled."""
    depth = max((len(tally.accepted_at) for tally in tallies), default=0)
    drafts, accepted = sum(tally.drafts for tally in tallies), sum(tally.accepted for tally in tallies)
    return {
        "passes": sum(tally.passes for tally in tallies),
        "drafts": drafts,
        "drafted_tokens": sum(tally.drafted for tally in tallies),
        "accepted_tokens": accepted,
        "accepted_by_depth": [sum(_at(tally, i) for tally in tallies) for i in range(depth)],
        "acceptance_length": round(1 + accepted / drafts, 4) if drafts else None,
    }


def _at(tally: SpecDecodeStats, depth: int) -> int:
    return tally.accepted_at[depth] if depth < len(tally.accepted_at) else 0


def _origins(pieces: Sequence[OutputDelta]) -> dict[str, Any]:
    """Each token, its text, and the draft depth it was accepted from; 0 is the target's own."""
    return {
        "tokens": [token for piece in pieces for token in piece.tokens],
        "texts": [text for piece in pieces for text in piece.texts],
        "depths": [depth for piece in pieces for depth in piece.depths],
    }


def _logprobs(head: Letterhead, pieces: Sequence[OutputDelta], words: Words, offset: int) -> dict[str, Any] | None:
    if pieces[0].logprobs is None:
        return None
    entries = [entry for piece in pieces for entry in piece.logprobs or ()]
    if head.kind == "chat":
        return {"content": [words.chat_entry(entry) for entry in entries], "refusal": None}
    return words.text_entries(entries, [text for piece in pieces for text in piece.texts], offset)
