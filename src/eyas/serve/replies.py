"""From pieces to the JSON of OpenAI's answers, whole or in chunks. Pure functions of what the engine gave."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from eyas.engine.answer import Piece, Tally
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

    tally: Tally = field(default_factory=Tally)
    pieces: list[Piece] = field(default_factory=list)

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
        text = "".join(piece.text for piece in heard.pieces)
        last = heard.pieces[-1]
        body: dict[str, Any] = {"index": index}
        body |= {"message": {"role": "assistant", "content": text}} if head.kind == "chat" else {"text": text}
        body["logprobs"] = _logprobs(head, heard.pieces, words, 0)
        body["finish_reason"] = None if last.finished is None else last.finished.value
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
    if not piece.text and piece.finished is None and logprobs is None and not head.details:
        return None  # held back: half a character, or what may become a stop string
    choice: dict[str, Any] = {"index": index}
    choice |= {"delta": {"content": piece.text} if piece.text else {}} if head.kind == "chat" else {"text": piece.text}
    choice["logprobs"] = logprobs
    choice["finish_reason"] = None if piece.finished is None else piece.finished.value
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


def figures(tallies: Sequence[Tally]) -> dict[str, Any]:
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


def _at(tally: Tally, depth: int) -> int:
    return tally.accepted_at[depth] if depth < len(tally.accepted_at) else 0


def _origins(pieces: Sequence[Piece]) -> dict[str, Any]:
    """Each token, its text, and the draft depth it was accepted from; 0 is the target's own."""
    return {
        "tokens": [token for piece in pieces for token in piece.tokens],
        "texts": [text for piece in pieces for text in piece.texts],
        "depths": [depth for piece in pieces for depth in piece.depths],
    }


def _logprobs(head: Letterhead, pieces: Sequence[Piece], words: Words, offset: int) -> dict[str, Any] | None:
    if pieces[0].logprobs is None:
        return None
    entries = [entry for piece in pieces for entry in piece.logprobs or ()]
    if head.kind == "chat":
        return {"content": [words.chat_entry(entry) for entry in entries], "refusal": None}
    return words.text_entries(entries, [text for piece in pieces for text in piece.texts], offset)
