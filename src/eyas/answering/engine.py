"""An engine on this machine that answers prompts."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.answering.answers import AnswerSettings, BudgetedAnswer, PromptEncoder
from eyas.data.regenerate import ChatPrompt, Reply
from eyas.drafter.model import Drafter
from eyas.drafter.shipped import NO_DRAFTER, choose_drafter
from eyas.engine.config import EngineConfig
from eyas.engine.engine import Engine
from eyas.engine.output import OutputDelta
from eyas.engine.request import FinishReason, Request
from eyas.loading import load_pair
from eyas.plan.kv_cache_dtype import read_kv_cache_dtype
from eyas.target.chat_template import ChatFormat
from eyas.target.device import choose_device
from eyas.target.model import Target
from eyas.target.parts import fingerprint

# Tokens of a target pass per answer: prompts fill what decoding leaves.
TOKENS_PER_SEQ = 8
LEAST_TOKENS = 512


@dataclass(frozen=True, kw_only=True)
class OwnEngine:
    """A target on this machine, and its drafter."""

    target: Target
    drafter: Drafter | None
    kv_cache_dtype: str

    @classmethod
    def load(
        cls,
        target: str,
        drafter: str | None,
        *,
        device: str,
        kv_cache_dtype: str,
        cache: Path | None,
        chat_format: ChatFormat,
        **precision: Any,
    ) -> "OwnEngine":
        """Load target and drafter. Unless named, the drafter is the shipped one on a GPU, and none on a CPU.

        On a CPU, drafts for many answers at once gain nothing.
        """
        kept = read_kv_cache_dtype(kv_cache_dtype, "--kv-cache-dtype")
        if drafter is None and choose_device(device).type == "cpu":
            drafter = NO_DRAFTER
        chosen = choose_drafter(drafter, target)
        loaded, model = load_pair(target, chosen, device=device, cache=cache, chat_format=chat_format, **precision)
        return cls(target=loaded, drafter=model, kv_cache_dtype=kept)

    @property
    def on_cpu(self) -> bool:
        """Whether it runs on the processor."""
        return self.target.device.type == "cpu"

    @property
    def arguments(self) -> dict[str, object]:
        """Arguments that decide the answers, beside the target."""
        kept = {} if self.kv_cache_dtype == "auto" else {"kv_cache_dtype": self.kv_cache_dtype}
        dtype = str(self.target.dtype).removeprefix("torch.")
        return {"dtype": dtype, "quantization": self.target.quantization, **kept}

    @property
    def author(self) -> dict[str, str]:
        """The target, as every record names it."""
        return {"target": self.target.facts.source, "target_fingerprint": fingerprint(self.target.model)}

    def answerer(self, settings: AnswerSettings) -> "EngineAnswerer":
        """Return an `Answerer` with these settings."""
        return EngineAnswerer(self, settings)


class EngineAnswerer:
    """An `Answerer` that runs an engine."""

    def __init__(self, own: OwnEngine, settings: AnswerSettings) -> None:
        self._own, self._settings = own, settings
        self._stop_ids = own.target.stop_ids()
        self._config = EngineConfig(
            max_num_seqs=settings.max_num_seqs,
            max_model_len=settings.limits.max_length,
            max_num_batched_tokens=max(LEAST_TOKENS, TOKENS_PER_SEQ * settings.max_num_seqs),
            kv_cache_dtype=own.kv_cache_dtype,
        )
        self._encode = PromptEncoder(own.target, settings.limits.max_length)
        self._answers: dict[int, BudgetedAnswer] = {}
        self._unfit: list[int] = []

    def __call__(self, pull: Callable[[], ChatPrompt | None]) -> Iterator[Reply]:
        """See `Answerer`."""
        engine = Engine(self._own.target, self._own.drafter, config=self._config)
        for number, output in engine.serve(lambda: self._request(pull), enough=self._enough):
            yield from self._unfit_replies()
            yield self._answers.pop(number).reply(number, finished=output.finished is FinishReason.STOP)
        yield from self._unfit_replies()

    def _request(self, pull: Callable[[], ChatPrompt | None]) -> tuple[int, Request] | None:
        """Return the next prompt that fits, as a request."""
        settings = self._settings
        thinking = settings.limits.max_thinking_tokens if settings.reader.thinks else 0
        while (question := pull()) is not None:
            prompt = self._encode(question)
            if prompt is None:
                self._unfit.append(question.id)
                continue
            self._answers[question.id] = settings.begin(question, prompt)
            return question.id, Request(
                prompt=prompt,
                sampling=settings.sampling,
                max_new_tokens=settings.limits.max_tokens + thinking,
                stop_ids=self._stop_ids,
                stop_strings=settings.stop_strings,
                skip_special_tokens=False,  # a later turn needs them as much as the words
                seed=settings.seed + question.id,
            )
        return None

    def _enough(self, number: int, piece: OutputDelta) -> bool:
        return self._answers[number].feed(piece.tokens, piece.texts, ended=piece.finished is not None)

    def _unfit_replies(self) -> Iterator[Reply]:
        while self._unfit:
            yield Reply(id=self._unfit.pop(), sample=None)
