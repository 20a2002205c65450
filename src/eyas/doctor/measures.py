"""What is measured of one drafter on the target's own answers, and what all prompts together say.

Measured on the rounds that serving with the deepest depth would start (`Rounds.walk`), all of them drafted to that
depth with the drafter's own tokens: beyond the first miss too, because serving computes there as well and because that
is where drift shows. Acceptance is conditional (given that all drafts before were accepted) and joint (this one and all
before it). Values are kept by prompt, so that every curve and slope comes with an interval over prompts.

Shapes: P prompts, S depths, R rounds of a walk, A auxiliary states.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from eyas.doctor.fusion import Fusion, measure_fusion
from eyas.doctor.rounds import Rounds, round_starts, run_rounds
from eyas.doctor.statistics import Array, Calibration, DepthCurve, calibrate, depth_curve, estimate, with_wilson
from eyas.doctor.transcripts import Transcript
from eyas.drafter.attention_mass import REGIONS, SINKS, AttentionProbe, AttentionStatistics
from eyas.drafter.drift import Estimate, conditional_acceptance, log_sizes
from eyas.drafter.model import Drafter


@dataclass(frozen=True, kw_only=True, eq=False)
class PromptMeasures:
    """One drafter on one transcript."""

    rounds: Rounds
    mass: dict[str, Array]
    """By region, mean over the walk's rounds [S]."""
    entropy_S: Array
    spread_S: Array
    rms_S: Array
    fusion: Fusion
    outside: int
    """Tokens of the answer that the draft vocabulary does not have."""
    answer_tokens: int

    def counts(self, depth: int) -> NDArray[np.int64]:
        """Rounds of the walk with this depth, then rounds that accepted 1, 2, ... drafts at least [1 + depth]."""
        accepted = np.array(self.rounds.accepted(depth))
        return np.array([(accepted >= level).sum() for level in range(depth + 1)])


def measure_prompt(
    drafter: Drafter, transcript: Transcript, *, depth: int, layer_ids: Sequence[int], sinks: int = SINKS
) -> PromptMeasures | None:
    """Measure with a probe watching; None where the answer is too short for any round."""
    starts = round_starts(transcript)
    if not starts:
        return None
    # Acceptance first: it says which rounds serving starts. Those are then drafted to the end, and watched.
    rounds = run_rounds(drafter, transcript, depth=depth, layer_ids=layer_ids, to_first_miss=True)
    assert rounds is not None
    walked = [starts[place] for place in rounds.walk(depth)]
    start_R = torch.tensor(walked, device=transcript.aux_TX.device)
    probe = AttentionProbe(start_R, prompt_length=transcript.prompt_length, depth=depth, sinks=sinks)
    whole = run_rounds(drafter, transcript, depth=depth, layer_ids=layer_ids, watcher=probe, starts=walked)
    assert whole is not None
    seen: AttentionStatistics = probe.statistics()
    can_draft = set(drafter.vocab().target_ids_W.tolist())
    return PromptMeasures(
        rounds=rounds,
        mass={region: seen.mass[region].mean(axis=1) for region in REGIONS},
        entropy_S=seen.entropy_SR.mean(axis=1),
        spread_S=seen.spread_SR.mean(axis=1),
        rms_S=whole.rms_SR.mean(axis=1),
        fusion=measure_fusion(drafter, transcript.aux_of(layer_ids)[list(starts)]),
        outside=sum(token not in can_draft for token in transcript.answer),
        answer_tokens=len(transcript.answer),
    )


@dataclass(frozen=True, kw_only=True)
class Drift:
    """All prompts together."""

    prompts: int
    depth: int
    rounds: int
    mass: dict[str, DepthCurve]
    entropy: DepthCurve
    spread: DepthCurve
    rms: DepthCurve
    growth: Estimate
    """Slope of ln(RMS of the fed-back state) by depth: 0 is flat, 0.05 is five per cent more at every depth."""
    conditional: DepthCurve
    joint: DepthCurve
    offered: list[int]
    """Rounds of which all drafts before this depth were accepted: what its conditional acceptance is a share of."""
    length: list[Estimate]
    """Acceptance length of serving with depth 1, 2, ... ."""
    calibration: Calibration
    calibration_by_depth: list[float | None]
    """ECE of each depth."""
    state_rms: list[Estimate]
    read_rms: list[Estimate]
    share: list[Estimate]
    fused_rms: Estimate
    outside_share: float
    """Of the target's answer tokens, the part that cannot be drafted."""


