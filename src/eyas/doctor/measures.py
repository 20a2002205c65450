"""Measures of one drafter on the target's own answers, by prompt and over all prompts.

They are taken on the rounds that serving with the deepest depth would start (`Rounds.walk`), all drafted to that depth
with the drafter's own tokens, also past the first miss: serving computes there too, and that is where drift shows.
Acceptance is conditional (given that all drafts before were accepted) and joint (this draft and all before it). Values
are kept by prompt, so every curve and slope has an interval over prompts.

The share of an auxiliary state in the fusion is |W_i x_i| / sum_j |W_j x_j|, where W_i are the columns of `fc` that
read it and x_i is their input. EAGLE 3.1's `fc_norm` is there to keep one state from drowning the others.

Shapes: P prompts, S depths, R rounds of a walk, T tokens, A auxiliary states, D target hidden, X = A * D.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from eyas.doctor.rounds import Rounds, round_starts, run_rounds
from eyas.doctor.statistics import Array, Calibration, DepthCurve, calibrate, depth_curve, estimate, with_wilson
from eyas.doctor.transcripts import Transcript
from eyas.drafter.attention_mass import REGIONS, SINKS, AttentionProbe, rms
from eyas.drafter.drift import Estimate, conditional_acceptance, log_sizes
from eyas.drafter.model import Drafter


@dataclass(frozen=True, kw_only=True)
class Fusion:
    """Sizes of the fusion's inputs and output, means over the tokens at which a round may start."""

    state_rms: tuple[float, ...]
    """Of each auxiliary state as the target gives it."""
    read_rms: tuple[float, ...]
    """Of each state as `fc` reads it, after `norm_before_fc` and `fc_norm`."""
    share: tuple[float, ...]
    fused_rms: float


