"""Answers of a target, whoever runs it: how they are sampled, where they end, and what becomes of them."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from eyas.data.conversations import Sample
from eyas.data.encode_prompt import encode_prompt
from eyas.data.regenerate import ChatPrompt, Reply
from eyas.errors import UserError
from eyas.sampling import Sampling
from eyas.serve.builders.answer_reader import AnswerReader, ReadAnswer
from eyas.target.text import TargetText

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class AnswerLimits:
    """Where answers end that the target does not end. Their text until then stays as it is: nothing is forced."""

    max_tokens: int
    """Tokens of an answer, without its thinking."""
    max_thinking_tokens: int
    max_length: int
    """Tokens of prompt, thinking and answer together."""

    def room(self, prompt_tokens: int, *, thinks: bool) -> int:
        """Tokens that the target may generate behind a prompt; the budgets may end it earlier."""
        most = self.max_tokens + (self.max_thinking_tokens if thinks else 0)
        return min(most, self.max_length - prompt_tokens)


@dataclass(frozen=True, kw_only=True)
class AnswerSettings:
    """How a run answers every prompt."""

    reader: AnswerReader
    sampling: Sampling
    limits: AnswerLimits
    stop_strings: tuple[str, ...] = ()
    max_num_seqs: int
    """Answers at the same time."""
    seed: int
    """Seed of the first prompt; others count from it."""

    def begin(self, question: ChatPrompt, prompt: tuple[int, ...]) -> "BudgetedAnswer":
        """Begin to read the answer to a prompt."""
        return BudgetedAnswer(prompt, self.reader.read(prompt, question.conversation.tools), self.limits)


class BudgetedAnswer:
    """An answer under way, up to where one of its budgets is spent."""

    def __init__(self, prompt: tuple[int, ...], read: ReadAnswer, limits: AnswerLimits) -> None:
        self.prompt, self._read, self._limits = prompt, read, limits
        self._tokens: list[int] = []

    def feed(self, tokens: Sequence[int], texts: Sequence[str], *, ended: bool) -> bool:
        """Take the next tokens with their texts, up to the budget; return whether it is spent.

        `ended` says that no tokens follow these.
        """
        for place, (token, text) in enumerate(zip(tokens, texts, strict=True), start=1):
            self._tokens.append(token)
            self._read.feed(text)
            if self._spent and not (ended and place == len(tokens)):
                return True
        return False

    def reply(self, id_: int, *, finished: bool) -> Reply:
        """Return the whole answer."""
        return Reply(
            id=id_,
            sample=Sample(prompt_ids=self.prompt, answer_ids=tuple(self._tokens)),
            message=self._read.message(),
            finished=finished,
            thinking_tokens=self._read.thinking_tokens,
        )

    @property
    def _spent(self) -> bool:
        if self._read.in_reasoning:
            return self._read.thinking_tokens >= self._limits.max_thinking_tokens
        return len(self._tokens) - self._read.thinking_tokens >= self._limits.max_tokens


class PromptEncoder:
    """Encodes prompts; logs the first one that the template refuses."""

    def __init__(self, target: TargetText, max_length: int) -> None:
        target.encode_chat([{"role": "user", "content": "?"}])  # a target without a chat template is refused at once
        self._target, self._max_length, self._told = target, max_length, False

    def __call__(self, question: ChatPrompt) -> tuple[int, ...] | None:
        """Return the ids; None where the template refuses the prompt or no answer fits behind it."""
        try:
            prompt = tuple(encode_prompt(self._target, question.conversation))
        except UserError as error:
            if not self._told:
                logger.info(f"note: this conversation cannot be asked, and perhaps others: {error}")
            self._told = True
            return None
        return prompt if len(prompt) < self._max_length else None
