"""Acceptance length of the same prompts under other conditions, relative to the unperturbed run.

Every case is compared with the unperturbed run of the same prompts at the same answer length. Kept is its length over
that of the reference, with an interval from resampling prompts, both sides together since they are pairs. Cases come
one by one, so an interruption keeps those that are done, and none starts that the time left does not allow.

Shapes: P prompts.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import islice
from math import nan

import numpy as np

from eyas.data.conversations import Conversation
from eyas.doctor.candidate import Subject
from eyas.doctor.conditions import (
    PLACES,
    TEXTS,
    Filler,
    long_prompts,
    prompt_formats,
    quantisation_name,
    quantised,
)
from eyas.doctor.measures import acceptance_length, round_totals
from eyas.doctor.rounds import Noise, Rounds
from eyas.doctor.statistics import NOTHING, estimate
from eyas.doctor.transcripts import Answering, Asked, Transcriber, Transcript
from eyas.drafter.drift import Estimate
from eyas.errors import UserError
from eyas.kernels.linear.quantised_linear import Bits
from eyas.sampling import Sampling

GROUPS = ("noise", "template", "text", "sampling", "weights", "context")
"""Kinds of cases, in the order of reports."""
OWN_KEYS = 1_000_000
"""First key of the doctor's own questions."""
LONGER = 1.5
"""Expected growth of the time for a token of a longer text."""
_NO_TIME = "no time left; give more --minutes"

RoundsOf = Mapping[str, Mapping[int, Rounds]]
"""Rounds by drafter and key."""


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """Conditions to try, and their sizes."""

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
        return max(self.depths)

    def answering(self, max_new_tokens: int | None = None, sampling: Sampling | None = None) -> Answering:
        return Answering(
            max_new_tokens=max_new_tokens or self.max_new_tokens,
            overshoot=self.deepest,
            sampling=sampling or Sampling(),
            seed=self.seed,
        )


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One drafter in one case at one depth."""

    length: float
    reference: float
    kept: Estimate
    """Length over the reference."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Result under one condition, or the reason why there is none."""

    name: str
    group: str
    about: str
    prompts: int = 0
    left_out: str | None = None
    cells: Mapping[str, Mapping[int, Cell]] = field(default_factory=dict)
    """By drafter and depth."""


