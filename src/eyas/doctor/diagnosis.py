"""Differential diagnosis by trial: which repair makes the drafter better, and does it read the target at all.

Every repair is tried on the same few transcripts, drafting a few tokens from every place of every answer. What counts
is the number of accepted drafts, as a ratio to the drafter as it is, and by how many nats the target's tokens surprise
it less; both with an interval over prompts. Training lowers surprise, so on a healthy drafter every repair raises it,
and where a fault costs few drafts (layers next to the right ones) it still shows. Three controls tell
faults that no repair undoes: the drafter given the states of other tokens (if that is no worse, it makes nothing of the
target's states), whether the fusion gives what the drafter expects (agreement.py), and how much its head resembles the
target's.

Shapes: P prompts.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from eyas.doctor.agreement import Agreement, measure_agreement
from eyas.doctor.repairs import Repair
from eyas.doctor.resemblance import Resemblance
from eyas.doctor.rounds import run_rounds
from eyas.doctor.statistics import Array, estimate
from eyas.doctor.subject import Subject
from eyas.doctor.transcripts import Transcript
from eyas.drafter.drift import Estimate
from eyas.target.model import Target

DEPTH = 3
"""Deep enough for what goes wrong in the feedback, shallow enough to be quick."""
JUMP, SUSPECTED_JUMP, FLAG_JUMP = 1.10, 1.03, 1.04
"""Accepted drafts in parts of those as it is, from which a repair names a fault: by itself, with other evidence, for
a flag. Layers and rope bases have neighbours that are nearly as good and by chance better; a flag is right or wrong."""
LESS_SURPRISE = 0.04
"""Nats by which the target's tokens must surprise less, on average, to name a fault by that alone."""
FLAGS = frozenset({"fc_norm", "norm_output", "norm_before_residual", "norm_before_fc"})
USEFUL = 0.5
"""Accepted drafts per place below which a repair has mended nothing, however much it helps."""
UNREAD = 1.25
"""Below this ratio to a drafter with the states of other tokens, the states are as good as unread."""

Progress = Callable[[int], None]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One repair and what it did."""

    fault: str
    about: str
    advice: str
    suspected: bool
    ratio: Estimate
    """Accepted drafts with the repair in parts of those without."""
    accepted: float
    """Accepted drafts per place with the repair."""
    surprise: Estimate
    """By how many nats the target's tokens surprise the repaired drafter more (less, if negative) at depth 1."""

    @property
    def convinces(self) -> bool:
        """Whether this much can hardly be chance."""
        least = SUSPECTED_JUMP if self.suspected else FLAG_JUMP if self.fault in FLAGS else JUMP
        jumps = self.ratio.value >= least and self.ratio.low > 1.0
        calms = self.surprise.value <= -LESS_SURPRISE and self.surprise.high < 0
        return (jumps or calms) and self.accepted >= USEFUL

    @property
    def score(self) -> float:
        """How much better it makes the drafter, in nats of both kinds; other evidence decides between equals."""
        return float(np.log(self.ratio.value)) - self.surprise.value + (0.05 if self.suspected else 0.0)


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """All trials, and the controls."""

    prompts: int
    places: int
    """Of all answers: each is drafted from."""
    accepted: float
    """Accepted drafts per place, as the drafter is."""
    first_hit: float
    """Share of places whose first draft is accepted."""
    reads_states: Estimate
    """Accepted drafts in parts of those with the states of other tokens."""
    agreement: Agreement
    resemblance: Resemblance
    trials: tuple[Trial, ...]

    @property
    def best(self) -> Trial | None:
        """The repair that convinces most."""
        convincing = [trial for trial in self.trials if trial.convinces]
        return max(convincing, key=lambda trial: trial.score, default=None)

    @property
    def rival(self) -> Trial | None:
        """A repair of something else that convinces nearly as much as the best."""
        best = self.best
        others = [t for t in self.trials if best is not None and t.convinces and t.fault != best.fault]
        second = max(others, key=lambda trial: trial.score, default=None)
        return second if second is not None and best is not None and second.score >= 0.9 * best.score else None

    @property
    def unread(self) -> bool:
        """Whether the target's states do next to nothing for the drafter."""
        return self.reads_states.value < UNREAD


