"""Judgement of an adaptation: whether the drafter became better, and whether it is kept.

Old and new drafter walk the rounds of the same answers. Their acceptance lengths are paired, since a conversation that
is easy for one is easy for the other. The gain is after / before - 1, with a percentile bootstrap over conversations;
it is seeded, so the same answers give the same verdict.

Shapes: P conversations, S depths, B draws; C counts of a conversation: its rounds, then those that accept each depth.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from eyas.drafter.checkpoint import Checkpoint, read_checkpoint
from eyas.drafter.drift import Estimate, conditional_acceptance, plain
from eyas.drafter.model import Drafter
from eyas.target.facts import TargetFacts
from eyas.train.corpus.corpus import Corpus
from eyas.train.estimate import RoundCounts, hits_of_corpus, walk_answers
from eyas.train.features import OpenSource

LEVEL = 0.95
DRAWS = 4000
SEED = 11
TRAFFIC, REPLAY = "traffic", "replay"
MAX_LOSS = 0.02
"""Share of the acceptance length on replayed conversations that may be lost."""

Counts = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class AcceptanceChange:
    """Change of the acceptance length on some conversations."""

    conversations: int
    before: RoundCounts
    after: RoundCounts
    gain: Estimate
    """after / before - 1 of the acceptance lengths, with its interval."""

    def as_json(self) -> dict[str, Any]:
        return {
            "conversations": self.conversations,
            "before": _as_json(self.before),
            "after": _as_json(self.after),
            "gain": self.gain.as_json(),
        }


def walk_conversations(
    drafters: Mapping[str, Drafter],
    facts: TargetFacts,
    open_source: OpenSource,
    corpus: Corpus,
    *,
    depth: int,
    pack_length: int,
    chunk: int,
    device: torch.device,
) -> dict[str, Counts]:
    """Walk the rounds of each drafter through a corpus: counts [P, C] of each conversation."""
    layer_ids = {name: drafter.config.layers_read(facts) for name, drafter in drafters.items()}
    source = open_source(sorted({k for ids in layer_ids.values() for k in ids}), compiled=False)
    conversations, place = np.unique(corpus.owners, return_inverse=True)
    found = {name: np.zeros((len(conversations), 1 + depth), dtype=np.int64) for name in drafters}
    packs = hits_of_corpus(
        drafters, layer_ids, source, corpus, depths=depth, pack_length=pack_length, chunk=chunk, device=device
    )
    for batch, hits in packs:
        assert batch.documents is not None
        row_M, starts = batch.row_M.cpu().numpy(), batch.starts.cpu().numpy()
        for name, hit_SM in hits.items():
            for first, counts in walk_answers(batch, hit_SM):
                document = batch.documents[int(np.searchsorted(starts, row_M[first], side="right")) - 1]
                found[name][place[document]] += (counts.rounds, *counts.accepted_at)
    return found


def compare(before_PC: Counts, after_PC: Counts) -> AcceptanceChange:
    """Compare two drafters on the same conversations."""
    prompts = len(before_PC)
    drawn_BP = np.random.default_rng(SEED).multinomial(prompts, np.full(prompts, 1 / prompts), size=DRAWS)
    gain_B = _length(drawn_BP @ after_PC) / _length(drawn_BP @ before_PC) - 1
    low, high = np.quantile(gain_B, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    before_C, after_C = before_PC.sum(axis=0), after_PC.sum(axis=0)
    return AcceptanceChange(
        conversations=prompts,
        before=_counts(before_C),
        after=_counts(after_C),
        gain=Estimate(value=float(_length(after_C) / _length(before_C) - 1), low=float(low), high=float(high)),
    )


def _length(counts: Counts) -> NDArray[np.float64]:
    lengths: NDArray[np.float64] = 1 + counts[..., 1:].sum(axis=-1) / np.maximum(1, counts[..., 0])
    return lengths


def _counts(counts_C: Counts) -> RoundCounts:
    rounds, *accepted_at = counts_C.tolist()
    return RoundCounts(rounds=rounds, accepted_at=tuple(accepted_at))


def _as_json(counts: RoundCounts) -> dict[str, Any]:
    shares = conditional_acceptance([counts.rounds, *counts.accepted_at])
    conditional = [plain(share) for share in shares]
    return {**counts.as_json(), "acceptance_length": plain(counts.acceptance_length), "conditional": conditional}


@dataclass(frozen=True, kw_only=True)
class AdaptationVerdict:
    """Decision whether the new drafter replaces the old one."""

    kept: bool
    text: str


def decide_adaptation(changes: Mapping[str, AcceptanceChange], max_loss: float = MAX_LOSS) -> AdaptationVerdict:
    """Keep a drafter if its whole interval on the traffic is above zero and it loses little elsewhere."""
    gain = changes[TRAFFIC].gain
    found = f"{gain.value:+.1%} on {changes[TRAFFIC].conversations} held-out conversations ({interval_of(gain)})"
    if gain.low <= 0:
        why = "worse" if gain.high < 0 else "not better beyond the interval"
        return AdaptationVerdict(kept=False, text=f"the old drafter stays: the new one is {why}, {found}")
    if (other := changes.get(REPLAY)) is not None and other.gain.value < -max_loss:
        return AdaptationVerdict(
            kept=False,
            text=f"the old drafter stays: the new one is better, {found}, but forgets: {other.gain.value:+.1%} on "
            f"{other.conversations} replayed ones ({interval_of(other.gain)}), and a loss of {max_loss:.1%} is "
            "the limit",
        )
    elsewhere = "" if other is None else f"; {other.gain.value:+.1%} on replayed ones ({interval_of(other.gain)})"
    return AdaptationVerdict(kept=True, text=f"the new drafter is better: {found}{elsewhere}")


def interval_of(estimate: Any) -> str:
    """Interval of an estimate, as text."""
    return f"{estimate.low:+.1%} to {estimate.high:+.1%}"


def as_stored_like(trained: Path, start: str) -> Checkpoint:
    """Trained drafter in the precision of the checkpoint it started from."""
    checkpoint, dtype = read_checkpoint(str(trained)), read_checkpoint(start).config.dtype
    to = getattr(torch, dtype)
    tensors = {name: t.to(to) if t.is_floating_point() else t for name, t in checkpoint.tensors.items()}
    return replace(checkpoint, tensors=tensors, config=replace(checkpoint.config, dtype=dtype), folder=None)
