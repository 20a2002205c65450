"""The same prompts under other conditions: how much of the acceptance length is kept.

Every case is held against the unperturbed run of the same prompts at the same answer length; what is kept is
length / length of the reference, with an interval from resampling prompts (both sides together: they are pairs).
Cases come one by one, so that an interruption keeps what there is, and none starts that the time left does not allow.

Shapes: P prompts.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from eyas.data.conversations import Conversation
from eyas.doctor.long_prompts import PLACES, Filler, LongPrompt, allowed_lengths, long_prompts
from eyas.doctor.measures import acceptance_length, round_totals
from eyas.doctor.prompt_formats import prompt_formats
from eyas.doctor.quantise import kind_of, quantised
from eyas.doctor.rounds import Noise, Rounds
from eyas.doctor.statistics import Array, estimate
from eyas.doctor.subject import Subject
from eyas.doctor.texts import CODE, QUESTIONS, TOOL_TRAFFIC
from eyas.doctor.transcripts import Answering, Asked, Transcriber, Transcript
from eyas.drafter.drift import Estimate
from eyas.errors import UserError
from eyas.kernels.linear.quantised_linear import Bits
from eyas.sampling import Sampling

GROUPS = ("noise", "template", "text", "sampling", "weights", "context")
"""Kinds of cases, in the order in which they are told."""
OWN_KEYS = 1_000_000
"""Keys of the doctor's own questions start here."""


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What is tried, and how much of it."""

    prompts: int = 6
    max_new_tokens: int = 32
    depths: tuple[int, ...] = (3, 7)
    temperatures: tuple[float, ...] = (0.5, 1.0)
    noises: tuple[float, ...] = (0.1, 0.5, 1.0)
    bits: tuple[Bits, ...] = (8, 4)
    lengths: tuple[int, ...] = (1000, 2000, 4000, 7000)
    context_prompts: int = 2
    context_tokens: int = 24
    seed: int = 0

    @property
    def deepest(self) -> int:
        """The most that a case drafts."""
        return max(self.depths)

    def answering(self, **changes: object) -> Answering:
        """How cases are answered."""
        options: dict[str, object] = {"max_new_tokens": self.max_new_tokens, "overshoot": self.deepest}
        return Answering(**{**options, "seed": self.seed, **changes})  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One drafter in one case at one depth."""

    length: float
    reference: float
    kept: Estimate
    """Length in parts of the reference."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """What was found, or why nothing was."""

    name: str
    group: str
    about: str
    prompts: int = 0
    cells: Mapping[str, Mapping[int, Cell]] = field(default_factory=dict)
    """By drafter and depth."""
    left_out: str | None = None


Clock = Callable[[], float]
"""Seconds that are left."""


class Robustness:
    """Runs the cases for all subjects at once: the target answers each only once."""

    def __init__(
        self,
        transcriber: Transcriber,
        subjects: Sequence[Subject],
        base: Sequence[Transcript],
        conversations: Mapping[int, Conversation],
        conditions: Conditions,
        *,
        filler: str,
        left: Clock,
    ) -> None:
        self._transcriber, self._subjects, self._conditions = transcriber, subjects, conditions
        self._target, self._conversations = transcriber.target, conversations
        self._filler, self._left = filler, left
        self._base = {one.key: one for one in base if one.key in conversations}
        self._keys = list(self._base)[: conditions.prompts]
        how = conditions.answering()
        cut = [self._base[key].cut(how.max_new_tokens, how.overshoot) for key in self._keys]
        self._cut, self._reference = cut, self._rounds(cut)

    def cases(self) -> Iterator[Case]:
        """All of them: some of every kind first, so that little time still tells a little of everything."""
        contexts = self._contexts()
        yield from self._noises()
        for temperature in self._conditions.temperatures:
            how = self._conditions.answering(sampling=Sampling(temperature=temperature))
            yield self._asked(f"temperature {temperature:g}", "sampling", "answers are drawn", self._own_ids(), how)
        for bits in self._conditions.bits:
            yield self._quantised(bits)
        yield from islice(contexts, len(PLACES))
        yield from self._renderings()
        yield from self._texts()
        yield from contexts

    def _rounds(self, transcripts: Sequence[Transcript]) -> dict[str, dict[int, Rounds]]:
        return {one.name: one.rounds(transcripts, self._conditions.deepest) for one in self._subjects}

    def _own_ids(self) -> list[Asked]:
        return [Asked(key=key, ids=self._base[key].ids[: self._base[key].prompt_length]) for key in self._keys]

    def _noises(self) -> Iterator[Case]:
        for size in self._conditions.noises:
            noise = Noise(size=size, seed=self._conditions.seed)
            found = {s.name: s.rounds(self._cut, self._conditions.deepest, noise) for s in self._subjects}
            about = f"every hidden state that the drafter receives is off by {size:g} of its RMS"
            yield self._compared(f"noise {size:g}", "noise", about, found, self._reference)

    def _renderings(self) -> Iterator[Case]:
        for form in prompt_formats(self._target):
            ids = {key: form.render(self._conversations[key]) for key in self._keys}
            made = [Asked(key=key, ids=own) for key, own in ids.items() if own]
            if made:
                yield self._asked(form.name, "template", form.about, made, self._conditions.answering())
            else:
                why = "the target's own rendering has nothing of the kind to change"
                yield Case(name=form.name, group="template", about=form.about, left_out=why)

    def _texts(self) -> Iterator[Case]:
        """The doctor's own questions: English ones are the reference of all others."""
        if self._left() <= 0:
            yield Case(name="other texts", group="text", about="languages, code, tools", left_out=_NO_TIME)
            return
        how = self._conditions.answering()
        english = self._rounds(list(self._transcriber.answer(self._encoded(QUESTIONS["English"]), how)))
        cases = {name: texts for name, texts in QUESTIONS.items() if name != "English"}
        for name, texts in {**cases, "code": CODE, "tool traffic": TOOL_TRAFFIC}.items():
            paired = "the same questions" if name in cases else "other questions"
            yield self._asked(name, "text", f"against {paired} in English", self._encoded(texts), how, english)

    def _encoded(self, texts: Sequence[str]) -> list[Asked]:
        return [
            Asked(key=OWN_KEYS + i, ids=tuple(self._target.encode_chat([{"role": "user", "content": text}])))
            for i, text in enumerate(texts)
        ]

    def _quantised(self, bits: Bits) -> Case:
        kind = kind_of(self._target, bits)
        name, about = f"{bits}-bit target", f"linear layers as --quantization {kind} has them, no calibration"
        try:
            with quantised(self._target, bits) if self._left() > 0 else nullcontext():
                self._transcriber.forget()
                return self._asked(name, "weights", about, self._own_ids(), self._conditions.answering())
        except UserError as error:
            return Case(name=name, group="weights", about=about, left_out=str(error))
        finally:
            self._transcriber.forget()

    def _asked(
        self,
        name: str,
        group: str,
        about: str,
        prompts: Sequence[Asked],
        how: Answering,
        reference: Mapping[str, Mapping[int, Rounds]] | None = None,
    ) -> Case:
        if self._left() <= 0:
            return Case(name=name, group=group, about=about, left_out=_NO_TIME)
        longest = self._target.facts.max_position_embeddings
        fitting = [one for one in prompts if longest is None or len(one.ids) + how.most_tokens <= longest]
        if not fitting:
            return Case(name=name, group=group, about=about, left_out=f"the target's context is {longest} tokens")
        found = self._rounds(list(self._transcriber.answer(fitting, how)))
        return self._compared(name, group, about, found, reference or self._reference)

    def _contexts(self) -> Iterator[Case]:
        how = self._conditions.answering(max_new_tokens=self._conditions.context_tokens)
        keys = self._keys[: self._conditions.context_prompts]
        questions = {key: self._conversations[key] for key in keys}
        longest_question = max((len(self._base[key].ids) for key in keys), default=0)
        room = longest_question + how.max_new_tokens + how.overshoot + 16
        fits, others = allowed_lengths(self._target, self._conditions.lengths, room)
        cut = [self._base[key].cut(how.max_new_tokens, how.overshoot) for key in keys]
        reference, filler = self._rounds(cut), Filler(self._target, self._filler)
        reading = _LongPrompts(self._transcriber, how, length=max(fits, default=0) + room, left=self._left)
        for length in fits:
            for place in PLACES:
                name, about = f"{length} tokens, {place}", f"the question stands at the {place} of other text"
                prompts = list(long_prompts(self._target, filler, questions, length, [place]))
                if not reading.has_time_for(prompts):
                    yield Case(name=name, group="context", about=about, left_out=_NO_TIME)
                    continue
                found = self._rounds([reading.answer(prompt) for prompt in prompts])
                yield self._compared(name, "context", about, found, reference)
        for length in others:
            why = f"the target's context is {self._target.facts.max_position_embeddings} tokens"
            yield Case(name=f"{length} tokens", group="context", about="a long text", left_out=why)

    def _compared(
        self,
        name: str,
        group: str,
        about: str,
        found: Mapping[str, Mapping[int, Rounds]],
        reference: Mapping[str, Mapping[int, Rounds]],
    ) -> Case:
        cells = {
            subject: {depth: compare(own, reference[subject], depth) for depth in self._conditions.depths}
            for subject, own in found.items()
        }
        return Case(name=name, group=group, about=about, prompts=max(map(len, found.values())), cells=cells)


