"""Course of an examination: answers, drift, diagnosis, robustness.

Each stage adds to the examination piece by piece, so an interrupted one still gets a verdict on what was measured.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from eyas.data.conversations import Conversation
from eyas.doctor.candidate import DrafterCandidate
from eyas.doctor.diagnosis import DEPTH, Diagnosis, diagnose
from eyas.doctor.measures import Drift, PromptMeasures, measure_prompt, summarise
from eyas.doctor.repairs import measure_resemblance, repairs
from eyas.doctor.robustness import Case, Conditions, Robustness
from eyas.doctor.transcripts import Answering, Asked, Transcriber, Transcript
from eyas.doctor.verdict import Verdict, judge
from eyas.drafter.attention_mass import SINKS
from eyas.drafter.cost import flops_per_token
from eyas.target.capture import decoder_layers
from eyas.target.model import Target


@dataclass(frozen=True, kw_only=True)
class ExaminationConfig:
    """Stages of an examination, and their sizes."""

    depth: int = 16
    max_new_tokens: int = 64
    stop_strings: tuple[str, ...] = ()
    """Texts that end an answer, besides the target's stop tokens."""
    sinks: int = SINKS
    trial_prompts: int = 6
    trial_tokens: int = 40
    conditions: Conditions | None = Conditions()  # noqa: RUF009 (frozen)
    diagnosed: bool = True
    minutes: float = 10.0
    """Time after which no further condition is tried."""

    def answering(self) -> Answering:
        return Answering(max_new_tokens=self.max_new_tokens, overshoot=self.depth)


@dataclass(frozen=True, kw_only=True)
class ExaminationPrompt:
    """A prompt as tokens and as a conversation."""

    asked: Asked
    conversation: Conversation


Step = Callable[[str, int, int], None]
"""Progress callback: what is being done, how much of it is done, and of how much (0 if unknown)."""


class Examination:
    """An examination of one or two drafters of one target on some prompts."""

    def __init__(
        self,
        target: Target,
        candidates: Sequence[DrafterCandidate],
        prompts: Sequence[ExaminationPrompt],
        config: ExaminationConfig,
        *,
        filler: str,
    ) -> None:
        self.target, self.candidates, self.prompts, self.config = target, candidates, prompts, config
        self.measured: dict[str, list[PromptMeasures]] = {candidate.subject.name: [] for candidate in candidates}
        self.diagnoses: dict[str, Diagnosis] = {}
        self.cases: list[Case] = []
        self.whole = False
        self.seconds: dict[str, float] = {}
        self._started = time.perf_counter()
        self._filler = filler
        layers = {k for candidate in candidates for k in candidate.subject.layer_ids}
        self._transcriber = Transcriber(target, layers, config.stop_strings)
        self._transcripts: list[Transcript] = []

    def run(self, step: Step) -> None:
        """Run all stages, the most valuable first."""
        self._timed("drift", lambda: self._measure(step))
        if self.config.diagnosed:
            self._timed("diagnosis", lambda: self._diagnose(step))
        if self.config.conditions is not None:
            conditions = self.config.conditions
            self._timed("robustness", lambda: self._try_conditions(conditions, step))
        self.whole = True

    def _timed(self, name: str, work: Callable[[], None]) -> None:
        started = time.perf_counter()
        try:
            work()
        finally:
            self.seconds[name] = round(time.perf_counter() - started, 1)

    def _measure(self, step: Step) -> None:
        how, total = self.config.answering(), len(self.prompts)
        made, most = 0, total * how.most_tokens

        def tick(tokens: int) -> None:
            nonlocal made
            made += tokens
            step("answering", made, most)

        self._transcriber.tick = tick
        self._transcripts += self._transcriber.answer([prompt.asked for prompt in self.prompts], how)
        self._transcriber.tick = lambda tokens: None
        self._transcripts.sort(key=lambda one: one.key)
        for number, transcript in enumerate(self._transcripts, start=1):
            for candidate in self.candidates:
                subject = candidate.subject
                found = measure_prompt(
                    subject.drafter,
                    transcript,
                    depth=self.config.depth,
                    layer_ids=subject.layer_ids,
                    sinks=self.config.sinks,
                )
                if found is not None:
                    self.measured[subject.name].append(found)
            step("drafting to every depth", number, total)

    def _diagnose(self, step: Step) -> None:
        tokens = min(self.config.trial_tokens, self.config.max_new_tokens)
        chosen = [one.cut(tokens, DEPTH) for one in self._transcripts[: self.config.trial_prompts]]
        for candidate in self.candidates:
            subject = candidate.subject
            alike = measure_resemblance(subject.drafter, self.target)
            tried = list(repairs(subject, self.target, alike, candidate.unused))
            name, total = f"repairs of {subject.name}", len(tried)

            def progress(done: int, name: str = name, total: int = total) -> None:
                step(name, done, total)

            self.diagnoses[subject.name] = diagnose(subject, self.target, chosen, tried, alike, progress)

    def _try_conditions(self, conditions: Conditions, step: Step) -> None:
        matrix = Robustness(
            self._transcriber,
            [candidate.subject for candidate in self.candidates],
            self._transcripts,
            {prompt.asked.key: prompt.conversation for prompt in self.prompts},
            conditions,
            filler=self._filler,
            left=lambda: self.config.minutes * 60 - self.elapsed,
        )
        for case in matrix.cases():
            self.cases.append(case)
            step(f"conditions: {case.name}", len(self.cases), 0)

    def drifts(self) -> Mapping[str, Drift]:
        """Summarise by drafter the prompts that were finished."""
        return {name: summarise(found, self.config.depth) for name, found in self.measured.items() if found}

    def verdicts(self, drifts: Mapping[str, Drift]) -> Mapping[str, Verdict]:
        return {
            candidate.subject.name: judge(
                candidate.subject.drafter.config,
                name=candidate.subject.name,
                drift=drifts.get(candidate.subject.name),
                cases=self.cases,
                diagnosis=self.diagnoses.get(candidate.subject.name),
                cost=self.cost(candidate),
            )
            for candidate in self.candidates
        }

    def cost(self, candidate: DrafterCandidate) -> float:
        """Cost of drafting one token over that of a target step, by the weights that each reads."""
        layers = decoder_layers(self.target.model)
        # Packed weights are buffers.
        decoder = sum(weight.numel() for weight in chain(layers.parameters(), layers.buffers()))
        drafter = flops_per_token(candidate.subject.drafter.config, context=0, with_fusion=False) / 2
        return float(drafter / (decoder + self.target.head().numel()))

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self._started
