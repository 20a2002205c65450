"""Other renderings of some conversations, so that the drafter does not depend on one template and one system prompt.

Servers see prompts without the system prompt of the training data, without a BOS token, or without a template. A
drafter that knows only one opening may draft badly after another, so a share of the conversations is rendered in
another way. Invariants: what is done to a conversation follows from the seed and its index alone. A rendering that
cannot be made correctly with this tokenizer is not made: the conversation stays as it was and is counted as such.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from eyas.data.conversations import Conversation, Message
from eyas.train.recipe import Augmentation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from eyas.data.chat_encoder import ChatEncoder, Encoded

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a careful expert. Think before you answer and say so when you are not sure.",
    "Answer as briefly as you can. No greetings, no summaries.",
    "You are a patient teacher who explains things to beginners with everyday examples.",
    "You are a senior software engineer. Prefer working code with short comments over long explanations.",
    "You write for a general audience in plain language, in complete sentences and without lists.",
    "Format every answer in Markdown, with headings and bullet points where they help.",
    "You are the support desk of an online shop. Be friendly, ask for missing details, and never invent policies.",
    "You are a mathematician. Show each step of a calculation on a line of its own and state the result at the end.",
    "You are a creative writer with a taste for vivid images and unexpected turns.",
    "Current date: 3 March 2025. You have no access to the internet or to tools. Use only what you know.",
    "You are an assistant inside a company's internal knowledge base. Users are employees of different departments. "
    "Keep a neutral, professional tone, answer in the language of the question, and point out when a question needs "
    "a decision by a human.",
)

_PROBE = "A probe stands here."


class Augmenter:
    """Renders conversations according to an `Augmentation`."""

    def __init__(
        self, encoder: ChatEncoder, tokenizer: PreTrainedTokenizerBase, augmentation: Augmentation, seed: int
    ) -> None:
        self._encoder, self._tokenizer = encoder, tokenizer
        self._augmentation, self._seed = augmentation, seed
        self._opening = find_opening(tokenizer) if augmentation.wanted else None

    def encode(self, conversation: Conversation, index: int) -> tuple[tuple[Encoded, ...], str | None]:
        """Rows of conversation `index`, and what was applied: its kind, with " impossible" after it if it failed."""
        if self._opening is None:
            return self._encoder.encode(conversation), None
        chance = random.Random(f"{self._seed}:{index}")  # a string seeds the same in every process and on every machine
        kind, system_prompt = self._augmentation.kind(chance), chance.choice(SYSTEM_PROMPTS)
        made: tuple[Encoded, ...] | None
        match kind:
            case None:
                return self._encoder.encode(conversation), None
            case _ if conversation.samples:
                made = None  # sampled tokens belong to their own prompt
            case "no_system":
                made = self._without_system(conversation, self._opening)
            case "no_bos":
                made = self._without_bos(conversation, self._opening)
            case "varied_system":
                made = self._with_another_system(conversation, self._opening, system_prompt)
            case _:
                made = (encode_bare(conversation, self._tokenizer),)
        return (self._encoder.encode(conversation), f"{kind} impossible") if made is None else (made, kind)

    def _without_system(self, conversation: Conversation, opening: Opening) -> tuple[Encoded, ...] | None:
        spoken = _without_leading_system(conversation.messages)
        if not spoken or opening.system_ids is None:
            return None
        rows = self._encoder.encode(replace(conversation, messages=spoken))
        return _without_ids(rows, len(opening.bos_ids), opening.bos_ids + opening.system_ids)

    def _without_bos(self, conversation: Conversation, opening: Opening) -> tuple[Encoded, ...] | None:
        return _without_ids(self._encoder.encode(conversation), 0, opening.bos_ids) if opening.bos_ids else None

    def _with_another_system(
        self, conversation: Conversation, opening: Opening, prompt: str
    ) -> tuple[Encoded, ...] | None:
        if not opening.takes_system:
            return None
        system: Message = {"role": "system", "content": prompt}
        messages = (system, *_without_leading_system(conversation.messages))
        return self._encoder.encode(replace(conversation, messages=messages))


@dataclass(frozen=True, kw_only=True)
class Opening:
    """Tokens that a template puts before the first turn of a conversation."""

    bos_ids: tuple[int, ...]
    """The BOS token, if there is one that has no other use."""
    system_ids: tuple[int, ...] | None
    """System turn that the template adds by itself, often empty; None: cannot be separated from the rest."""
    takes_system: bool
    """Whether the template has a place for a system prompt."""


def find_opening(tokenizer: PreTrainedTokenizerBase) -> Opening:
    """Find how a template opens by comparing renderings of a few short conversations."""
    user = _said("user", "Hello there.")
    alone = _rendered(tokenizer, [user])
    told = _rendered(tokenizer, [_said("system", _PROBE), user])
    takes_system = told is not None and told.count(_PROBE) == 1
    unknown = Opening(bos_ids=(), system_ids=None, takes_system=takes_system)
    bos = tokenizer.bos_token or ""
    # The template adds a user's turn alone when it comes second.
    past = [user, _said("assistant", "Good day.")]
    before, behind = _rendered(tokenizer, past), _rendered(tokenizer, [*past, user])
    if alone is None or before is None or behind is None:
        return unknown
    if behind.startswith(before):
        turn = behind[len(before) :]
    else:  # it rewrites earlier turns; after a system prompt a turn is alone as well
        turns = (alone, alone.removeprefix(bos))
        turn = next((one for one in turns if told is not None and takes_system and told.endswith(one)), "")
    if not turn or not alone.endswith(turn):
        return unknown
    prefix = alone.removesuffix(turn)
    # Some tokenizers name the token that opens every turn as BOS; removing it would break the turn.
    separate = bool(bos) and prefix.startswith(bos) and not turn.startswith(bos)
    bos = bos if separate else ""
    system = prefix.removeprefix(bos)
    bos_ids, system_ids = _ids(tokenizer, bos), _ids(tokenizer, system)
    if _ids(tokenizer, alone) != bos_ids + system_ids + _ids(tokenizer, turn):
        return unknown
    if system and not (takes_system and told is not None and _is_system_turn(prefix, told.removesuffix(turn))):
        return replace(unknown, bos_ids=bos_ids)
    return Opening(bos_ids=bos_ids, system_ids=system_ids, takes_system=takes_system)


def encode_bare(conversation: Conversation, tokenizer: PreTrainedTokenizerBase) -> Encoded:
    """Encode the contents as lines of bare text, with the tokenizer's special tokens; answers are trained on."""
    from eyas.data.chat_encoder import Encoded

    text, spans = "", []
    for message in conversation.messages:
        text += "\n" if text else ""
        if message["role"] == "assistant":
            spans.append((len(text), len(text) + len(message["content"])))
        text += message["content"]
    encoding: Any = tokenizer(text, return_offsets_mapping=True)
    mask = [False] * len(encoding["input_ids"])
    for i, (start, end) in enumerate(encoding["offset_mapping"]):
        mask[i] = start < end and any(first <= start and end <= last for first, last in spans)
    return Encoded(ids=tuple(encoding["input_ids"]), mask=tuple(mask))


