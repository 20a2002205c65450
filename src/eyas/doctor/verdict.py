"""What the measurements mean, in words: each statement with its evidence, the likely cause, and what to do.

Faults are things that are wrong with a checkpoint and can be put right; warnings are weaknesses of a drafter as it is;
notes are worth knowing. A statement of health is made too, because silence is no finding. Rules look at slopes and at
intervals, not at levels: a good drafter may look at its own guesses a lot, as long as that does not run away. What too
few prompts or rounds show is said, and called that (sample_size.py).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import get_args

import numpy as np

from eyas.doctor.diagnosis import Diagnosis
from eyas.doctor.measures import Drift
from eyas.doctor.robustness import Case
from eyas.doctor.sample_size import FADES, LEAST_PAIRS, LEAST_PROMPTS, too_few, wilson
from eyas.doctor.statements import Level, Statement, judge_conditions
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
        found = [*_growth(config, drift), *_fading(drift), *_fusion(config, drift)]
        found += [*_vocabulary(drift), *_calibration(drift)]
        statements += _weighed(found, drift.prompts)
    statements += judge_conditions(config, name, cases)
    order = get_args(Level)
    statements.sort(key=lambda s: order.index(s.level))
    depth = None if drift is None else recommend_depth([e.value for e in drift.length], cost)
    return Verdict(statements=tuple(statements), recommended_depth=depth)


def recommend_depth(length_by_depth: Sequence[float], cost: float) -> int:
    """The depth with the most tokens per unit of time: length / (1 + depth * cost); 0 where none beats plain."""
    speed = [1.0, *(length / (1 + depth * cost) for depth, length in enumerate(length_by_depth, start=1))]
    return int(np.argmax(speed))


def _weighed(statements: Sequence[Statement], prompts: int) -> Iterator[Statement]:
    """The same, called no surer than so many prompts make them."""
    if prompts < LEAST_PROMPTS:
        worst = wilson(prompts, prompts).low
        yield Statement(
            level="unknown",
            name="too_few_prompts",
            text=too_few(prompts, LEAST_PROMPTS),
            evidence=(
                f"even if all {prompts} are as they should be, that may be so of {worst:.0%} of prompts only (Wilson's "
                f"95 % interval); from {LEAST_PROMPTS} on it is so of {FADES:.0%} at least, and below that a drafter "
                "counts as fading",
            ),
            advice="give more prompts (--prompts, --limit)",
        )
    for one in statements:
        if one.level == "healthy" and prompts < LEAST_PROMPTS:
            yield replace(one, level="note", text=f"on {_prompts(prompts)}, {one.text}")
        elif one.level == "warning" and prompts < LEAST_PAIRS:
            yield replace(one, level="unknown", text=f"on {_prompts(prompts)} only, {one.text}")
        else:
            yield one


def _prompts(count: int) -> str:
    return f"{count} prompt{'' if count == 1 else 's'}"


def _faults(diagnosis: Diagnosis) -> Iterator[Statement]:
    best, alike = diagnosis.best, diagnosis.resemblance
    tried = f"{len(diagnosis.trials)} repairs tried on {_prompts(diagnosis.prompts)}"
    hit = wilson(diagnosis.first_hit * diagnosis.places, diagnosis.places)
    first = (
        f"{hit.value:.0%} of first drafts are accepted ({hit.low:.0%} to {hit.high:.0%}), over all {diagnosis.places} "
        "places of the answers"
    )
    if diagnosis.prompts < LEAST_PAIRS:
        closest = () if best is None else (f"{best.ratio.value:.2f} times the accepted drafts when {best.about}",)
        yield Statement(
            level="unknown",
            name="unsure_faults",
            text=f"known faults of the checkpoint: {too_few(diagnosis.prompts, LEAST_PAIRS)}",
            evidence=(first, tried, *closest),
            advice="give more prompts (--prompts, --limit)",
        )
        return
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
    if hit.low < WEAK_FIRST <= hit.high:
        yield Statement(
            level="unknown",
            name="unsure_faults",
            text="few first drafts are accepted: weak, or wrong; too few places to tell",
            evidence=(first, f"{tried}, none helps"),
            advice="give more prompts or longer answers (--limit, --max-tokens)",
        )
        return
    if hit.value >= WEAK_FIRST:
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
        if growth.high <= GROWS:
            text = "the fed-back state stays flat"
            yield Statement(level="healthy", name="flat_feedback", text=text, evidence=(said,))
        else:
            text = f"cannot tell whether the fed-back state grows: the interval holds {GROWS:.0%} per depth"
            advice = "give more prompts (--prompts, --limit)"
            yield Statement(level="unknown", name="unsure_growth", text=text, evidence=(said,), advice=advice)
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
    value, low, high = drift.conditional.value, drift.conditional.low, drift.conditional.high
    early = float(np.nanmean(value[:3]))
    faded = [depth for depth in range(4, drift.depth + 1) if high[depth - 1] < FADES * early]
    # Told to where the interval is no wider than the loss that it is to show.
    clear = [(high[i] - low[i]) / 2 <= (1 - FADES) * early for i in range(drift.depth)]
    judged = clear.index(False) if False in clear else drift.depth
    said = ", ".join(
        f"{value[d - 1]:.0%} at depth {d} ({low[d - 1]:.0%} to {high[d - 1]:.0%} of {drift.offered[d - 1]} rounds)"
        for d in (1, 2, 4, 8, 16)
        if d <= drift.depth and value[d - 1] >= 0
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
    elif judged >= min(4, drift.depth):
        rest = "" if judged == drift.depth else f"; deeper, too few rounds come so far to judge (depth {judged + 1} on)"
        text = f"conditional acceptance holds to depth {judged}{rest}"
        yield Statement(level="healthy", name="holds_depth", text=text, evidence=(said,))
    else:
        yield Statement(
            level="unknown",
            name="unsure_depth",
            text=f"too few rounds to tell whether acceptance holds with depth ({drift.rounds} rounds)",
            evidence=(said,),
            advice="give more prompts or longer answers (--limit, --max-tokens)",
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
