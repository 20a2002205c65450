"""Greedy decoding for an evaluation, by the engine that serves.

What is counted are complete rounds: each drafts and verifies its whole depth, also where the answer ends inside it, so
that the figures do not depend on where answers are cut. An engine drafts no further than an answer may get. So it is
asked for `depth` tokens more than the answer may have, which leaves room for a whole round behind every token of it,
and `cut` takes off again what lies behind the end: tokens, and rounds that no answer of the right length would start.

Invariant: every round drafts to its depth. There is room in a pass for the drafts of all requests beside prompts that
are read, and in memory for as many requests as run together, so that none is preempted.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import TYPE_CHECKING

from eyas.data.conversations import Message
from eyas.drafter.model import Drafter
from eyas.engine.config import EngineConfig
from eyas.engine.engine import Engine
from eyas.engine.output import RequestOutput
from eyas.engine.request import FinishReason, Request, Speculation
from eyas.plan.memory import blocks_of
from eyas.sampling import Sampling
from eyas.target.model import Target

if TYPE_CHECKING:
    from eyas.evaluate.evaluate import GivenAnswer
    from eyas.evaluate.prompts import Prompt

ReadMessage = Callable[["Prompt", str], Message]
"""From a prompt and the text of its answer, special tokens included, to the assistant's message."""
SEQS_ON_CPU, SEQS_ELSEWHERE = 16, 256
CACHED_ON_CPU, CACHED_ELSEWHERE = 32_768, 524_288
"""Tokens that all answers together hold: a few GiB for the default target."""
CHUNK_ON_CPU, CHUNK_ELSEWHERE = 512, 4096
"""Tokens of prompts that a pass has room for beside decoding."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a prompt got."""

    key: int
    """Of the prompt."""
    tokens: tuple[int, ...]
    """New tokens, the stop token included."""
    stopped: bool
    """Whether a stop token or a stop string ended it, rather than a length."""
    accepted: tuple[int, ...] = ()
    """Accepted drafts of each round; empty without speculation."""


def cut(key: int, output: RequestOutput, *, max_new_tokens: int) -> Answer:
    """The answer of at most `max_new_tokens`, of a request that was allowed a round more.

    Tokens are cut to fit, the accepted drafts of the last round are not. A round counts if it starts before the answer
    has ended, so all that start at the cut or behind it are dropped.
    """
    tokens = output.tokens[:max_new_tokens]
    rounds = zip(output.round_starts, output.accepted, strict=True)
    accepted = tuple(drafts for start, drafts in rounds if start < len(tokens))
    stopped = output.finished is FinishReason.STOP and len(output.tokens) <= max_new_tokens
    return Answer(key=key, tokens=tokens, stopped=stopped, accepted=accepted)


class EngineDecoders:
    """Answers prompts plainly and with drafters; one target, and one engine as long as its context is long enough."""

    def __init__(
        self,
        target: Target,
        drafters: Mapping[str, Drafter],
        *,
        max_new_tokens: int,
        max_depth: int,
        max_num_seqs: int | None = None,
        stop_ids: AbstractSet[int] | None = None,
        stop_strings: Sequence[str] = (),
        read_answer: ReadMessage | None = None,
    ) -> None:
        """`read_answer` makes a message of an answer's text; without it all of the text is its content."""
        self._target, self._drafters = target, drafters
        self._max_new_tokens, self._max_depth, self._max_num_seqs = max_new_tokens, max_depth, max_num_seqs
        self._stop_ids = target.stop_ids() if stop_ids is None else frozenset(stop_ids)
        self._stop_strings, self._read_answer = tuple(stop_strings), read_answer
        self._engine: Engine | None = None
        self._drafter: str | None = None
        """The one that the engine has."""

    def plainly(self, prompts: "Sequence[Prompt]") -> Iterator[Answer]:
        """Greedy answers of the target alone."""
        return self._answer(self._engine_for(prompts), prompts, Speculation(mode="off"))

    def speculatively(self, drafter: str, depth: int, prompts: "Sequence[Prompt]") -> Iterator[Answer]:
        """Greedy answers with chains of `depth` drafts by this drafter."""
        engine = self._engine_for(prompts)
        if drafter != self._drafter:
            engine.swap_drafter(self._drafters[drafter])
            self._drafter = drafter
        return self._answer(engine, prompts, Speculation(mode="fixed", depth=depth))

    def message(self, prompt: "Prompt", answer: "GivenAnswer") -> Message:
        """The answer as clients send it back: without the stop token or the stop string that ended it."""
        tokens = answer.tokens[:-1] if answer.tokens[-1] in self._stop_ids else answer.tokens
        text = self._target.decode(tokens, skip_special_tokens=False).rstrip("\ufffd")
        ends = [at for stop in self._stop_strings if (at := text.find(stop)) >= 0]
        text = text[: min(ends, default=len(text))]
        return {"role": "assistant", "content": text} if self._read_answer is None else self._read_answer(prompt, text)

    def _answer(self, engine: Engine, prompts: "Sequence[Prompt]", speculation: Speculation) -> Iterator[Answer]:
        length = self._max_new_tokens
        waiting = (
            (
                prompt.key,
                Request(
                    prompt=prompt.ids,
                    sampling=Sampling(),
                    max_new_tokens=length + (speculation.depth or 0),
                    stop_ids=self._stop_ids,
                    stop_strings=self._stop_strings,
                    speculation=speculation,
                    # Behind a prefix that its drafter has not read, an answer begins without drafts.
                    cache_salt=None if speculation.depth is None else self._drafter,
                ),
            )
            for prompt in prompts
        )
        together = engine.budget.blocks // blocks_of(engine.max_model_len, engine.config.block_size)
        for key, output in engine.serve(lambda: next(waiting, None), at_once=together):
            yield cut(key, output, max_new_tokens=length)

    def _engine_for(self, prompts: "Sequence[Prompt]") -> Engine:
        """One that is long enough for these prompts: the last one, or a new one for as many as memory allows."""
        length = max(len(prompt.ids) for prompt in prompts) + self._max_new_tokens + self._max_depth
        # At the very end of the target's context the last round of an answer is shorter.
        length = min(length, self._target.facts.max_position_embeddings or length)
        if self._engine is None or self._engine.max_model_len < length:
            self._engine = self._drafter = None  # its memory is free before more is taken
            on_cpu = self._target.device.type == "cpu"
            cached = CACHED_ON_CPU if on_cpu else CACHED_ELSEWHERE
            seqs = self._max_num_seqs or min(SEQS_ON_CPU if on_cpu else SEQS_ELSEWHERE, max(1, cached // length))
            # Decoding comes first, and drafts and prompts get half each of what it leaves of a pass.
            half = max(seqs * self._max_depth, CHUNK_ON_CPU if on_cpu else CHUNK_ELSEWHERE)
            self._drafter = next(iter(self._drafters), None)
            self._engine = Engine(
                self._target,
                None if self._drafter is None else self._drafters[self._drafter],
                config=EngineConfig(
                    max_num_seqs=seqs,
                    max_model_len=length,
                    max_num_batched_tokens=seqs + 2 * half,
                    max_depth=self._max_depth,
                    drift_share=0,
                ),
            )
        return self._engine
