"""What the measurements mean, in words: each statement with its evidence, the likely cause, and what to do.

Faults are things that are wrong with a checkpoint and can be put right; warnings are weaknesses of a drafter as it is;
notes are worth knowing. A statement of health is made too, because silence is no finding. Rules look at slopes and at
intervals, not at levels: a good drafter may look at its own guesses a lot, as long as that does not run away.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from eyas.doctor.diagnosis import Diagnosis
from eyas.doctor.measures import Drift
from eyas.doctor.robustness import Case
from eyas.doctor.statements import Statement, judge_conditions
from eyas.drafter.config import DrafterConfig

FAULTS = {
    "fc_norm": "wrong norm flag: fc_norm",
    "norm_output": "wrong norm flag: norm_output",
    "norm_before_residual": "wrong norm flag: norm_before_residual",
    "norm_before_fc": "wrong norm flag: norm_before_fc",
    "aux_layers": "wrong auxiliary layers",
    "fc_columns": "the columns of fc are in the wrong order",
    "embeddings": "stale or foreign embeddings",
    "d2t": "the table of draft ids (d2t) is wrong",
    "rope_base": "wrong rope base",
    "wrong_target": "made for another target",
    "fc_damaged": "the fusion weights (fc) are damaged, or hardly trained",
}

GROWS = 0.01
"""Growth of the fed-back state per depth that counts: a sixth more at depth 16."""
WEAK_FIRST = 0.35
"""Below this share of accepted first drafts, over all places, something is wrong and not just weak."""
FOREIGN_HEAD = 0.3
FADES = 0.8
"""Conditional acceptance at a depth in parts of that of the first depths, below which a drafter fades."""
LOUD_STATE = 0.8
OUTSIDE = 0.03
UNCALIBRATED = 0.15


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """All that is said about one drafter."""

    statements: tuple[Statement, ...]
    recommended_depth: int | None


def judge(
    config: DrafterConfig,
    *,
    name: str,
    drift: Drift | None,
    cases: Sequence[Case],
    diagnosis: Diagnosis | None,
    cost: float,
) -> Verdict:
    """Put everything together. `cost` is that of drafting one token, in parts of a step of the target."""
    statements: list[Statement] = []
    if diagnosis is not None:
        statements += _faults(diagnosis)
    if drift is not None:
        statements += [*_growth(config, drift), *_fading(drift), *_fusion(config, drift)]
        statements += [*_vocabulary(drift), *_calibration(drift)]
    statements += judge_conditions(config, name, cases)
    order = {"fault": 0, "warning": 1, "note": 2, "healthy": 3}
    statements.sort(key=lambda s: order[s.level])
    depth = None if drift is None else recommend_depth([e.value for e in drift.length], cost)
    return Verdict(statements=tuple(statements), recommended_depth=depth)


def recommend_depth(length_by_depth: Sequence[float], cost: float) -> int:
    """The depth with the most tokens per unit of time: length / (1 + depth * cost); 0 where none beats plain."""
    speed = [1.0, *(length / (1 + depth * cost) for depth, length in enumerate(length_by_depth, start=1))]
    return int(np.argmax(speed))


def _faults(diagnosis: Diagnosis) -> Iterator[Statement]:
    best, alike = diagnosis.best, diagnosis.resemblance
    tried = f"{len(diagnosis.trials)} repairs tried"
    if best is not None:
        evidence = [
            f"{best.ratio.value:.2f} times the accepted drafts when {best.about} "
            f"(95 % interval {best.ratio.low:.2f} to {best.ratio.high:.2f}; {tried}), and the target's tokens surprise "
            f"it by {best.surprise.value:+.2f} nats ({best.surprise.low:+.2f} to {best.surprise.high:+.2f})"
        ]
        rival = diagnosis.rival
        if rival is not None:
            evidence.append(f"nearly as much, {rival.ratio.value:.2f} times, when {rival.about}")
        if best.fault == "embeddings" and alike.embedding is not None:
            evidence.append(f"shipped embeddings have a median cosine of {alike.embedding:.2f} with the target's")
        if best.fault == "d2t" and alike.head_agreement is not None:
            evidence.append(f"{alike.head_agreement:.0%} of the head's rows resemble most the token that d2t names")
        yield Statement(
            level="fault",
            name=best.fault,
            text=FAULTS[best.fault],
            evidence=tuple(evidence),
            cause=FAULTS[best.fault],
            advice=best.advice,
        )
        return
    first = f"{diagnosis.first_hit:.0%} of first drafts are accepted, over all places of the answers"
    if diagnosis.first_hit >= WEAK_FIRST:
        yield Statement(
            level="healthy",
            name="no_fault",
            text="no known fault of the checkpoint",
            evidence=(first, f"{tried}, none helps"),
        )
        return
    reads = (
        f"the target's states make {diagnosis.reads_states.value:.1f} times the accepted drafts of misplaced ones: "
        f"{'as good as unread' if diagnosis.unread else 'they are read'}"
    )
    foreign = alike.head is not None and alike.head < FOREIGN_HEAD and (alike.head_best or 0) < 2 * FOREIGN_HEAD
    if foreign:
        cosine = f"the head's rows have a median cosine of {alike.head:.2f} with the target's own"
        yield Statement(
            level="fault",
            name="wrong_target",
            text=FAULTS["wrong_target"],
            evidence=(first, reads, cosine, f"{tried}, none helps"),
            cause="the weights come from another target of the same shape, or from other weights of this one",
            advice="use the target it was trained for, or train a drafter for this one",
        )
        return
    agrees = (
        "fed-back states resemble the fused ones they stand for by a cosine of "
        f"{diagnosis.agreement.own:.2f}, those of other places by {diagnosis.agreement.others:.2f}"
    )
    same = (
        "the head is the target's own" if alike.head is None else f"head rows resemble the target's ({alike.head:.2f})"
    )
    yield Statement(
        level="fault",
        name="fc_damaged",
        text=FAULTS["fc_damaged"],
        evidence=(first, reads, agrees, same, f"{tried}, none helps"),
        cause="by elimination: flags, layers, order, embeddings, vocabulary, rope and target are right",
        advice="export fc.weight again from the training run; if it is the same there, train on",
    )


def _growth(config: DrafterConfig, drift: Drift) -> Iterator[Statement]:
    growth, rms = drift.growth, drift.rms.value
    said = (
        f"RMS of the fed-back state {rms[0]:.3g} at depth 1, {rms[-1]:.3g} at depth {drift.depth}: "
        f"{growth.value:+.1%} per depth ({growth.low:+.1%} to {growth.high:+.1%})"
    )
    if growth.low <= GROWS:
        yield Statement(level="healthy", name="flat_feedback", text="the fed-back state stays flat", evidence=(said,))
        return
    since = next((depth for depth, value in enumerate(rms, start=1) if value > 1.1 * rms[0]), drift.depth)
    if config.norm_output:
        cause, advice = (
            "norm_output is set, so growth comes from training",
            "limit the depth, or train on with more depths",
        )
    else:
        cause = "unnormalised feedback (norm_output is false: this is what EAGLE 3.1 changed)"
        advice = "limit the depth to the recommended one, or upgrade to EAGLE-3.1 (drafter.init_from in a recipe)"
    yield Statement(
        level="warning",
        name="drift",
        text=f"the fed-back state grows with depth, since depth {since}",
        evidence=(said,),
        cause=cause,
        advice=advice,
    )


def _fading(drift: Drift) -> Iterator[Statement]:
    if drift.conditional.value[0] < WEAK_FIRST:
        return  # too little is accepted to speak of its decline
    value, high = drift.conditional.value, drift.conditional.high
    early = float(np.nanmean(value[:3]))
    faded = [depth for depth in range(4, drift.depth + 1) if high[depth - 1] < FADES * early]
    said = ", ".join(
        f"{value[d - 1]:.0%} at depth {d}" for d in (1, 2, 4, 8, 16) if d <= drift.depth and value[d - 1] >= 0
    )
    if faded:
        yield Statement(
            level="warning",
            name="fades",
            text=f"conditional acceptance fades since depth {faded[0]}",
            evidence=(said,),
            cause="depths that training did not reach, or a state that drifts",
            advice="limit the depth, or train with more depths",
        )
    else:
        yield Statement(
            level="healthy", name="holds_depth", text="conditional acceptance holds with depth", evidence=(said,)
        )


def _fusion(config: DrafterConfig, drift: Drift) -> Iterator[Statement]:
    shares = [e.value for e in drift.share]
    sizes = [e.value for e in drift.state_rms]
    said = "shares of the fused input " + ", ".join(f"{share:.0%}" for share in shares)
    raw = "RMS of the target's states " + ", ".join(f"{size:.3g}" for size in sizes)
    if max(shares) > LOUD_STATE:
        yield Statement(
            level="warning",
            name="imbalance",
            text=f"state {shares.index(max(shares)) + 1} of {len(shares)} drowns the others in the fusion",
            evidence=(said, raw),
            cause="imbalanced fusion"
            + ("" if config.fc_norm else " (fc_norm is false: this is what EAGLE 3.1 changed)"),
            advice="train with fc_norm" if not config.fc_norm else "look at the weights of fc_norm and fc",
        )
    else:
        yield Statement(level="healthy", name="balanced", text="the fusion is balanced", evidence=(said, raw))


def _vocabulary(drift: Drift) -> Iterator[Statement]:
    if drift.outside_share > OUTSIDE:
        yield Statement(
            level="warning",
            name="coverage",
            text=f"{drift.outside_share:.1%} of the target's tokens cannot be drafted",
            evidence=("each of them ends a round",),
            cause="vocabulary coverage: the draft vocabulary was chosen on other text",
            advice="choose the vocabulary from the target's own answers (eyas data answer), or a larger one",
        )


def _calibration(drift: Drift) -> Iterator[Statement]:
    ece = drift.calibration.ece
    if ece is not None and ece > UNCALIBRATED:
        yield Statement(
            level="note",
            name="calibration",
            text=f"confidence is off by {ece:.0%} on average",
            evidence=("see the reliability curve",),
            advice="choose depth by measured acceptance, not by the drafter's confidence",
        )