@torch.inference_mode()
def measure_fusion(drafter: Drafter, aux_TX: Tensor) -> Fusion:
    """Measure the fusion at these tokens."""
    states = drafter.config.num_aux_hidden_states
    aux_TX = aux_TX.to(drafter.fc.weight.dtype)
    read_TX = aux_TX if drafter.input_norm is None else drafter.input_norm(aux_TX)
    parts = list(read_TX.chunk(states, dim=-1))
    if drafter.fc_norm is not None:
        parts = [norm(part) for norm, part in zip(drafter.fc_norm, parts, strict=True)]
    columns = drafter.fc.weight.chunk(states, dim=-1)
    size_AT = torch.stack([functional.linear(x, w).float().norm(dim=-1) for x, w in zip(parts, columns, strict=True)])
    share_A = (size_AT / size_AT.sum(dim=0).clamp(min=1e-30)).mean(dim=1)
    return Fusion(
        state_rms=tuple(float(rms(state).mean()) for state in aux_TX.chunk(states, dim=-1)),
        read_rms=tuple(float(rms(part).mean()) for part in parts),
        share=tuple(share_A.tolist()),
        fused_rms=float(rms(drafter.fuse(aux_TX)).mean()),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class PromptMeasures:
    """Measures of one drafter on one transcript."""

    rounds: Rounds
    mass: dict[str, Array]
    """Attention by region, mean over the walk's rounds [S]."""
    entropy_S: Array
    spread_S: Array
    rms_S: Array
    fusion: Fusion
    outside: int
    """Tokens of the answer outside the draft vocabulary."""
    answer_tokens: int

    def counts(self, depth: int) -> NDArray[np.int64]:
        """Count the rounds of the walk, then those that accepted at least 1, 2, ... drafts [1 + depth]."""
        accepted = np.array(self.rounds.accepted(depth))
        return np.array([(accepted >= level).sum() for level in range(depth + 1)])


def measure_prompt(
    drafter: Drafter, transcript: Transcript, *, depth: int, layer_ids: Sequence[int], sinks: int = SINKS
) -> PromptMeasures | None:
    """Measure a transcript with an attention probe; None where the answer is too short for any round."""
    starts = round_starts(transcript)
    if not starts:
        return None
    # Acceptance comes first: it says which rounds serving starts. Those are then drafted to the end with the probe.
    rounds = run_rounds(drafter, transcript, depth=depth, layer_ids=layer_ids, to_first_miss=True)
    assert rounds is not None
    walked = [starts[place] for place in rounds.walk(depth)]
    start_R = torch.tensor(walked, device=transcript.aux_TX.device)
    probe = AttentionProbe(start_R, prompt_length=transcript.prompt_length, depth=depth, sinks=sinks)
    whole = run_rounds(drafter, transcript, depth=depth, layer_ids=layer_ids, watcher=probe, starts=walked)
    assert whole is not None
    seen = probe.statistics()
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
    """Measures over all prompts."""

    prompts: int
    depth: int
    rounds: int
    offered: list[int]
    """Rounds whose drafts before this depth were all accepted: the denominator of conditional acceptance."""
    mass: dict[str, DepthCurve]
    entropy: DepthCurve
    spread: DepthCurve
    rms: DepthCurve
    conditional: DepthCurve
    joint: DepthCurve
    growth: Estimate
    """Slope of ln(RMS of the fed-back state) by depth: 0 is flat, 0.05 is five per cent more at every depth."""
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
    """Share of the target's answer tokens that cannot be drafted."""


def summarise(measured: Sequence[PromptMeasures], depth: int) -> Drift:
    """Combine the measures of all prompts."""
    counts_PS = np.stack([one.counts(depth) for one in measured]).astype(np.float64)
    total_S = counts_PS.sum(axis=0)
    rms_PS = np.stack([one.rms_S for one in measured])
    confident, hits = zip(*(_offered(one.rounds, depth) for one in measured), strict=True)
    by_depth = [
        calibrate(np.concatenate([c[level] for c in confident]), np.concatenate([h[level] for h in hits])).ece
        for level in range(depth)
    ]
    return Drift(
        prompts=len(measured),
        depth=depth,
        rounds=int(total_S[0]),
        offered=[int(count) for count in total_S[:-1]],
        mass={region: depth_curve(np.stack([one.mass[region] for one in measured])) for region in REGIONS},
        entropy=depth_curve(np.stack([one.entropy_S for one in measured])),
        spread=depth_curve(np.stack([one.spread_S for one in measured])),
        rms=depth_curve(rms_PS),
        conditional=with_wilson(depth_curve(counts_PS, _conditional), total_S[1:], total_S[:-1]),
        joint=with_wilson(depth_curve(counts_PS, _joint), total_S[1:], np.full(depth, total_S[0])),
        growth=depth_curve(np.array([log_sizes(rms_S) for rms_S in rms_PS])).slope,
        length=[
            estimate(np.stack([round_totals(one.rounds, k) for one in measured]), acceptance_length)
            for k in range(1, depth + 1)
        ],
        calibration=calibrate(
            np.concatenate([np.concatenate(c) for c in confident]), np.concatenate([np.concatenate(h) for h in hits])
        ),
        calibration_by_depth=by_depth,
        state_rms=_means([one.fusion.state_rms for one in measured]),
        read_rms=_means([one.fusion.read_rms for one in measured]),
        share=_means([one.fusion.share for one in measured]),
        fused_rms=_means([(one.fusion.fused_rms,) for one in measured])[0],
        outside_share=sum(one.outside for one in measured) / max(1, sum(one.answer_tokens for one in measured)),
    )


def _conditional(counts_PS: Array) -> Array:
    return np.array(conditional_acceptance(counts_PS.sum(axis=0)))


def _joint(counts_PS: Array) -> Array:
    total_S = counts_PS.sum(axis=0)
    return np.asarray(total_S[1:] / max(1.0, total_S[0]))


def round_totals(rounds: Rounds, depth: int) -> Array:
    """Count the rounds of the walk with this depth, and their accepted drafts [2]."""
    accepted = rounds.accepted(depth)
    return np.array([len(accepted), sum(accepted)], dtype=np.float64)


def acceptance_length(totals_P2: Array) -> float:
    """1 + accepted / rounds, pooled over prompts."""
    rounds, accepted = totals_P2.sum(axis=0)
    return float(1 + accepted / max(1.0, rounds))


def _means(rows: Sequence[tuple[float, ...]]) -> list[Estimate]:
    return [estimate(np.array(column), lambda values: float(values.mean())) for column in zip(*rows, strict=True)]


def _offered(rounds: Rounds, depth: int) -> tuple[list[Array], list[NDArray[np.bool_]]]:
    """Confidence and outcome by depth of the drafts whose predecessors were all accepted."""
    walked = rounds.walk(depth)
    alive = np.ones(len(walked), dtype=bool)
    confident, hits = [], []
    for level in range(depth):
        hit = rounds.hit_SR[level, walked]
        confident.append(rounds.confidence_SR[level, walked][alive])
        hits.append(hit[alive])
        alive = alive & hit
    return confident, hits
