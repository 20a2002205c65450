"""The engine as `eyas data answer` asks it: messages in, the tokens of answers out, each within its budgets."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from eyas.cli.options import report
from eyas.data.conversations import Sample
from eyas.data.encode_prompt import encode_prompt
from eyas.data.regenerate import ChatPrompt, Reply
from eyas.engine.config import EngineConfig
from eyas.engine.engine import Engine
from eyas.engine.output import OutputDelta, RequestOutput
from eyas.engine.request import FinishReason, Request
from eyas.errors import UserError
from eyas.sampling import Sampling
from eyas.serve.builders.answer_reader import AnswerReader, ReadAnswer
from eyas.target.model import Target

# Tokens of one pass for each answer at the same time: what decoding leaves of it, prompts fill.
TOKENS_PER_SEQ = 8
LEAST_TOKENS = 512


@dataclass(frozen=True, kw_only=True)
class AnswerLimits:
    """Where answers end that the target does not end. What it said until then stays as it is: nothing is forced."""

    max_tokens: int
    """Of an answer, without its thinking."""
    max_thinking_tokens: int
    max_length: int
    """Of prompt, thinking and answer together."""


class EngineAnswerer:
    """An `Answerer`; see there."""

    def __init__(
        self,
        target: Target,
        reader: AnswerReader,
        *,
        sampling: Sampling,
        limits: AnswerLimits,
        stop_strings: tuple[str, ...] = (),
        max_num_seqs: int,
        kv_cache_dtype: str = "auto",
        seed: int,
    ) -> None:
        target.encode_chat([{"role": "user", "content": "?"}])  # a target without a chat template is refused at once
        self._target, self._reader, self._sampling, self._limits = target, reader, sampling, limits
        self._stop_ids, self._stop_strings, self._seed = target.stop_ids(), stop_strings, seed
        self._config = EngineConfig(
            max_num_seqs=max_num_seqs,
            max_model_len=limits.max_length,
            max_num_batched_tokens=max(LEAST_TOKENS, TOKENS_PER_SEQ * max_num_seqs),
            kv_cache_dtype=kv_cache_dtype,
        )
        self._answers: dict[int, _Answer] = {}
        self._unfit: list[int] = []
        self._refused = False

    def __call__(self, pull: Callable[[], ChatPrompt | None]) -> Iterator[Reply]:
        """See `Answerer`."""
        engine = Engine(self._target, config=self._config)
        for number, output in engine.serve(lambda: self._request(pull), enough=self._enough):
            yield from self._unfit_replies()
            yield self._reply(number, output)
        yield from self._unfit_replies()

    def _request(self, pull: Callable[[], ChatPrompt | None]) -> tuple[int, Request] | None:
        """The next question that the target can be asked."""
        limits = self._limits
        thinking = limits.max_thinking_tokens if self._reader.thinks else 0
        while (question := pull()) is not None:
            prompt = self._encode(question)
            if prompt is None or len(prompt) >= limits.max_length:
                self._unfit.append(question.id)
                continue
            self._answers[question.id] = _Answer(prompt, self._reader.read(prompt, question.conversation.tools), limits)
            return question.id, Request(
                prompt=prompt,
                sampling=self._sampling,
                max_new_tokens=limits.max_tokens + thinking,
                stop_ids=self._stop_ids,
                stop_strings=self._stop_strings,
                skip_special_tokens=False,  # a later turn needs them as much as the words
                seed=self._seed + question.id,
            )
        return None

    def _encode(self, question: ChatPrompt) -> tuple[int, ...] | None:
        try:
            return tuple(encode_prompt(self._target, question.conversation))
        except UserError as error:
            if not self._refused:
                report(f"note: this conversation cannot be asked, and perhaps others: {error}")
            self._refused = True
            return None

    def _enough(self, number: int, piece: OutputDelta) -> bool:
        return self._answers[number].feed(piece)

    def _reply(self, number: int, output: RequestOutput) -> Reply:
        answer = self._answers.pop(number)
        return Reply(
            id=number,
            sample=Sample(prompt_ids=answer.prompt, answer_ids=tuple(answer.tokens)),
            message=answer.read.message(),
            finished=output.finished is FinishReason.STOP,
            thinking_tokens=answer.read.thinking_tokens,
        )

    def _unfit_replies(self) -> Iterator[Reply]:
        while self._unfit:
            yield Reply(id=self._unfit.pop(), sample=None)


class _Answer:
    """An answer under way, up to where one of its budgets is spent."""

    def __init__(self, prompt: tuple[int, ...], read: ReadAnswer, limits: AnswerLimits) -> None:
        self.prompt, self.read, self._limits = prompt, read, limits
        self.tokens: list[int] = []

    def feed(self, piece: OutputDelta) -> bool:
        """Take what a step gave, or its beginning; whether that was enough."""
        for place, (token, text) in enumerate(zip(piece.tokens, piece.texts, strict=True), start=1):
            self.tokens.append(token)
            self.read.feed(text)
            ended = piece.finished is not None and place == len(piece.tokens)
            if self._spent and not ended:
                return True
        return False

    @property
    def _spent(self) -> bool:
        if self.read.in_reasoning:
            return self.read.thinking_tokens >= self._limits.max_thinking_tokens
        return len(self.tokens) - self.read.thinking_tokens >= self._limits.max_tokens
