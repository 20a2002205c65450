"""Prompts of an evaluation: the user turns of conversations, optionally after a long unrelated text.

Answers in the records are never shown to the target. A second turn follows the target's own answer to the first, so all
drafters are measured on the same prompts. Tools and template arguments of a record apply to all its turns. A prompt
that leaves no room for its whole answer is skipped and counted.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eyas.data.conversations import Conversation, Message
from eyas.errors import UserError
from eyas.target.model import Target

GOLDEN_RATIO = 0.6180339887498949
"""Multiples of it, modulo 1, are spread evenly."""

Encode = Callable[[Conversation], list[int]]


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A prompt as token ids."""

    key: int
    """Identifies conversation and turn; independent of the prefix."""
    ids: tuple[int, ...]
    category: str
    turn: int
    conversation: Conversation
    """The record, with its messages up to this turn."""

    @property
    def where(self) -> str:
        return self.conversation.where


@dataclass(frozen=True, kw_only=True)
class Answer:
    """An answer to a prompt."""

    key: int
    tokens: tuple[int, ...]
    """New tokens, the stop token included."""
    stopped: bool
    """Ended by a stop token or a stop string, rather than by a length limit."""
    accepted: tuple[int, ...] = ()
    """Accepted drafts of each round; empty without speculation."""


class PrefixText:
    """A text that is put before questions; each question gets another part of it."""

    def __init__(self, path: Path, target: Target) -> None:
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}; check the path") from error
        except UnicodeDecodeError as error:
            raise UserError(f"{path} is not UTF-8 text ({error.reason}); give a text file") from error
        self._path, self._tokenizer = path, target.tokenizer
        encoding: Any = target.tokenizer(text, add_special_tokens=False, verbose=False)
        self._ids: list[int] = encoding["input_ids"]

    def check(self, tokens: int) -> None:
        """Refuse more tokens than the text has."""
        if tokens > len(self._ids):
            raise UserError(
                f"--prefix-tokens {tokens} is above the {len(self._ids)} tokens of {self._path}; "
                "choose less or a longer text"
            )

    def take(self, tokens: int, number: int) -> str:
        """About `tokens` tokens of the text, for question `number`."""
        start = int((number * GOLDEN_RATIO) % 1 * (len(self._ids) - tokens + 1))
        return str(self._tokenizer.decode(self._ids[start : start + tokens])).strip("\ufffd")


class Questions:
    """Makes prompts of the user turns of conversations, turn by turn."""

    def __init__(
        self,
        conversations: Sequence[Conversation],
        encode: Encode,
        *,
        turns: int,
        longest: int,
        prefix: PrefixText | None = None,
    ) -> None:
        self._dialogues = [_dialogue_of(conversation, turns) for conversation in conversations]
        self._encode, self._turns, self._longest, self._prefix = encode, turns, longest, prefix

    def first(self, prefix_tokens: int = 0) -> tuple[list[Prompt], int]:
        """Prompts of all first turns, and the number of those skipped because they are too long."""
        prompts: list[Prompt | None] = []
        for number, dialogue in enumerate(self._dialogues):
            question = dialogue.questions[0]
            if prefix_tokens:
                assert self._prefix is not None
                text = self._prefix.take(prefix_tokens, number)
                question = {**question, "content": f"{text}\n\n{question['content']}"}
            prompts.append(self._prompt(number, 0, (*dialogue.system, question)))
        kept = [prompt for prompt in prompts if prompt is not None]
        if not kept:
            behind = f" behind {prefix_tokens} tokens of other text" if prefix_tokens else ""
            raise UserError(
                f"all {len(prompts)} prompts have more than {self._longest} tokens{behind}, and no answer fits behind "
                "them; raise --max-length, or lower --max-tokens or --prefix-tokens"
            )
        return kept, len(prompts) - len(kept)

    def following(self, answered: Mapping[int, Message], prompts: Sequence[Prompt]) -> tuple[list[Prompt], int]:
        """Prompts of the next turn of all answered prompts that have one, and the number of those skipped."""
        following: list[Prompt | None] = []
        for prompt in prompts:
            number, turn = prompt.key // self._turns, prompt.turn + 1
            questions = self._dialogues[number].questions
            if turn < len(questions) and prompt.key in answered:
                messages = (*prompt.conversation.messages, answered[prompt.key], questions[turn])
                following.append(self._prompt(number, turn, messages))
        kept = [prompt for prompt in following if prompt is not None]
        return kept, len(following) - len(kept)

    def _prompt(self, number: int, turn: int, messages: tuple[Message, ...]) -> Prompt | None:
        dialogue = self._dialogues[number]
        conversation = replace(dialogue.record, messages=messages)
        ids = tuple(self._encode(conversation))
        key = number * self._turns + turn
        if len(ids) > self._longest:
            return None
        return Prompt(key=key, ids=ids, category=dialogue.category, turn=turn, conversation=conversation)


@dataclass(frozen=True, kw_only=True)
class _Dialogue:
    """A record with its system prompt and user turns."""

    record: Conversation
    system: tuple[Message, ...]
    questions: tuple[Message, ...]
    category: str


def _dialogue_of(record: Conversation, turns: int) -> _Dialogue:
    roles = [message["role"] for message in record.messages]
    if "user" not in roles:
        raise UserError(f"{record.where}: there is no user turn to ask; remove the record or give one")
    first = roles.index("user")
    questions = [message for message in record.messages[first:] if message["role"] == "user"]
    return _Dialogue(
        record=record,
        system=tuple(message for message in record.messages[:first] if message["role"] == "system"),
        questions=tuple(questions[:turns]),
        category=record.category or Path(record.where.rpartition(":")[0]).stem,
    )
