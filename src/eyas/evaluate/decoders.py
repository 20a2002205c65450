"""Greedy decoding for an evaluation, by the engine that serves.

Only complete rounds are counted: each drafts and verifies its full depth, even where the answer ends inside it, so the
figures do not depend on where answers are cut. The engine drafts no further than an answer may get; therefore it may
generate `depth` more tokens than the answer, which `cut` removes together with the rounds that start after the end.

Invariant: every round drafts to its full depth. A pass has room for the drafts of all requests beside prefill, and
memory for all requests that run together, so none is preempted.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet

from eyas.data.conversations import Message
from eyas.drafter.model import Drafter
from eyas.engine.config import EngineConfig
from eyas.engine.engine import Engine
from eyas.engine.output import RequestOutput
from eyas.engine.request import FinishReason, Request, Speculation
from eyas.evaluate.prompts import Answer, Prompt
from eyas.plan.memory import blocks_of
from eyas.sampling import Sampling
from eyas.target.model import Target

ReadMessage = Callable[[Prompt, str], Message]
"""Makes the assistant's message from a prompt and the text of its answer, special tokens included."""
SEQS_ON_CPU, SEQS_ELSEWHERE = 16, 256
CACHED_ON_CPU, CACHED_ELSEWHERE = 32_768, 524_288
"""Tokens in the KV cache: a few GiB for the default target."""
CHUNK_ON_CPU, CHUNK_ELSEWHERE = 512, 4096
"""Prefill tokens per pass."""


def cut(key: int, output: RequestOutput, *, max_new_tokens: int) -> Answer:
    """Shorten the output of a request, which was allowed one more round, to at most `max_new_tokens`.

    A round counts if it starts before the answer ends; the accepted drafts of the last round are not cut.
    """
    tokens = output.tokens[:max_new_tokens]
    rounds = zip(output.round_starts, output.accepted, strict=True)
    accepted = tuple(drafts for start, drafts in rounds if start < len(tokens))
    stopped = output.finished is FinishReason.STOP and len(output.tokens) <= max_new_tokens
    return Answer(key=key, tokens=tokens, stopped=stopped, accepted=accepted)


class EngineDecoders:
    """Answers prompts with and without drafters; reuses one engine as long as its context is long enough."""

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
        """`read_answer` makes a message of an answer's text; without it the text is the content."""
        self._target, self._drafters = target, drafters
        self._max_new_tokens, self._max_depth, self._max_num_seqs = max_new_tokens, max_depth, max_num_seqs
        self._stop_ids = target.stop_ids() if stop_ids is None else frozenset(stop_ids)
        self._stop_strings, self._read_answer = tuple(stop_strings), read_answer
        self._engine: Engine | None = None
        self._drafter: str | None = None

    def plainly(self, prompts: Sequence[Prompt]) -> Iterator[Answer]:
        return self._answer(self._engine_for(prompts), prompts, Speculation(mode="off"))

    def speculatively(self, drafter: str, depth: int, prompts: Sequence[Prompt]) -> Iterator[Answer]:
        """Greedy answers with chains of `depth` draft tokens."""
        engine = self._engine_for(prompts)
        if drafter != self._drafter:
            engine.swap_drafter(self._drafters[drafter])
            self._drafter = drafter
        return self._answer(engine, prompts, Speculation(mode="fixed", depth=depth))

    def message(self, prompt: Prompt, answer: Answer) -> Message:
        """The answer as a chat message, without the stop token or stop string that ended it."""
        tokens = answer.tokens[:-1] if answer.tokens[-1] in self._stop_ids else answer.tokens
        text = self._target.decode(tokens, skip_special_tokens=False).rstrip("\ufffd")
        ends = [at for stop in self._stop_strings if (at := text.find(stop)) >= 0]
        text = text[: min(ends, default=len(text))]
        return {"role": "assistant", "content": text} if self._read_answer is None else self._read_answer(prompt, text)

    def _answer(self, engine: Engine, prompts: Sequence[Prompt], speculation: Speculation) -> Iterator[Answer]:
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
                    # Blocks that another drafter filled would start an answer without drafts.
                    cache_salt=None if speculation.depth is None else self._drafter,
                ),
            )
            for prompt in prompts
        )
        together = engine.budget.blocks // blocks_of(engine.max_model_len, engine.config.block_size)
        for key, output in engine.serve(lambda: next(waiting, None), at_once=together):
            yield cut(key, output, max_new_tokens=length)

    def _engine_for(self, prompts: Sequence[Prompt]) -> Engine:
        """The present engine, or a new one if its context is too short for these prompts."""
        length = max(len(prompt.ids) for prompt in prompts) + self._max_new_tokens + self._max_depth
        # At the end of the target's context the last round of an answer is shorter.
        length = min(length, self._target.facts.max_position_embeddings or length)
        if self._engine is None or self._engine.max_model_len < length:
            self._engine = self._drafter = None  # free its memory first
            on_cpu = self._target.device.type == "cpu"
            cached = CACHED_ON_CPU if on_cpu else CACHED_ELSEWHERE
            seqs = self._max_num_seqs or min(SEQS_ON_CPU if on_cpu else SEQS_ELSEWHERE, max(1, cached // length))
            # Drafts and prefill each get half of what decoding leaves of a pass.
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
