"""From a conversation to token ids and a loss mask.

The mask marks what the target itself generates: its answers with the stop token that ends them, and nothing the
template puts around them. An answer that a length ended has no stop token.

A record may keep the tokens that its author read and said; those are used as they are. From text the same is made for
every answer: the prompt is the template's rendering of the messages before it, as a server would feed it, and the
answer is what the target would have had to generate there. Answers of one conversation share a row as long as each
prompt begins with all of the row before it. Where a template rewrites earlier turns (many drop old thinking), the
target saw another text, and the answer gets a row of its own.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from eyas.data.conversations import Conversation, Message, Sample
from eyas.errors import UserError
from eyas.target.chat_template import TEMPLATE_ERRORS, check_variables, require_template


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """A row: a text as the target reads it."""

    ids: tuple[int, ...]
    mask: tuple[bool, ...]
    """Whether the target would have generated this token."""

    @property
    def trainable(self) -> int:
        """Tokens that count."""
        return sum(self.mask)

    def shortened(self, length: int) -> "Encoded | None":
        """The row up to the last answer that ends within `length` tokens; None if there is none."""
        if len(self.ids) <= length:
            return self
        for end in range(length, 0, -1):
            if self.mask[end - 1] and not self.mask[end]:
                return Encoded(ids=self.ids[:end], mask=self.mask[:end])
        return None


def merge(samples: Iterable[Sample]) -> tuple[Encoded, ...]:
    """Samples of one conversation as rows: one whose prompt begins with the whole row before it extends that row."""
    rows: list[tuple[list[int], list[bool]]] = []
    for sample in samples:
        ids, mask = rows[-1] if rows else ([], [])
        if not rows or list(sample.prompt_ids[: len(ids)]) != ids:
            ids, mask = [], []
            rows.append((ids, mask))
        told = sample.prompt_ids[len(ids) :]
        ids += [*told, *sample.answer_ids]
        mask += [False] * len(told) + [True] * len(sample.answer_ids)
    return tuple(Encoded(ids=tuple(ids), mask=tuple(mask)) for ids, mask in rows)


class ChatEncoder:
    """Encodes conversations with a tokenizer's own chat template."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop_ids: Collection[int],
        *,
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        """`variables` are the template's arguments, such as enable_thinking; a record's own go over them."""
        self._tokenizer = tokenizer
        self._variables = dict(variables or {})
        self._stop_texts = sorted({text for i in stop_ids if (text := str(tokenizer.decode([i])))})

    def encode(self, conversation: Conversation) -> tuple[Encoded, ...]:
        """The rows of one conversation; none if nobody answers in it."""
        return merge(self.samples(conversation))

    def samples(self, conversation: Conversation) -> tuple[Sample, ...]:
        """Its answers as tokens, each with its prompt."""
        if conversation.samples:
            return conversation.samples
        answers = [i for i, message in enumerate(conversation.messages) if message["role"] == "assistant"]
        if answers:
            require_template(self._tokenizer, self._tokenizer.name_or_path)
            check_variables(self._tokenizer, conversation.chat_template_kwargs, conversation.where)
        return tuple(self._sample(conversation, i, finished=conversation.finished or i != answers[-1]) for i in answers)

    def _sample(self, conversation: Conversation, index: int, *, finished: bool) -> Sample:
        prompt = self._render(conversation, index, opening=True)
        behind = self._render(conversation, index + 1)
        if not behind.startswith(prompt):
            raise UserError(
                f"{conversation.where}: the chat template renders turn {index + 1} otherwise than it opens one, so the "
                "turn cannot be told from its surroundings"
            )
        answer, stop = self._parted(behind[len(prompt) :])
        return Sample(
            prompt_ids=self._ids(prompt), answer_ids=self._ids(answer) + (self._ids(stop) if finished else ())
        )

    def _parted(self, text: str) -> tuple[str, str]:
        """What is said and the stop token behind it; what a template writes behind that, nobody generates."""
        places = [(place, stop) for stop in self._stop_texts if (place := text.rfind(stop)) >= 0]
        if not places:
            return text, ""
        place, stop = max(places)
        return text[:place], stop

    def _render(self, conversation: Conversation, end: int, *, opening: bool = False) -> str:
        """The template's text of the first `end` messages."""
        messages: Sequence[Message] = conversation.messages[:end]
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    [dict(message) for message in messages],
                    tools=[dict(tool) for tool in conversation.tools] or None,
                    tokenize=False,
                    add_generation_prompt=opening,
                    **{**self._variables, **conversation.chat_template_kwargs},
                )
            )
        except TEMPLATE_ERRORS as error:
            raise UserError(
                f"{conversation.where}: the chat template refuses this conversation ({str(error)[:200]}); change it or "
                "the template's arguments"
            ) from error

    def _ids(self, text: str) -> tuple[int, ...]:
        # The template has written the special tokens.
        encoding: Any = self._tokenizer(text, add_special_tokens=False)
        return tuple(encoding["input_ids"])
