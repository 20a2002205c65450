"""Servers with a scripted engine, token by token, special tokens included."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from chat_tokenizer import LETTERS, SPECIAL, letter_tokenizer
from eyas.engine.output import OutputDelta, SpecDecodeStats
from eyas.engine.request import FinishReason

if TYPE_CHECKING:
    from eyas.target.model import Target

LETTER = 60
"""A token that is not special, whatever there is."""
RARE = "QXZJKVWYUHGBNMRO"
"""Letters that make room for special tokens: the tiny target has as many tokens as there are letters."""


def with_template(target: Target, template: str, special: tuple[str, ...] = (), letters: str = "") -> Target:
    """The target with a chat template, and with these special tokens and letters in place of rare letters."""
    kept = [letter for letter in LETTERS if letter not in RARE[: len(special) + len(letters)]]
    return replace(target, tokenizer=letter_tokenizer(template, (*SPECIAL, *special), [*kept, *letters]))


def script(
    client: Any, text: str, *, finished: FinishReason = FinishReason.STOP, marks: Mapping[str, int] | None = None
) -> None:
    """Let the engine answer this: markers as special tokens (by default the server's), all else letter by letter."""
    marks = client.application.context.request_builder.special_tokens if marks is None else marks
    tokens: list[tuple[int, str]] = []
    rest = text
    while rest:
        mark = next((mark for mark in marks if rest.startswith(mark)), None)
        tokens.append((LETTER, rest[0]) if mark is None else (marks[mark], ""))
        rest = rest[len(mark or rest[0]) :]

    async def generate(requests: Any, on_output: Any) -> None:
        pieces = [tokens[at : at + 3] for at in range(0, len(tokens), 3)]
        for number, piece in enumerate(pieces, 1):
            delta = OutputDelta(
                key=0,
                tokens=tuple(token for token, _ in piece),
                texts=tuple(said for _, said in piece),
                depths=(0,) * len(piece),
                finished=finished if number == len(pieces) else None,
            )
            await on_output(0, [delta], SpecDecodeStats())

    client.application.context.engine_client.generate = generate


def joined(reply: Any) -> dict[str, Any]:
    """The message that the deltas of a stream join to."""
    message: dict[str, Any] = {}
    for event in reply.events:
        if not event["choices"]:
            continue
        delta = event["choices"][0]["delta"]
        for key in ("content", "reasoning", "reasoning_content"):
            if delta.get(key):
                message[key] = message.get(key, "") + delta[key]
        for call in delta.get("tool_calls", ()):
            calls = message.setdefault("tool_calls", [])
            if "id" in call:
                calls.append([call["function"]["name"], ""])
            calls[call["index"]][1] += call["function"]["arguments"]
    return message
