"""What an evaluation asks: the questions of conversations, alone or behind a long text that is none of their business.

Old answers are never shown to the target. Where a second turn is asked, what stands before it is the target's own
answer to the first, so every drafter is measured on the same prompts. A record's own tools and template arguments go
with all its turns.
Invariant: a prompt leaves room for its whole answer; what does not is left out and counted.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eyas.data.conversations import Conversation, Message
from eyas.errors import UserError
from eyas.target.model import Target

# The golden ratio spreads any number of points evenly.
_SPREAD = 0.6180339887498949

Encode = Callable[[Conversation], list[int]]


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A prompt as the target reads it."""

    key: int
    """Of this turn of this conversation, the same whatever stands before it."""
    ids: tuple[int, ...]
    category: str
    turn: int
    conversation: Conversation
    """What the ids render: the record, with the messages up to this turn."""

    @property
    def where(self) -> str:
        """File and line."""
        return self.conversation.where


class PrefixText:
    """A text to put before questions, from another place of it for every question."""

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
        """Refuse more tokens than there are."""
        if tokens > len(self._ids):
            raise UserError(
                f"--prefix-tokens {tokens} is above the {len(self._ids)} tokens of {self._path}; "
                "choose less or a longer text"
            )

    def take(self, tokens: int, number: int) -> str:
        """About this many tokens of the text, for the question of this number."""
        start = int((number * _SPREAD) % 1 * (len(self._ids) - tokens + 1))
        # A cut may go through a character.
        return str(self._tokenizer.decode(self._ids[start : start + tokens])).strip("\ufffd")


class Questions:
    """Asks the user turns of conversations, one turn after another."""

    def __init__(
        self,
        conversations: Sequence[Conversation],
        encode: Encode,
        *,
        turns: int,
        longest: int,
        prefix: PrefixText | None = None,
    ) -> None:
        self._records = list(conversations)
        self._conversations = [_user_turns(conversation, turns) for conversation in conversations]
        self._encode, self._turns, self._longest, self._prefix = encode, turns, longest, prefix

    def first(self, prefix_tokens: int = 0) -> tuple[list[Prompt], int]:
        """The first turns, and how many were left out because they are too long."""
        prompts: list[Prompt | None] = []
        for number, asked in enumerate(self._conversations):
            *before, question = asked.messages[: asked.opening]
            if prefix_tokens:
                assert self._prefix is not None
                text = self._prefix.take(prefix_tokens, number)
                question = {**question, "content": f"{text}\n\n{question['content']}"}
            prompts.append(self._prompt(number, 0, (*before, question)))
        kept = [prompt for prompt in prompts if prompt is not None]
        if not kept:
            behind = f" behind {prefix_tokens} tokens of other text" if prefix_tokens else ""
            raise UserError(
                f"all {len(prompts)} prompts have more than {self._longest} tokens{behind}, and no answer fits behind "
                "them; raise --max-length, or lower --max-tokens or --prefix-tokens"
            )
        return kept, len(prompts) - len(kept)

    def following(self, answered: Mapping[int, Message], prompts: Sequence[Prompt]) -> tuple[list[Prompt], int]:
        """The next turn of each prompt that was answered and has one, and how many were left out as too long."""
        kept, skipped = [], 0
        for prompt in prompts:
            number, turn = prompt.key // self._turns, prompt.turn + 1
            asked = self._conversations[number]
            if turn >= self._turns or asked.opening + turn > len(asked.messages) or prompt.key not in answered:
                continue
            question = asked.messages[asked.opening + turn - 1]
            before = prompt.conversation.messages
            next_prompt = self._prompt(number, turn, (*before, answered[prompt.key], question))
            if next_prompt is None:
                skipped += 1
            else:
                kept.append(next_prompt)
        return kept, skipped

    def _prompt(self, number: int, turn: int, messages: tuple[Message, ...]) -> Prompt | None:
        conversation = replace(self._records[number], messages=messages)
        ids = self._encode(conversation)
        if len(ids) > self._longest:
            return None
        asked = self._conversations[number]
        return Prompt(
            key=number * self._turns + turn,
            ids=tuple(ids),
            category=asked.category,
            turn=turn,
            conversation=conversation,
        )


@dataclass(frozen=True, kw_only=True)
class _UserTurns:
    """System prompt and user turns of a conversation."""

    messages: tuple[Message, ...]
    opening: int
    """Messages up to and with the first user turn."""
    category: str


def _user_turns(conversation: Conversation, turns: int) -> _UserTurns:
    roles = [message["role"] for message in conversation.messages]
    if "user" not in roles:
        raise UserError(f"{conversation.where}: there is no user turn to ask; remove the record or give one")
    first = roles.index("user")
    system = [message for message in conversation.messages[:first] if message["role"] == "system"]
    questions = [message for message in conversation.messages[first:] if message["role"] == "user"][:turns]
    return _UserTurns(
        messages=(*system, *questions),
        opening=len(system) + 1,
        category=conversation.category or Path(conversation.where.rpartition(":")[0]).stem,
    )