def diagnose(
    subject: Subject,
    target: Target,
    transcripts: Sequence[Transcript],
    repairs: Sequence[Repair],
    resemblance: Resemblance,
    progress: Progress = lambda done: None,
) -> Diagnosis:
    """Try everything on these transcripts."""
    states = _States(target, {k for repair in repairs for k in repair.subject.layer_ids})
    now_P4 = _accepted(subject, transcripts, states)
    other_P4 = _accepted(subject, transcripts, states, misplaced=True)
    trials = []
    for number, repair in enumerate(repairs, start=1):
        after_P4 = _accepted(repair.subject, transcripts, states)
        trials.append(
            Trial(
                fault=repair.fault,
                about=repair.about,
                advice=repair.advice,
                suspected=repair.suspected,
                ratio=_ratio(after_P4, now_P4),
                accepted=float(after_P4[:, 0].sum() / max(1.0, after_P4[:, 2].sum())),
                surprise=_more_surprise(after_P4, now_P4),
            )
        )
        progress(number)
    places = now_P4[:, 2].sum()
    return Diagnosis(
        prompts=len(now_P4),
        places=int(places),
        accepted=float(now_P4[:, 0].sum() / max(1.0, places)),
        first_hit=float(now_P4[:, 1].sum() / max(1.0, places)),
        reads_states=_ratio(now_P4, other_P4),
        agreement=measure_agreement(
            subject.drafter, transcripts, [states.of(transcript, subject.layer_ids) for transcript in transcripts]
        ),
        resemblance=resemblance,
        trials=tuple(trials),
    )


class _States:
    """The target's states of layers that the transcripts do not hold, all computed in one pass per transcript."""

    def __init__(self, target: Target, layer_ids: Collection[int]) -> None:
        self._target, self._layer_ids = target, tuple(sorted(layer_ids))
        self._found: dict[int, Transcript] = {}

    def of(self, transcript: Transcript, layer_ids: tuple[int, ...]) -> Tensor:
        if set(layer_ids) <= set(transcript.layer_ids):
            return transcript.aux_of(layer_ids)
        if transcript.key not in self._found:
            ids_BT = torch.tensor([transcript.ids[:-1]])
            aux_TX = self._target.forward(ids_BT, self._layer_ids).aux_hidden_BTX[0]
            self._found[transcript.key] = replace(transcript, aux_TX=aux_TX, layer_ids=self._layer_ids)
        return self._found[transcript.key].aux_of(layer_ids)


def _accepted(
    subject: Subject, transcripts: Sequence[Transcript], states: _States, *, misplaced: bool = False
) -> Array:
    """Accepted drafts, accepted first drafts, places and nats of surprise of each transcript [P, 4]."""
    rows = []
    for transcript in transcripts:
        aux_TX = states.of(transcript, subject.layer_ids)
        if misplaced:
            aux_TX = aux_TX.roll(len(aux_TX) // 2, dims=0)
        rounds = run_rounds(
            subject.drafter,
            transcript,
            depth=DEPTH,
            layer_ids=subject.layer_ids,
            aux_TX=aux_TX,
            to_first_miss=True,
        )
        if rounds is not None:
            places = len(rounds.accepted_R)
            rows.append([rounds.accepted_R.sum(), rounds.hit_SR[0].sum(), places, rounds.surprise_R.sum()])
    return np.array(rows, dtype=np.float64).reshape(-1, 4)


def _ratio(one: Array, other: Array) -> Estimate:
    """Accepted drafts of the one over those of the other. One draft is added to both, so that none is no end."""
    pairs = np.concatenate([one[:, :1], other[:, :1]], axis=1)

    def ratio(rows: Array) -> float:
        ours, theirs = rows.sum(axis=0)
        return float((ours + 1) / (theirs + 1))

    return estimate(pairs, ratio)


def _more_surprise(one: Array, other: Array) -> Estimate:
    """Nats per place of the one above those of the other."""
    rows = np.stack([one[:, 3] - other[:, 3], other[:, 2]], axis=1)

    def mean(rows: Array) -> float:
        nats, places = rows.sum(axis=0)
        return float(nats / max(1.0, places))

    return estimate(rows, mean)
