"""Other renderings of some conversations, so that the drafter does not lean on one template and one system prompt.

Servers see prompts without the system prompt of the training data, without a BOS, without any template; a drafter that
knew only one opening may draft badly behind another. A share of the conversations is therefore rendered otherwise.
Invariants: what is done to a conversation follows from the seed and its number alone, and a rendering that cannot be
made soundly with the tokenizer at hand is not made: the conversation stays as it was and is counted as such.
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
    """Renders conversations as an `Augmentation` asks."""

    def __init__(
        self, encoder: ChatEncoder, tokenizer: PreTrainedTokenizerBase, augmentation: Augmentation, seed: int
    ) -> None:
        self._encoder = encoder
        self._tokenizer = tokenizer
        self._augmentation = augmentation
        self._seed = seed
        self._opening = find_opening(tokenizer)

    def encoder_for(self, index: int) -> AugmentedEncoder:
        """How conversation `index` is rendered."""
        chance = random.Random(f"{self._seed}:{index}")  # a string seeds alike in every process and on every machine
        kind = self._augmentation.kind(chance)
        return AugmentedEncoder(kind, chance.choice(SYSTEM_PROMPTS), self._encoder, self._tokenizer, self._opening)


class AugmentedEncoder:
    """An encoder for one conversation, whole or shortened."""

    def __init__(
        self,
        kind: str | None,
        system_prompt: str,
        encoder: ChatEncoder,
        tokenizer: PreTrainedTokenizerBase,
        opening: Opening,
    ) -> None:
        self.applied: str | None = None
        """What was done: the kind, the kind and that it was impossible, or None where nothing was asked."""
        self._kind = kind
        self._system_prompt = system_prompt
        self._encoder = encoder
        self._tokenizer = tokenizer
        self._opening = opening

    def encode(self, conversation: Conversation) -> tuple[Encoded, ...]:
        """The rows in the chosen rendering, or in the template's own where that cannot be made."""
        made: tuple[Encoded, ...] | None
        match self._kind:
            case None:
                return self._encoder.encode(conversation)
            case _ if conversation.samples:
                made = None  # these tokens were said behind that prompt, and behind no other
            case "no_system":
                made = self._without_system(conversation)
            case "no_bos":
                made = self._without_bos(conversation)
            case "varied_system":
                made = self._with_another_system(conversation)
            case _:
                made = (encode_bare(conversation, self._tokenizer),)
        self.applied = self._kind if made is not None else f"{self._kind} impossible"
        return self._encoder.encode(conversation) if made is None else made

    def _without_system(self, conversation: Conversation) -> tuple[Encoded, ...] | None:
        spoken = _without_leading_system(conversation.messages)
        if not spoken or self._opening.system_ids is None:
            return None
        rows = self._encoder.encode(replace(conversation, messages=spoken))
        bos = len(self._opening.bos_ids)
        return _without_ids(rows, bos, self._opening.bos_ids + self._opening.system_ids)

    def _without_bos(self, conversation: Conversation) -> tuple[Encoded, ...] | None:
        if not self._opening.bos_ids:
            return None
        return _without_ids(self._encoder.encode(conversation), 0, self._opening.bos_ids)

    def _with_another_system(self, conversation: Conversation) -> tuple[Encoded, ...] | None:
        if not self._opening.takes_system:
            return None
        system: Message = {"role": "system", "content": self._system_prompt}
        messages = (system, *_without_leading_system(conversation.messages))
        return self._encoder.encode(replace(conversation, messages=messages))


@dataclass(frozen=True, kw_only=True)
class Opening:
    """What a template puts before the first turn that was really said."""

    bos_ids: tuple[int, ...]
    """The token that begins every text, if there is one that does nothing else."""
    system_ids: tuple[int, ...] | None
    """The system turn that the template adds of its own, often none; None when it cannot be told from the rest."""
    takes_system: bool
    """Whether the template has a place for a system prompt."""


def find_opening(tokenizer: PreTrainedTokenizerBase) -> Opening:
    """Compare renderings of a few short conversations to learn how a template opens."""
    user = _said("user", "Hello there.")
    alone = _rendered(tokenizer, [user])
    told = _rendered(tokenizer, [_said("system", _PROBE), user])
    takes_system = told is not None and told.count(_PROBE) == 1
    unknown = Opening(bos_ids=(), system_ids=None, takes_system=takes_system)
    bos = tokenizer.bos_token or ""
    # A user's turn without anything before it is what the template adds for the second one.
    past = [user, _said("assistant", "Good day.")]
    before, behind = _rendered(tokenizer, past), _rendered(tokenizer, [*past, user])
    if alone is None or before is None or behind is None:
        return unknown
    if behind.startswith(before):
        turn = behind[len(before) :]
    else:  # it rewrites earlier turns; what stands behind a system prompt is a turn alone as well
        turns = (alone, alone.removeprefix(bos))
        turn = next((one for one in turns if told is not None and takes_system and told.endswith(one)), "")
    if not turn or not alone.endswith(turn):
        return unknown
    prefix = alone.removesuffix(turn)
    # Some tokenizers call the token that opens every turn their BOS; taking that away would break the turn.
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
    """The contents as lines of bare text, special tokens as the tokenizer adds them; answers are masked."""
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
    """Whether what the template adds of its own is built like a system turn that was asked for."""
    head, found, tail = told_prefix.partition(_PROBE)
    return bool(found) and len(prefix) >= len(head) + len(tail) and prefix.startswith(head) and prefix.endswith(tail)


def _without_leading_system(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The messages without the system turns they begin with."""
    first = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
    return tuple(messages[first:])


def _without_ids(rows: Sequence[Encoded], start: int, opening: tuple[int, ...]) -> tuple[Encoded, ...] | None:
    """Rows without their opening from `start` on; None unless all of them begin with it."""
    end = len(opening)
    if any(row.ids[:end] != opening or any(row.mask[:end]) for row in rows):
        return None
    return tuple(
        replace(row, ids=row.ids[:start] + row.ids[end:], mask=row.mask[:start] + row.mask[end:]) for row in rows
    )


def _said(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _rendered(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> str | None:
    """The text of some messages; None when the template refuses them."""
    from eyas.target.chat_template import TEMPLATE_ERRORS

    try:
        return str(tokenizer.apply_chat_template([dict(message) for message in messages], tokenize=False))
    except TEMPLATE_ERRORS:
        return None


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    encoding: Any = tokenizer(text, add_special_tokens=False)
    return tuple(encoding["input_ids"])
