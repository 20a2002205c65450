"""Verdict on a drafter: statements with their evidence, likely cause and advice.

A fault is wrong with a checkpoint and can be put right; a warning is a weakness; a note is worth knowing. Health is
stated too, because silence is no finding. Rules look at slopes and intervals, not at levels: a good drafter may attend
to its own drafts a lot, as long as that does not keep growing. Findings on too few prompts or rounds are marked as such
(statistics.py).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np

from eyas.doctor.diagnosis import Diagnosis
from eyas.doctor.measures import Drift
from eyas.doctor.robustness import Case, Cell
from eyas.doctor.statistics import FADES, LEAST_PAIRS, LEAST_PROMPTS, too_few, wilson
from eyas.drafter.config import DrafterConfig

Level = Literal["fault", "warning", "unknown", "note", "healthy"]
"""The gravest first. `unknown`: measured, but on too little to judge."""

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
"""Share of accepted first drafts, over all positions, below which a drafter is wrong and not just weak."""
FOREIGN_HEAD = 0.3
LOUD_STATE = 0.8
OUTSIDE = 0.03
UNCALIBRATED = 0.15
KEPT, KEPT_CONTEXT = 0.85, 0.9
"""Shares of the acceptance length below which a condition counts as a loss."""
LEAST_LENGTH = 1.2
"""Acceptance length of the reference below which there is nothing to lose."""
MORE_PROMPTS = "give more prompts (PROMPTS, --limit)"
MORE_ROUNDS = "give more prompts or longer answers (--limit, --max-tokens)"


@dataclass(frozen=True)
class Statement:
    """One finding."""

    level: Level
    name: str
    """Stable, for programs."""
    text: str
    evidence: tuple[str, ...] = ()
    cause: str | None = None
    advice: str | None = None
    conditions: tuple[str, ...] = ()
    """Cases of the matrix that it is about, the worst first."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """All statements about one drafter."""

    recommended_depth: int | None
    statements: tuple[Statement, ...]


def judge(
    config: DrafterConfig,
    *,
    name: str,
    drift: Drift | None,
    cases: Sequence[Case],
    diagnosis: Diagnosis | None,
    cost: float,
) -> Verdict:
    """Judge a drafter; `cost` is the time of drafting one token over that of a step of the target."""
    statements: list[Statement] = []
    if diagnosis is not None:
        statements.append(_fault(diagnosis))
    if drift is not None:
        found = [_growth(config, drift), *_fading(drift), _fusion(config, drift)]
        found += [*_vocabulary(drift), *_calibration(drift)]
        statements += _weighed(found, drift.prompts)
    statements += _conditions(config, name, cases)
    order = get_args(Level)
    statements.sort(key=lambda s: order.index(s.level))
    depth = None if drift is None else recommend_depth([e.value for e in drift.length], cost)
    return Verdict(statements=tuple(statements), recommended_depth=depth)


def recommend_depth(length_by_depth: Sequence[float], cost: float) -> int:
    """Choose the depth with the most tokens per time, length / (1 + depth * cost); 0 where none beats plain."""
    speed = [1.0, *(length / (1 + depth * cost) for depth, length in enumerate(length_by_depth, start=1))]
    return int(np.argmax(speed))


def _weighed(statements: Sequence[Statement], prompts: int) -> Iterator[Statement]:
    """Soften statements to what this many prompts can support."""
    if prompts < LEAST_PROMPTS:
        worst = wilson(prompts, prompts).low
        evidence = (
            f"even if all {prompts} are healthy, that may hold for {worst:.0%} of prompts only (Wilson's 95 % "
            f"interval); from {LEAST_PROMPTS} on it holds for at least {FADES:.0%}, and below that a drafter counts as "
            "fading"
        )
        text = too_few(prompts, LEAST_PROMPTS)
        yield Statement("unknown", "too_few_prompts", text, evidence=(evidence,), advice=MORE_PROMPTS)
    for one in statements:
        if one.level == "healthy" and prompts < LEAST_PROMPTS:
            yield replace(one, level="note", text=f"on {_prompts(prompts)}, {one.text}")
        elif one.level == "warning" and prompts < LEAST_PAIRS:
            yield replace(one, level="unknown", text=f"on {_prompts(prompts)} only, {one.text}")
        else:
            yield one


def _prompts(count: int) -> str:
    return f"{count} prompt{'' if count == 1 else 's'}"


def _fault(diagnosis: Diagnosis) -> Statement:
    best, alike = diagnosis.best, diagnosis.resemblance
    tried = f"{len(diagnosis.trials)} repairs tried on {_prompts(diagnosis.prompts)}"
    no_help = f"{tried}, none helps"
    hit = wilson(diagnosis.first_hit * diagnosis.places, diagnosis.places)
    first = (
        f"{hit.value:.0%} of first drafts are accepted ({hit.low:.0%} to {hit.high:.0%}), over all {diagnosis.places} "
        "positions of the answers"
    )
    if diagnosis.prompts < LEAST_PAIRS:
        closest = () if best is None else (f"{best.ratio.value:.2f} times the accepted drafts when {best.about}",)
        text = f"known faults of the checkpoint: {too_few(diagnosis.prompts, LEAST_PAIRS)}"
        return Statement("unknown", "unsure_faults", text, evidence=(first, tried, *closest), advice=MORE_PROMPTS)
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
        return _named(best.fault, tuple(evidence), FAULTS[best.fault], best.advice)
    if hit.low < WEAK_FIRST <= hit.high:
        text = "few first drafts are accepted: weak, or wrong; too few positions to tell"
        return Statement("unknown", "unsure_faults", text, evidence=(first, no_help), advice=MORE_ROUNDS)
    if hit.value >= WEAK_FIRST:
        return Statement("healthy", "no_fault", "no known fault of the checkpoint", evidence=(first, no_help))
    reads = (
        f"the target's states give {diagnosis.reads_states.value:.1f} times the accepted drafts of misplaced ones: "
        f"they are {'hardly used' if diagnosis.unread else 'used'}"
    )
    if alike.head is not None and alike.head < FOREIGN_HEAD and (alike.head_best or 0) < 2 * FOREIGN_HEAD:
        cosine = f"the head's rows have a median cosine of {alike.head:.2f} with the target's own"
        cause = "the weights come from another target of the same shape, or from other weights of this one"
        advice = "use the target it was trained for, or train a drafter for this one"
        return _named("wrong_target", (first, reads, cosine, no_help), cause, advice)
    agrees = (
        "fed-back states resemble the fused ones they stand for by a cosine of "
        f"{diagnosis.agreement.own:.2f}, those of other positions by {diagnosis.agreement.others:.2f}"
    )
    same = (
        "the head is the target's own" if alike.head is None else f"head rows resemble the target's ({alike.head:.2f})"
    )
    cause = "by elimination: flags, layers, order, embeddings, vocabulary, rope and target are right"
    advice = "export fc.weight again from the training run; if it is the same there, train on"
    return _named("fc_damaged", (first, reads, agrees, same, no_help), cause, advice)


def _named(fault: str, evidence: tuple[str, ...], cause: str, advice: str) -> Statement:
    return Statement("fault", fault, FAULTS[fault], evidence=evidence, cause=cause, advice=advice)


def _growth(config: DrafterConfig, drift: Drift) -> Statement:
    growth, rms = drift.growth, drift.rms.value
    evidence = (
        f"RMS of the fed-back state {rms[0]:.3g} at depth 1, {rms[-1]:.3g} at depth {drift.depth}: "
        f"{growth.value:+.1%} per depth ({growth.low:+.1%} to {growth.high:+.1%})",
    )
    if growth.high <= GROWS:
        return Statement("healthy", "flat_feedback", "the fed-back state stays flat", evidence=evidence)
    if growth.low <= GROWS:
        text = f"cannot tell whether the fed-back state grows: the interval holds {GROWS:.0%} per depth"
        return Statement("unknown", "unsure_growth", text, evidence=evidence, advice=MORE_PROMPTS)
    since = next((depth for depth, value in enumerate(rms, start=1) if value > 1.1 * rms[0]), drift.depth)
    if config.norm_output:
        cause = "norm_output is set, so growth comes from training"
        advice = "limit the depth, or train on with more depths"
    else:
        cause = "unnormalised feedback (norm_output is false: this is what EAGLE 3.1 changed)"
        advice = "limit the depth to the recommended one, or upgrade to EAGLE-3.1 (drafter.init_from in a recipe)"
    text = f"the fed-back state grows with depth, since depth {since}"
    return Statement("warning", "drift", text, evidence=evidence, cause=cause, advice=advice)


def _fading(drift: Drift) -> Iterator[Statement]:
    if drift.conditional.value[0] < WEAK_FIRST:
        return  # too few drafts are accepted to speak of a decline
    value, low, high = drift.conditional.value, drift.conditional.low, drift.conditional.high
    early = float(np.nanmean(value[:3]))
    faded = [depth for depth in range(4, drift.depth + 1) if high[depth - 1] < FADES * early]
    # Depths are judged as long as their interval is no wider than the loss that counts.
    clear = [(high[i] - low[i]) / 2 <= (1 - FADES) * early for i in range(drift.depth)]
    judged = clear.index(False) if False in clear else drift.depth
    evidence = (
        ", ".join(
            f"{value[d - 1]:.0%} at depth {d} ({low[d - 1]:.0%} to {high[d - 1]:.0%} of {drift.offered[d - 1]} rounds)"
            for d in (1, 2, 4, 8, 16)
            if d <= drift.depth and value[d - 1] >= 0
        ),
    )
    if faded:
        yield Statement(
            "warning",
            "fades",
            f"conditional acceptance fades since depth {faded[0]}",
            evidence=evidence,
            cause="depths that training did not reach, or a state that drifts",
            advice="limit the depth, or train with more depths",
        )
    elif judged >= min(4, drift.depth):
        rest = "" if judged == drift.depth else f"; deeper, too few rounds come so far to judge (depth {judged + 1} on)"
        text = f"conditional acceptance holds to depth {judged}{rest}"
        yield Statement("healthy", "holds_depth", text, evidence=evidence)
    else:
        text = f"too few rounds to tell whether acceptance holds with depth ({drift.rounds} rounds)"
        yield Statement("unknown", "unsure_depth", text, evidence=evidence, advice=MORE_ROUNDS)


def _fusion(config: DrafterConfig, drift: Drift) -> Statement:
    shares = [e.value for e in drift.share]
    evidence = (
        "shares of the fused input " + ", ".join(f"{share:.0%}" for share in shares),
        "RMS of the target's states " + ", ".join(f"{size.value:.3g}" for size in drift.state_rms),
    )
    if max(shares) <= LOUD_STATE:
        return Statement("healthy", "balanced", "the fusion is balanced", evidence=evidence)
    return Statement(
        "warning",
        "imbalance",
        f"state {shares.index(max(shares)) + 1} of {len(shares)} drowns the others in the fusion",
        evidence=evidence,
        cause="imbalanced fusion" + ("" if config.fc_norm else " (fc_norm is false: this is what EAGLE 3.1 changed)"),
        advice="train with fc_norm" if not config.fc_norm else "look at the weights of fc_norm and fc",
    )


def _vocabulary(drift: Drift) -> Iterator[Statement]:
    if drift.outside_share > OUTSIDE:
        yield Statement(
            "warning",
            "coverage",
            f"{drift.outside_share:.1%} of the target's tokens cannot be drafted",
            evidence=("each of them ends a round",),
            cause="vocabulary coverage: the draft vocabulary was chosen on other text",
            advice="choose the vocabulary from the target's own answers (eyas data answer), or a larger one",
        )


def _calibration(drift: Drift) -> Iterator[Statement]:
    ece = drift.calibration.ece
    if ece is not None and ece > UNCALIBRATED:
        text = f"confidence is off by {ece:.0%} on average"
        advice = "choose depth by measured acceptance, not by the drafter's confidence"
        yield Statement("note", "calibration", text, evidence=("see the reliability curve",), advice=advice)


_GROUPS = {
    "template": (
        "templates and system prompts",
        KEPT,
        "template mismatch: trained with one rendering only",
        "retrain with [data.augment]",
    ),
    "text": (
        "languages, code and tool traffic",
        KEPT,
        "other text than it was trained on",
        "add such text to the prompts it is trained on",
    ),
    "sampling": ("temperatures", KEPT, "drawn answers are harder to guess", "draft less deep at high temperature"),
    "weights": (
        "precisions of the target",
        KEPT,
        "trained on the unquantised target",
        "train on the target as it will be served",
    ),
    "context": (
        "lengths of context",
        KEPT_CONTEXT,
        "trained on shorter text",
        "serve it with a window and sinks, or retrain with data.join_share",
    ),
}
"""By kind of condition: its label, the least share kept, the likely cause of a loss and advice."""
CONDITION_GROUPS = {group: label for group, (label, *_) in _GROUPS.items()}
"""Labels of the judged kinds of conditions; the name of a statement ends with its kind."""


def _conditions(config: DrafterConfig, name: str, cases: Sequence[Case]) -> Iterator[Statement]:
    """Make one statement for each kind of condition that was tried."""
    for group, (label, least, cause, advice) in _GROUPS.items():
        own = [(case, list(case.cells[name].values())[-1]) for case in cases if case.group == group and case.cells]
        own = [(case, cell) for case, cell in own if cell.reference >= LEAST_LENGTH]
        if not own:
            continue
        own.sort(key=lambda pair: pair[1].kept.value)
        enough = [(case, cell) for case, cell in own if case.prompts >= LEAST_PAIRS]
        low = [(case, cell) for case, cell in own if cell.kept.value < least]
        sure = [(case, cell) for case, cell in low if cell.kept.high < 1.0 and case.prompts >= LEAST_PAIRS]
        wide = [(case, cell) for case, cell in enough if cell.kept.low < least]
        if sure:
            lengths = [int(case.name.split()[0]) for case in cases if case.group == "context" and case.cells]
            if group == "context" and lengths and max(lengths) > config.max_position_embeddings:
                cause = f"rope too short: max_position_embeddings is {config.max_position_embeddings}"
            yield Statement(
                # Drawn answers are harder for every drafter: worth knowing, but no weakness.
                "note" if group == "sampling" else "warning",
                f"sensitive_{group}",
                f"loses acceptance under other {label}",
                evidence=_evidence(sure),
                cause=cause,
                advice=advice,
                conditions=_names(sure),
            )
        elif low or not enough:
            text = f"may lose acceptance under other {label}; too few prompts to tell"
            if not enough:
                text = f"other {label}: {too_few(max(case.prompts for case, _ in own), LEAST_PAIRS)}"
            yield Statement(
                "unknown",
                f"unsure_{group}",
                text,
                evidence=_evidence(low if enough else own),
                advice=f"give more prompts ({'--context-prompts' if group == 'context' else '--case-prompts'})",
                conditions=_names(low),
            )
        elif wide:
            text = f"no loss seen under other {label}, within wide intervals"
            yield Statement("note", f"unseen_{group}", text, evidence=_evidence(wide))
        else:
            yield Statement("healthy", f"robust_{group}", f"holds under other {label}", evidence=_evidence(enough)[:2])


def _evidence(pairs: Sequence[tuple[Case, Cell]]) -> tuple[str, ...]:
    """Describe the worst cases with their intervals."""
    return tuple(
        f"{case.name}: {cell.kept.value:.0%} kept ({cell.kept.low:.0%} to {cell.kept.high:.0%}; {cell.length:.2f} of "
        f"{cell.reference:.2f}, {_prompts(case.prompts)})"
        for case, cell in pairs[:4]
    )


def _names(pairs: Sequence[tuple[Case, Cell]]) -> tuple[str, ...]:
    return tuple(case.name for case, _ in pairs)
