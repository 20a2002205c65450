"""Where an answer ends that the target does not end, whoever runs the target."""

from collections.abc import Sequence
from dataclasses import dataclass

from eyas.data.conversations import Sample
from eyas.data.regenerate import Reply
from eyas.serve.builders.answer_reader import ReadAnswer


@dataclass(frozen=True, kw_only=True)
class AnswerLimits:
    """Where answers end that the target does not end. What it said until then stays as it is: nothing is forced."""

    max_tokens: int
    """Of an answer, without its thinking."""
    max_thinking_tokens: int
    max_length: int
    """Of prompt, thinking and answer together."""

    def room(self, prompt_tokens: int, *, thinks: bool) -> int:
        """Tokens that the target may generate behind a prompt; the budgets may end it earlier."""
        most = self.max_tokens + (self.max_thinking_tokens if thinks else 0)
        return min(most, self.max_length - prompt_tokens)


class BudgetedAnswer:
    """An answer under way, up to where one of its budgets is spent."""

    def __init__(self, prompt: tuple[int, ...], read: ReadAnswer, limits: AnswerLimits) -> None:
        self.prompt, self._read, self._limits = prompt, read, limits
        self._tokens: list[int] = []

    def feed(self, tokens: Sequence[int], texts: Sequence[str], *, ended: bool) -> bool:
        """Take what came, or its beginning, each token with its text; whether that was enough.

        `ended` if nothing comes behind them.
        """
        for place, (token, text) in enumerate(zip(tokens, texts, strict=True), start=1):
            self._tokens.append(token)
            self._read.feed(text)
            if self._spent and not (ended and place == len(tokens)):
                return True
        return False

    def reply(self, id_: int, *, finished: bool) -> Reply:
        """All of it."""
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
