"""Diagnosis by trial: which repair makes the drafter better, and does it use the target's states at all.

Every repair is tried on the same few transcripts, drafting a few tokens from every position of every answer. Measured
are the number of accepted drafts, relative to the unrepaired drafter, and by how many nats the target's tokens surprise
the repaired one less; both with an interval over prompts. Training lowers surprise, so on a healthy drafter every
repair raises it; it also shows faults that cost few drafts, such as layers next to the right ones.

Three controls tell faults that no repair undoes. The drafter is given the states of other tokens; if that is no worse,
it makes no use of the states. The head is compared with the target's (repairs.py). Fed-back states are compared with
the fused states that they stand for: training feeds the layer the target's fused state at depth 1 and the drafter's own
at deeper ones, so the state that the drafter makes at one position resembles the fused state of the next more than
others. If not, the input is not what the drafter was trained on: layers, order or weights of the fusion, or the target.
A fault behind the layer, of the vocabulary for example, leaves this agreement as it was.

Shapes: P prompts, T slots, R rounds, D drafter hidden.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from eyas.doctor.candidate import Subject
from eyas.doctor.repairs import Repair, Resemblance
from eyas.doctor.rounds import round_starts, run_rounds
from eyas.doctor.statistics import Array, estimate
from eyas.doctor.transcripts import Transcript
from eyas.drafter.drift import Estimate
from eyas.drafter.model import Drafter, FirstLayer
from eyas.drafter.rounds import RoundAttention
from eyas.target.model import Target

DEPTH = 3
"""Deep enough for faults of the feedback, shallow enough to be quick."""
JUMP, SUSPECTED_JUMP, FLAG_JUMP = 1.10, 1.03, 1.04
"""Ratio of accepted drafts from which a repair names a fault: by itself, with other evidence, for a flag. Layers and
rope bases have neighbours that are nearly as good, and by chance better; a flag is right or wrong."""
LESS_SURPRISE = 0.04
"""Nats by which mean surprise must fall to name a fault by that alone."""
FLAGS = frozenset({"fc_norm", "norm_output", "norm_before_residual", "norm_before_fc"})
USEFUL = 0.5
"""Accepted drafts per position below which a repair mends nothing, however much it helps."""
UNREAD = 1.25
"""Ratio to a drafter with the states of other tokens below which the states count as unused."""


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """Mean cosines behind the layer's own norm of hidden states."""

    own: float
    """Between a fed-back state and the fused state that it stands for."""
    others: float
    """Between a fed-back state and the fused states of other positions."""