_NO_TIME = "no time left; give more --minutes"


class _LongPrompts:
    """Long texts, each read on from where an earlier one ended."""

    def __init__(self, transcriber: Transcriber, how: Answering, *, length: int, left: Clock) -> None:
        self._transcriber, self._how, self._length, self._left = transcriber, how, length, left
        self._texts: list[tuple[int, ...]] = []
        self._seconds_per_token = 0.0

    def has_time_for(self, prompts: Sequence[LongPrompt]) -> bool:
        """Whether the time left is likely to do: a token of a longer text takes longer, so half more is expected."""
        unread = sum(self._unread(prompt) for prompt in prompts)
        return self._left() > 1.5 * unread * self._seconds_per_token

    def answer(self, prompt: LongPrompt) -> Transcript:
        """Answer it, reading only what no earlier one had."""
        self._transcriber.make_room(self._length)
        unread, started = self._unread(prompt), time.perf_counter()
        (transcript,) = self._transcriber.answer([prompt.asked], self._how)
        self._texts.append(prompt.asked.ids)
        self._seconds_per_token = max(self._seconds_per_token, (time.perf_counter() - started) / max(unread, 256))
        return transcript

    def _unread(self, prompt: LongPrompt) -> int:
        """Tokens that the target has yet to read, more or less."""
        return len(prompt.asked.ids) - max((_common(text, prompt.asked.ids) for text in self._texts), default=0)


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two sequences begin with together."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def compare(found: Mapping[int, Rounds], reference: Mapping[int, Rounds], depth: int) -> Cell:
    """Lengths of both sides on the prompts that both have, and what is kept."""
    common = [key for key in found if key in reference]
    rows_P4 = np.array([[*round_totals(found[key], depth), *round_totals(reference[key], depth)] for key in common])
    if not common:
        nothing = float("nan")
        return Cell(length=nothing, reference=nothing, kept=Estimate(value=nothing, low=nothing, high=nothing))
    return Cell(
        length=acceptance_length(rows_P4[:, :2]),
        reference=acceptance_length(rows_P4[:, 2:]),
        kept=estimate(rows_P4, _kept),
    )


def _kept(rows_P4: Array) -> float:
    return acceptance_length(rows_P4[:, :2]) / acceptance_length(rows_P4[:, 2:])