class Robustness:
    """Runs the cases for all drafters at once, so that the target answers each prompt only once."""

    def __init__(
        self,
        transcriber: Transcriber,
        subjects: Sequence[Subject],
        base: Sequence[Transcript],
        conversations: Mapping[int, Conversation],
        conditions: Conditions,
        *,
        filler: str,
        left: Callable[[], float],
    ) -> None:
        """`left` returns the seconds that are left."""
        self._transcriber, self._subjects, self._conditions = transcriber, subjects, conditions
        self._target, self._conversations = transcriber.target, conversations
        self._longest = self._target.facts.max_position_embeddings
        self._filler, self._left = filler, left
        self._base = {one.key: one for one in base if one.key in conversations}
        self._keys = list(self._base)[: conditions.prompts]
        self._cut = self._transcripts(self._keys, conditions.answering())
        self._reference = self._rounds(self._cut)

    def cases(self) -> Iterator[Case]:
        """Run all cases, some of every kind first, so that little time still covers every kind."""
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

    def _transcripts(self, keys: Sequence[int], how: Answering) -> list[Transcript]:
        """The unperturbed transcripts, shortened to the answers of the cases."""
        return [self._base[key].cut(how.max_new_tokens, how.overshoot) for key in keys]

    def _rounds(self, transcripts: Sequence[Transcript], noise: Noise | None = None) -> RoundsOf:
        return {one.name: one.rounds(transcripts, self._conditions.deepest, noise) for one in self._subjects}

    def _own_ids(self) -> list[Asked]:
        return [Asked(key=key, ids=self._base[key].ids[: self._base[key].prompt_length]) for key in self._keys]

    def _noises(self) -> Iterator[Case]:
        for size in self._conditions.noises:
            found = self._rounds(self._cut, Noise(size=size, seed=self._conditions.seed))
            about = f"every hidden state that the drafter receives is off by {size:g} of its RMS"
            yield self._compared(f"noise {size:g}", "noise", about, found)

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
        """Compare the doctor's own questions with the English ones."""
        if self._left() <= 0:
            yield Case(name="other texts", group="text", about="languages, code, tools", left_out=_NO_TIME)
            return
        how, questions = self._conditions.answering(), dict(TEXTS["questions"])
        english = self._rounds(list(self._transcriber.answer(self._encoded(questions.pop("English")), how)))
        for name, texts in {**questions, "code": TEXTS["code"], "tool traffic": TEXTS["tool_traffic"]}.items():
            paired = "the same questions" if name in questions else "other questions"
            yield self._asked(name, "text", f"against {paired} in English", self._encoded(texts), how, english)

    def _encoded(self, texts: Sequence[str]) -> list[Asked]:
        return [
            Asked(key=OWN_KEYS + i, ids=tuple(self._target.encode_chat([{"role": "user", "content": text}])))
            for i, text in enumerate(texts)
        ]

    def _quantised(self, bits: Bits) -> Case:
        kind = quantisation_name(self._target, bits)
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
        reference: RoundsOf | None = None,
    ) -> Case:
        if self._left() <= 0:
            return Case(name=name, group=group, about=about, left_out=_NO_TIME)
        longest = self._longest
        fitting = [one for one in prompts if longest is None or len(one.ids) + how.most_tokens <= longest]
        if not fitting:
            return Case(name=name, group=group, about=about, left_out=f"the target's context is {longest} tokens")
        found = self._rounds(list(self._transcriber.answer(fitting, how)))
        return self._compared(name, group, about, found, reference)

    def _contexts(self) -> Iterator[Case]:
        how = self._conditions.answering(self._conditions.context_tokens)
        keys = self._keys[: self._conditions.context_prompts]
        questions = {key: self._conversations[key] for key in keys}
        room = max((len(self._base[key].ids) for key in keys), default=0) + how.most_tokens + 16
        fits = [one for one in self._conditions.lengths if self._longest is None or one + room <= self._longest]
        reference, filler = self._rounds(self._transcripts(keys, how)), Filler(self._target, self._filler)
        seconds_per_token = 0.0
        for length in fits:
            for place in PLACES:
                name, about = f"{length} tokens, {place}", f"the question stands at the {place} of other text"
                if self._left() <= LONGER * seconds_per_token * length:
                    yield Case(name=name, group="context", about=about, left_out=_NO_TIME)
                    continue
                started = time.perf_counter()
                self._transcriber.make_room(max(fits) + room)
                prompts = long_prompts(self._target, filler, questions, length, place)
                # One after the other, so that later prompts find the prefix of earlier ones in the cache.
                answered = [one for prompt in prompts for one in self._transcriber.answer([prompt], how)]
                seconds_per_token = max(seconds_per_token, (time.perf_counter() - started) / length)
                yield self._compared(name, "context", about, self._rounds(answered), reference)
        for length in self._conditions.lengths:
            if length not in fits:
                why = f"the target's context is {self._longest} tokens"
                yield Case(name=f"{length} tokens", group="context", about="a long text", left_out=why)

    def _compared(self, name: str, group: str, about: str, found: RoundsOf, reference: RoundsOf | None = None) -> Case:
        reference = reference or self._reference
        cells = {
            subject: {depth: compare(own, reference[subject], depth) for depth in self._conditions.depths}
            for subject, own in found.items()
        }
        return Case(name=name, group=group, about=about, prompts=max(map(len, found.values())), cells=cells)


def compare(found: Mapping[int, Rounds], reference: Mapping[int, Rounds], depth: int) -> Cell:
    """Compare acceptance lengths on the prompts that both sides have."""
    common = [key for key in found if key in reference]
    rows_P4 = np.array([[*round_totals(found[key], depth), *round_totals(reference[key], depth)] for key in common])
    if not common:
        return Cell(length=nan, reference=nan, kept=NOTHING)
    return Cell(
        length=acceptance_length(rows_P4[:, :2]),
        reference=acceptance_length(rows_P4[:, 2:]),
        kept=estimate(rows_P4, lambda rows: acceptance_length(rows[:, :2]) / acceptance_length(rows[:, 2:])),
    )
