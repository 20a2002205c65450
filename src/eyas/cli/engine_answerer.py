"""The engine as `eyas data answer` asks it: messages in, the tokens of answers out, each within its budgets."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from eyas.cli.answer_limits import AnswerLimits, BudgetedAnswer
from eyas.cli.prompt_encoder import PromptEncoder
from eyas.data.regenerate import ChatPrompt, Reply
from eyas.drafter.model import Drafter
from eyas.drafter.shipped import NO_DRAFTER, choose_drafter
from eyas.engine.config import EngineConfig
from eyas.engine.engine import Engine
from eyas.engine.output import OutputDelta, RequestOutput
from eyas.engine.request import FinishReason, Request
from eyas.loading import load_pair
from eyas.plan.kv_cache_dtype import read_kv_cache_dtype
from eyas.sampling import Sampling
from eyas.serve.builders.answer_reader import AnswerReader
from eyas.target.chat_template import ChatFormat
from eyas.target.device import choose_device
from eyas.target.fingerprint import fingerprint
from eyas.target.model import Target

# Tokens of one pass for each answer at the same time: what decoding leaves of it, prompts fill.
TOKENS_PER_SEQ = 8
LEAST_TOKENS = 512


@dataclass(frozen=True, kw_only=True)
class OwnEngine:
    """A target on this machine, and what drafts for it."""

    target: Target
    drafter: Drafter | None
    kv_cache_dtype: str

    @classmethod
    def load(
        cls,
        target: str,
        drafter: str | None,
        *,
        dtype: str,
        device: str,
        quantization: str,
        kv_cache_dtype: str,
        cache: Path | None,
        chat_format: ChatFormat,
    ) -> "OwnEngine":
        """Load both; a drafter that is not named is the one that comes with eyas for this target, on a GPU.

        On a CPU, drafts for as many answers at once gain nothing.
        """
        kept = read_kv_cache_dtype(kv_cache_dtype, "--kv-cache-dtype")
        if drafter is None and choose_device(device).type == "cpu":
            drafter = NO_DRAFTER
        loaded, model = load_pair(
            target,
            choose_drafter(drafter, target),
            dtype=dtype,
            device=device,
            quantization=quantization,
            cache=cache,
            chat_format=chat_format,
        )
        return cls(target=loaded, drafter=model, kv_cache_dtype=kept)

    @property
    def on_cpu(self) -> bool:
        """Whether it runs on the processor."""
        return self.target.device.type == "cpu"

    @property
    def arguments(self) -> dict[str, object]:
        """What of it decides the answers, beside the target."""
        kept = {} if self.kv_cache_dtype == "auto" else {"kv_cache_dtype": self.kv_cache_dtype}
        dtype = str(self.target.dtype).removeprefix("torch.")
        return {"dtype": dtype, "quantization": self.target.quantization, **kept}

    @property
    def author(self) -> dict[str, str]:
        """Who answers, for every record."""
        return {"target": self.target.facts.source, "target_fingerprint": fingerprint(self.target.model)}

    def answerer(
        self,
        reader: AnswerReader,
        *,
        sampling: Sampling,
        limits: AnswerLimits,
        stop_strings: tuple[str, ...],
        max_num_seqs: int,
        seed: int,
    ) -> "EngineAnswerer":
        """An engine that answers so many prompts at the same time."""
        return EngineAnswerer(
            self.target,
            self.drafter,
            reader,
            sampling=sampling,
            limits=limits,
            stop_strings=stop_strings,
            max_num_seqs=max_num_seqs,
            kv_cache_dtype=self.kv_cache_dtype,
            seed=seed,
        )


class EngineAnswerer:
    """An `Answerer`; see there."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        reader: AnswerReader,
        *,
        sampling: Sampling,
        limits: AnswerLimits,
        stop_strings: tuple[str, ...] = (),
        max_num_seqs: int,
        kv_cache_dtype: str = "auto",
        seed: int,
    ) -> None:
        self._target, self._drafter, self._reader = target, drafter, reader
        self._sampling, self._limits = sampling, limits
        self._stop_ids, self._stop_strings, self._seed = target.stop_ids(), stop_strings, seed
        self._config = EngineConfig(
            max_num_seqs=max_num_seqs,
            max_model_len=limits.max_length,
            max_num_batched_tokens=max(LEAST_TOKENS, TOKENS_PER_SEQ * max_num_seqs),
            kv_cache_dtype=kv_cache_dtype,
        )
        self._encode = PromptEncoder(target, limits.max_length)
        self._answers: dict[int, BudgetedAnswer] = {}
        self._unfit: list[int] = []

    def __call__(self, pull: Callable[[], ChatPrompt | None]) -> Iterator[Reply]:
        """See `Answerer`."""
        engine = Engine(self._target, self._drafter, config=self._config)
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
            if prompt is None:
                self._unfit.append(question.id)
                continue
            read = self._reader.read(prompt, question.conversation.tools)
            self._answers[question.id] = BudgetedAnswer(prompt, read, limits)
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

    def _enough(self, number: int, piece: OutputDelta) -> bool:
        ended = piece.finished is not None
        return self._answers[number].feed(piece.tokens, piece.texts, ended=ended)

    def _reply(self, number: int, output: RequestOutput) -> Reply:
        return self._answers.pop(number).reply(number, finished=output.finished is FinishReason.STOP)

    def _unfit_replies(self) -> Iterator[Reply]:
        while self._unfit:
            yield Reply(id=self._unfit.pop(), sample=None)