def summarise(measured: Sequence[PromptMeasures], depth: int) -> Drift:
    """Curves, slopes, lengths and calibration."""
    counts_PS = np.stack([one.counts(depth) for one in measured]).astype(np.float64)
    total_S = counts_PS.sum(axis=0)
    rms_PS = np.stack([one.rms_S for one in measured])
    confident, hits = zip(*(_offered(one.rounds, depth) for one in measured), strict=True)
    by_depth = [
        calibrate(np.concatenate([c[level] for c in confident]), np.concatenate([h[level] for h in hits])).ece
        for level in range(depth)
    ]
    fusions = [one.fusion for one in measured]
    states = range(len(fusions[0].state_rms))
    return Drift(
        prompts=len(measured),
        depth=depth,
        rounds=int(total_S[0]),
        mass={region: depth_curve(np.stack([one.mass[region] for one in measured])) for region in REGIONS},
        entropy=depth_curve(np.stack([one.entropy_S for one in measured])),
        spread=depth_curve(np.stack([one.spread_S for one in measured])),
        rms=depth_curve(rms_PS),
        growth=growth(rms_PS),
        conditional=with_wilson(depth_curve(counts_PS, _conditional), total_S[1:], total_S[:-1]),
        joint=with_wilson(depth_curve(counts_PS, joint_acceptance), total_S[1:], np.full(depth, total_S[0])),
        offered=[int(count) for count in total_S[:-1]],
        length=[
            estimate(np.stack([round_totals(one.rounds, k) for one in measured]), acceptance_length)
            for k in range(1, depth + 1)
        ],
        calibration=calibrate(
            np.concatenate([np.concatenate(c) for c in confident]), np.concatenate([np.concatenate(h) for h in hits])
        ),
        calibration_by_depth=by_depth,
        state_rms=[_mean([fusion.state_rms[i] for fusion in fusions]) for i in states],
        read_rms=[_mean([fusion.read_rms[i] for fusion in fusions]) for i in states],
        share=[_mean([fusion.share[i] for fusion in fusions]) for i in states],
        fused_rms=_mean([fusion.fused_rms for fusion in fusions]),
        outside_share=sum(one.outside for one in measured) / max(1, sum(one.answer_tokens for one in measured)),
    )


def growth(rms_PS: Array) -> Estimate:
    """Slope of the logarithm."""
    return depth_curve(np.array([log_sizes(rms_S) for rms_S in rms_PS])).slope


def _conditional(counts_PS: Array) -> Array:
    """Pooled over prompts."""
    return np.array(conditional_acceptance(counts_PS.sum(axis=0)))


def joint_acceptance(counts_PS: Array) -> Array:
    """Accepted at a depth with everything before it, of all rounds; pooled over prompts."""
    total_S = counts_PS.sum(axis=0)
    return np.asarray(total_S[1:] / max(1.0, total_S[0]))


def round_totals(rounds: Rounds, depth: int) -> Array:
    """Rounds of the walk with this depth, and the drafts that they accepted [2]."""
    accepted = rounds.accepted(depth)
    return np.array([len(accepted), sum(accepted)], dtype=np.float64)


def acceptance_length(totals_P2: Array) -> float:
    """1 + accepted / rounds, pooled over prompts."""
    rounds, accepted = totals_P2.sum(axis=0)
    return float(1 + accepted / max(1.0, rounds))


def _mean(values: Sequence[float]) -> Estimate:
    return estimate(np.array(values), lambda rows: float(rows.mean()))


def _offered(rounds: Rounds, depth: int) -> tuple[list[Array], list[NDArray[np.bool_]]]:
    """Confidence and outcome of the drafts whose predecessors were all accepted, by depth."""
    walked = rounds.walk(depth)
    alive = np.ones(len(walked), dtype=bool)
    confident, hits = [], []
    for level in range(depth):
        hit = rounds.hit_SR[level, walked]
        confident.append(rounds.confidence_SR[level, walked][alive])
        hits.append(hit[alive])
        alive = alive & hit
    return confident, hits