@torch.inference_mode()
def measure_agreement(drafter: Drafter, transcripts: Sequence[Transcript], aux: Sequence[Tensor]) -> Agreement:
    """Measure over all positions of transcripts, whose auxiliary states [T, X] are `aux`."""
    given, made = [], []
    for transcript, aux_TX in zip(transcripts, aux, strict=True):
        starts = round_starts(transcript)
        if len(starts) < 2:
            continue
        slots, device = starts[-1] + 1, aux_TX.device
        start_R = torch.tensor(list(starts), device=device)
        attention = RoundAttention(start_R)
        attention.depth = 1
        fused_TD = drafter.fuse(aux_TX[:slots].to(drafter.fc.weight.dtype))
        tokens_T = torch.tensor(transcript.ids[1 : slots + 1], device=device)
        output = drafter.step(fused_TD, tokens_T, torch.arange(slots, device=device), attention)
        given.append(fused_TD[start_R[1:]])
        made.append(output.feedback[start_R[:-1]])
    if not given:
        return Agreement(own=float("nan"), others=float("nan"))
    layer = drafter.layers[0]
    assert isinstance(layer, FirstLayer)
    norm = layer.hidden_norm
    fused_RD, fed_RD = norm(torch.cat(given)).float(), norm(torch.cat(made)).float()
    # Half of all positions further on there is another word of another sentence.
    other_RD = fused_RD.roll(len(fused_RD) // 2, dims=0)
    return Agreement(own=_cosine(fed_RD, fused_RD), others=_cosine(fed_RD, other_RD))


def _cosine(one_RD: Tensor, other_RD: Tensor) -> float:
    return float(functional.cosine_similarity(one_RD, other_RD, dim=-1).mean())


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Effect of one repair."""

    fault: str
    about: str
    advice: str
    suspected: bool
    ratio: Estimate
    """Accepted drafts with the repair over those without."""
    accepted: float
    """Accepted drafts per position with the repair."""
    surprise: Estimate
    """Nats by which the target's tokens surprise the repaired drafter more at depth 1; negative if less."""

    @property
    def convinces(self) -> bool:
        """Whether the effect can hardly be chance."""
        least = SUSPECTED_JUMP if self.suspected else FLAG_JUMP if self.fault in FLAGS else JUMP
        jumps = self.ratio.value >= least and self.ratio.low > 1.0
        calms = self.surprise.value <= -LESS_SURPRISE and self.surprise.high < 0
        return (jumps or calms) and self.accepted >= USEFUL

    @property
    def score(self) -> float:
        """Gain in nats of both kinds; other evidence decides between equals."""
        return float(np.log(self.ratio.value)) - self.surprise.value + (0.05 if self.suspected else 0.0)


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """All trials and controls."""

    prompts: int
    places: int
    """Positions of all answers; each is drafted from."""
    accepted: float
    """Accepted drafts per position without repair."""
    first_hit: float
    """Share of positions whose first draft is accepted."""
    reads_states: Estimate
    """Accepted drafts over those with the states of other tokens."""
    agreement: Agreement
    resemblance: Resemblance
    trials: tuple[Trial, ...]

    @property
    def best(self) -> Trial | None:
        convincing = [trial for trial in self.trials if trial.convinces]
        return max(convincing, key=lambda trial: trial.score, default=None)

    @property
    def rival(self) -> Trial | None:
        """A repair of another fault that is nearly as convincing as the best."""
        best = self.best
        others = [t for t in self.trials if best is not None and t.convinces and t.fault != best.fault]
        second = max(others, key=lambda trial: trial.score, default=None)
        return second if second is not None and best is not None and second.score >= 0.9 * best.score else None

    @property
    def unread(self) -> bool:
        """Whether the drafter makes next to no use of the target's states."""
        return self.reads_states.value < UNREAD


def diagnose(
    subject: Subject,
    target: Target,
    transcripts: Sequence[Transcript],
    repairs: Sequence[Repair],
    resemblance: Resemblance,
    progress: Callable[[int], None] = lambda done: None,
) -> Diagnosis:
    """Try all repairs on these transcripts; `progress` is called with the number of those done."""
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
    """States of layers that the transcripts do not hold, computed in one target pass per transcript."""

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
    """Accepted drafts, accepted first drafts, positions and nats of surprise of each transcript [P, 4]."""
    rows = []
    for transcript in transcripts:
        aux_TX = states.of(transcript, subject.layer_ids)
        if misplaced:
            aux_TX = aux_TX.roll(len(aux_TX) // 2, dims=0)
        layers = subject.layer_ids
        rounds = run_rounds(
            subject.drafter, transcript, depth=DEPTH, layer_ids=layers, aux_TX=aux_TX, to_first_miss=True
        )
        if rounds is not None:
            places = len(rounds.accepted_R)
            rows.append([rounds.accepted_R.sum(), rounds.hit_SR[0].sum(), places, rounds.surprise_R.sum()])
    return np.array(rows, dtype=np.float64).reshape(-1, 4)


def _ratio(one: Array, other: Array) -> Estimate:
    """Ratio of accepted drafts. One is added to both counts, so that it is finite."""
    pairs = np.stack([one[:, 0], other[:, 0]], axis=1)
    return estimate(pairs, lambda rows: float((rows[:, 0].sum() + 1) / (rows[:, 1].sum() + 1)))


def _more_surprise(one: Array, other: Array) -> Estimate:
    """Difference in nats of surprise per position."""
    pairs = np.stack([one[:, 3] - other[:, 3], other[:, 2]], axis=1)
    return estimate(pairs, lambda rows: float(rows[:, 0].sum() / max(1.0, rows[:, 1].sum())))
