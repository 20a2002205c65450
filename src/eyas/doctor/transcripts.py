"""What the target answered, and its states while it did: everything a drafter would be given in serving.

The target runs once per prompt; every drafter, depth, repair and noise is then examined on the same transcript.
Decoding goes on a few tokens behind the answer's end, because serving completes its last round as well and accepts
from what the target would have said there.
Invariant: `ids` is what plain decoding gives (greedy, or drawn by the prompt's own seed, whatever else is in the
batch), and `aux_TX` holds a state for every token but the last.

Shapes: T tokens, N tokens of a pass, R rows, X concatenated auxiliary states, V vocabulary.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from eyas.engine.slots import SlotTarget, Spans
from eyas.errors import UserError
from eyas.sampling import Sampling, probabilities
from eyas.target.capture import capture
from eyas.target.model import Target

CACHED_TOKENS = 65_536
"""Tokens that all slots of a batch hold together: a few GiB for small targets."""
PREFILL_TOKENS = 8192
"""Prompt tokens of one pass, unless a single prompt has more."""
READ_TOKENS = 512
"""Tokens of a long text read at a time: later ones see more keys, so reading in pieces halves the scores to compute."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A prompt to be answered."""

    key: int
    """The caller's own: the same prompt under a perturbation keeps its key."""
    ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Transcript:
    """A prompt, its answer, some tokens behind it, and the target's states."""

    key: int
    ids: tuple[int, ...]
    prompt_length: int
    answer_length: int
    """Tokens of the answer, a stop token included, without those behind its end."""
    aux_TX: Tensor
    layer_ids: tuple[int, ...]

    @property
    def answer(self) -> tuple[int, ...]:
        """The answer alone."""
        return self.ids[self.prompt_length : self.prompt_length + self.answer_length]

    def cut(self, answer_length: int, overshoot: int) -> "Transcript":
        """The same as if fewer tokens had been asked for."""
        length = min(self.answer_length, answer_length)
        end = self.prompt_length + length + overshoot
        assert end <= len(self.ids), "a transcript can be made shorter only"
        return replace(self, answer_length=length, ids=self.ids[:end], aux_TX=self.aux_TX[: end - 1])

    def aux_of(self, layer_ids: Sequence[int]) -> Tensor:
        """The states of these layers only, concatenated in their order [T, X]."""
        if tuple(layer_ids) == self.layer_ids:
            return self.aux_TX
        states = self.aux_TX.chunk(len(self.layer_ids), dim=-1)
        return torch.cat([states[self.layer_ids.index(k)] for k in layer_ids], dim=-1)


@dataclass(frozen=True, kw_only=True)
class Answering:
    """How prompts are answered."""

    max_new_tokens: int
    overshoot: int
    """Tokens to decode behind an answer's end: as many as the deepest round drafts."""
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0


class Transcriber:
    """Answers prompts and keeps the states of the layers that the drafters at hand read."""

    def __init__(self, target: Target, layer_ids: Collection[int]) -> None:
        self.target = target
        self.layer_ids = tuple(sorted(set(layer_ids)))
        self._stop_ids = target.stop_ids()
        self.tick: Callable[[int], None] = lambda steps: None
        """Told after every step how many tokens each answer of the batch has."""

    def answer(self, prompts: Sequence[Asked], how: Answering) -> Iterator[Transcript]:
        """Answer in batches as large as memory allows; those of a batch come together, in order of their ends."""
        for batch in _batches(prompts, how):
            yield from self._answer_batch(batch, how)

    @torch.inference_mode()
    def _answer_batch(self, prompts: Sequence[Asked], how: Answering) -> Iterator[Transcript]:
        device = self.target.device
        length = max(len(prompt.ids) for prompt in prompts) + how.max_new_tokens + how.overshoot
        model = SlotTarget(self.target, slots=len(prompts), length=length)
        rows = [_Row(slot, prompt, how, self._stop_ids) for slot, prompt in enumerate(prompts)]
        for pack in _packs(rows):
            spans = Spans.of([(row.slot, 0, len(row.prompt.ids)) for row in pack], device)
            ids_N = torch.tensor([token for row in pack for token in row.prompt.ids], device=device)
            with capture(self.target.model, self.layer_ids) as captured:
                logits_RV = model.forward(ids_N, spans, spans.last_R)
            states = torch.split(captured.aux_hidden()[0], [len(row.prompt.ids) for row in pack])
            for row, token, state_TX in zip(pack, _choose(pack, logits_RV), states, strict=True):
                row.grow(state_TX, token)
        yield from (row.transcript(self.layer_ids) for row in rows if row.ended)
        growing, made = rows, 1
        while growing := [row for row in growing if not row.ended]:
            first_R = torch.tensor([len(row.ids) - 1 for row in growing], device=device)
            slot_R = torch.tensor([row.slot for row in growing], device=device)
            spans = Spans.even(slot_R, first_R, 1, longest_k=max(len(row.ids) for row in growing))
            ids_N = torch.tensor([row.ids[-1] for row in growing], device=device)
            with capture(self.target.model, self.layer_ids) as captured:
                logits_RV = model.forward(ids_N, spans)
            states = torch.split(captured.aux_hidden()[0], 1)
            for row, token, state_TX in zip(growing, _choose(growing, logits_RV), states, strict=True):
                row.grow(state_TX, token)
                if row.ended:
                    yield row.transcript(self.layer_ids)
            made += 1
            self.tick(made)


