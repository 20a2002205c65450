"""Answers of the target with its hidden states: the inputs of a drafter in serving.

The target runs once per prompt, on the engine that serves; every drafter, depth, repair and noise is then examined on
the same transcript. Decoding continues a few tokens past the answer's end, because serving also completes its last
round and accepts from the target's tokens there.
Invariant: `ids` are those of plain decoding (greedy, or drawn by the prompt's own seed, whatever else is in the batch),
and `aux_TX` holds a state for every token but the last.

Shapes: T tokens, X concatenated auxiliary states.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from eyas.engine.config import EngineConfig
from eyas.engine.engine import Engine
from eyas.engine.request import Request
from eyas.errors import UserError
from eyas.sampling import Sampling
from eyas.target.capture import select_states
from eyas.target.model import Target

CACHED_TOKENS = 65_536
"""Tokens that all requests hold together: a few GiB for small targets."""
MOST_AT_ONCE = 64
SHORTEST = 1024
"""Least length of prompt and answer that the engine is made for."""
READ_TOKENS = 512
"""Prompt tokens of one pass: chunks halve the number of scores to compute."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A prompt to be answered."""

    key: int
    """Chosen by the caller; a perturbed prompt keeps its key."""
    ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Transcript:
    """A prompt, its answer, some tokens past its end, and the target's states."""

    key: int
    ids: tuple[int, ...]
    prompt_length: int
    answer_length: int
    """Tokens of the answer, including a stop token, without those past its end."""
    aux_TX: Tensor
    layer_ids: tuple[int, ...]

    @property
    def answer(self) -> tuple[int, ...]:
        return self.ids[self.prompt_length : self.prompt_length + self.answer_length]

    def cut(self, answer_length: int, overshoot: int) -> "Transcript":
        """Shorten the transcript as if fewer tokens had been asked for."""
        length = min(self.answer_length, answer_length)
        end = self.prompt_length + length + overshoot
        assert end <= len(self.ids), "a transcript can be made shorter only"
        return replace(self, answer_length=length, ids=self.ids[:end], aux_TX=self.aux_TX[: end - 1])

    def aux_of(self, layer_ids: Sequence[int]) -> Tensor:
        """Select the states of these layers, concatenated in their order [T, X]."""
        return select_states(self.aux_TX, self.layer_ids, layer_ids)


@dataclass(frozen=True, kw_only=True)
class Answering:
    """Decoding options for prompts."""

    max_new_tokens: int
    overshoot: int
    """Tokens to decode past the answer's end: as many as the deepest round drafts."""
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0

    @property
    def most_tokens(self) -> int:
        """The most tokens that are decoded for a prompt."""
        return self.max_new_tokens + self.overshoot


class Transcriber:
    """Answers prompts and keeps the states of the layers that the drafters read.

    Common prefixes are computed once, as long as the engine's prefix cache holds them.
    """

    def __init__(self, target: Target, layer_ids: Collection[int], stop_strings: Sequence[str] = ()) -> None:
        self.target = target
        self.layer_ids = tuple(sorted(set(layer_ids)))
        self._stop_ids, self._stop_strings = target.stop_ids(), tuple(stop_strings)
        self._engine: Engine | None = None
        self.read = 0
        """Prompt tokens that were not in the prefix cache."""
        self.tick: Callable[[int], None] = lambda tokens: None
        """Callback with the number of tokens of each step of a request."""

    def answer(self, prompts: Sequence[Asked], how: Answering) -> Iterator[Transcript]:
        """Answer prompts in a batch; transcripts are yielded as they finish."""
        for prompt in prompts:
            if not prompt.ids:
                raise UserError(f"prompt {prompt.key} has 0 tokens; give at least 1")
        if not prompts:
            return
        self.make_room(max(len(prompt.ids) for prompt in prompts) + how.most_tokens)
        assert self._engine is not None
        waiting = [self._ask(prompt, how) for prompt in prompts]
        served = self._engine.serve(
            lambda: waiting.pop(0) if waiting else None, on_piece=lambda piece: self.tick(len(piece.tokens))
        )
        for (prompt, made), output in served:
            tokens = (*made, *output.tokens)
            # A first request decodes past the longest answer, unless the answer ends early.
            length = min(len(made or tokens), how.max_new_tokens)
            missing = length + how.overshoot - len(tokens)
            if not made:
                self.read += len(prompt.ids) - output.num_cached_tokens
            if missing:
                waiting.append(self._ask(prompt, how, made=tokens, count=missing))
            else:
                assert output.hidden_states is not None, "the engine keeps them"
                yield Transcript(
                    key=prompt.key,
                    ids=(*prompt.ids, *tokens),
                    prompt_length=len(prompt.ids),
                    answer_length=length,
                    aux_TX=output.hidden_states,
                    layer_ids=self.layer_ids,
                )

    def make_room(self, length: int) -> None:
        """Make an engine for this length of prompt and answer; a new one starts with an empty prefix cache."""
        if self._engine is None or self._engine.max_model_len < length:
            self._engine = None  # frees its memory first
            longest = self.target.facts.max_position_embeddings
            length = max(length, min(SHORTEST, longest or SHORTEST))
            together = max(1, min(MOST_AT_ONCE, CACHED_TOKENS // length))
            options = EngineConfig(
                max_num_seqs=together,
                max_model_len=length,
                max_num_batched_tokens=together + READ_TOKENS,
                hidden_state_layers=self.layer_ids,
            )
            self._engine = Engine(self.target, config=options)

    def forget(self) -> None:
        """Drop the engine, since the target's layers were replaced."""
        self._engine = None

    def _ask(
        self, prompt: Asked, how: Answering, *, made: tuple[int, ...] = (), count: int | None = None
    ) -> "tuple[_Open, Request]":
        """Request the tokens after those `made`; noise depends on seed and position, so they stay the same."""
        request = Request(
            prompt=(*prompt.ids, *made),
            sampling=how.sampling,
            max_new_tokens=how.most_tokens if count is None else count,
            stop_ids=frozenset() if made else self._stop_ids,
            stop_strings=() if made else self._stop_strings,
            seed=how.seed * 1_000_003 + prompt.key,
        )
        return (prompt, made), request


_Open = tuple[Asked, tuple[int, ...]]
"""A prompt, and the tokens decoded for it so far."""
