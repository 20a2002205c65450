"""A question in a long text that is none of its business: at its start, in its middle, at its end.

The filler is other text of the user's own choosing, or that of the other prompts, repeated where it is too short. It is
cut so that a shorter text begins a longer one: what the target has read for 1,000 tokens is read on for 2,000, and on a
CPU that is most of the work.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from eyas.data.conversations import Conversation
from eyas.data.encode_prompt import encode_prompt
from eyas.doctor.transcripts import Asked
from eyas.target.model import Target

PLACES = ("end", "start", "middle")


@dataclass(frozen=True, kw_only=True)
class LongPrompt:
    """One question at one place of a text of one length."""

    length: int
    place: str
    asked: Asked


class Filler:
    """Text by the token."""

    def __init__(self, target: Target, text: str) -> None:
        encoding: Any = target.tokenizer(text, add_special_tokens=False, verbose=False)
        self._ids: list[int] = encoding["input_ids"]
        self._target = target

    def take(self, start: int, tokens: int) -> str:
        """About this many tokens, from a place on; from the beginning again where the text ends."""
        ids = [self._ids[i % len(self._ids)] for i in range(start, start + tokens)]
        # A cut may go through a character.
        return str(self._target.tokenizer.decode(ids)).strip("\ufffd")


def allowed_lengths(target: Target, wanted: Sequence[int], room: int) -> tuple[list[int], list[int]]:
    """The lengths that fit the target's context with `room` tokens for question and answer, and those that do not."""
    longest = target.facts.max_position_embeddings
    fits = [length for length in wanted if longest is None or length + room <= longest]
    return fits, [length for length in wanted if length not in fits]


def long_prompts(
    target: Target, filler: Filler, questions: Mapping[int, Conversation], length: int, places: Sequence[str] = PLACES
) -> Iterator[LongPrompt]:
    """All prompts of one length: what a conversation says last is the question."""
    for place in places:
        for key, question in questions.items():
            before, behind = {"end": (length, 0), "start": (0, length), "middle": (length // 2, length - length // 2)}[
                place
            ]
            parts = [filler.take(0, before)] if before else []
            parts += [str(question.messages[-1]["content"])]
            parts += [filler.take(before, behind)] if behind else []
            said = {"role": "user", "content": "\n\n".join(parts)}
            ids = encode_prompt(target, replace(question, messages=(said,)))
            yield LongPrompt(length=length, place=place, asked=Asked(key=key, ids=tuple(ids)))