class PrefixTranscriber:
    """Answers one prompt at a time and reads only what the last one did not have: for long texts with a common part."""

    def __init__(self, target: Target, layer_ids: Collection[int], *, length: int) -> None:
        self.target = target
        self.layer_ids = tuple(sorted(set(layer_ids)))
        self._stop_ids = target.stop_ids()
        self._model = SlotTarget(target, slots=1, length=length)
        self._ids: tuple[int, ...] = ()
        self._state_TX: Tensor | None = None
        self.read = 0
        """Prompt tokens that the target really had to read."""

    def unread(self, prompt: Asked) -> int:
        """Tokens of a prompt that the slot does not hold yet."""
        # The last token is always read again: its logits are needed.
        return len(prompt.ids) - min(_common(self._ids, prompt.ids), len(prompt.ids) - 1)

    @torch.inference_mode()
    def answer(self, prompt: Asked, how: Answering) -> Transcript:
        """Answer; what the slot holds of an earlier prompt is used as far as the two agree."""
        shared = len(prompt.ids) - self.unread(prompt)
        states = [self._state_TX[:shared]] if self._state_TX is not None else []
        for first in range(shared, len(prompt.ids), READ_TOKENS):
            chunk = prompt.ids[first : first + READ_TOKENS]
            state_TX, logits_RV = self._forward(chunk, first)
            states.append(state_TX)
            self.read += len(chunk)
        row = _Row(0, prompt, how, self._stop_ids)
        row.grow(torch.cat(states), _choose([row], logits_RV)[0])
        while not row.ended:
            state_TX, logits_RV = self._forward(row.ids[-1:], len(row.ids) - 1)
            row.grow(state_TX, _choose([row], logits_RV)[0])
        transcript = row.transcript(self.layer_ids)
        self._ids, self._state_TX = transcript.ids[:-1], transcript.aux_TX
        return transcript

    def _forward(self, ids: Sequence[int], first: int) -> tuple[Tensor, Tensor]:
        spans = Spans.of([(0, first, len(ids))], self.target.device)
        with capture(self.target.model, self.layer_ids) as captured:
            logits_RV = self._model.forward(torch.tensor(ids, device=self.target.device), spans, spans.last_R)
        return captured.aux_hidden()[0], logits_RV


class _Row:
    """Where one answer stands."""

    def __init__(self, slot: int, prompt: Asked, how: Answering, stop_ids: Collection[int]) -> None:
        self.slot, self.prompt = slot, prompt
        self.ids = list(prompt.ids)
        self.ended = False
        self._how, self._stop_ids = how, stop_ids
        self._states: list[Tensor] = []
        self._answer_length: int | None = None
        self.sampling = how.sampling
        self.generator = torch.Generator().manual_seed(how.seed * 1_000_003 + prompt.key)

    def grow(self, state_TX: Tensor, token: int) -> None:
        """Take the states of the tokens just read, and the next token."""
        self._states.append(state_TX)
        self.ids.append(token)
        made = len(self.ids) - len(self.prompt.ids)
        if self._answer_length is None and (token in self._stop_ids or made >= self._how.max_new_tokens):
            self._answer_length = made
        self.ended = self._answer_length is not None and made >= self._answer_length + self._how.overshoot

    def transcript(self, layer_ids: tuple[int, ...]) -> Transcript:
        """The finished answer."""
        assert self._answer_length is not None, "the answer has not ended"
        return Transcript(
            key=self.prompt.key,
            ids=tuple(self.ids),
            prompt_length=len(self.prompt.ids),
            answer_length=self._answer_length,
            aux_TX=torch.cat(self._states),
            layer_ids=layer_ids,
        )


def _choose(rows: Sequence[_Row], logits_RV: Tensor) -> list[int]:
    """The next token of every row: the likeliest, or one drawn with the row's own chance."""
    sampling = rows[0].sampling
    if sampling.temperature == 0:
        return [int(token) for token in logits_RV.argmax(dim=-1).tolist()]
    p_RV = probabilities(logits_RV, sampling).cpu()
    return [int(torch.multinomial(p_V, 1, generator=row.generator)) for row, p_V in zip(rows, p_RV, strict=True)]


def _batches(prompts: Sequence[Asked], how: Answering) -> Iterator[list[Asked]]:
    batch: list[Asked] = []
    longest = 0
    for prompt in prompts:
        if not prompt.ids:
            raise UserError(f"prompt {prompt.key} has 0 tokens; give at least 1")
        longer = max(longest, len(prompt.ids) + how.max_new_tokens + how.overshoot)
        if batch and longer * (len(batch) + 1) > CACHED_TOKENS:
            yield batch
            batch, longer = [], len(prompt.ids) + how.max_new_tokens + how.overshoot
        batch.append(prompt)
        longest = longer
    if batch:
        yield batch


def _packs(rows: Sequence[_Row]) -> Iterator[list[_Row]]:
    pack: list[_Row] = []
    for row in rows:
        if pack and sum(len(r.prompt.ids) for r in pack) + len(row.prompt.ids) > PREFILL_TOKENS:
            yield pack
            pack = []
        pack.append(row)
    if pack:
        yield pack


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two sequences begin with together."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