def _is_system_turn(prefix: str, told_prefix: str) -> bool:
    """Whether the text that the template adds by itself looks like an explicit system turn."""
    head, found, tail = told_prefix.partition(_PROBE)
    return bool(found) and len(prefix) >= len(head) + len(tail) and prefix.startswith(head) and prefix.endswith(tail)


def _without_leading_system(messages: Sequence[Message]) -> tuple[Message, ...]:
    first = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
    return tuple(messages[first:])


def _without_ids(rows: Sequence[Encoded], start: int, opening: tuple[int, ...]) -> tuple[Encoded, ...] | None:
    """Rows without their opening from index `start` on; None unless all of them begin with it."""
    end = len(opening)
    if any(row.ids[:end] != opening or any(row.mask[:end]) for row in rows):
        return None
    return tuple(
        replace(row, ids=row.ids[:start] + row.ids[end:], mask=row.mask[:start] + row.mask[end:]) for row in rows
    )


def _said(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _rendered(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> str | None:
    """Rendered text of some messages; None if the template refuses them."""
    from eyas.target.chat_template import TEMPLATE_ERRORS

    try:
        return str(tokenizer.apply_chat_template([dict(message) for message in messages], tokenize=False))
    except TEMPLATE_ERRORS:
        return None


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    encoding: Any = tokenizer(text, add_special_tokens=False)
    return tuple(encoding["input_ids"])
