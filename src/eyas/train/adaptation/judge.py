"""Whether a drafter became better: both walk the rounds of the same answers, and conversations are drawn anew.

Acceptance lengths of two drafters on one text are paired: a conversation that is easy is so for both. What is told is
after / before - 1 with a percentile bootstrap over conversations, seeded, so that the same answers give the same word.

Shapes: P conversations, S depths, B draws; C counts of a conversation: its rounds, then those that accept each depth.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from eyas.drafter.drift import Estimate, conditional_acceptance, plain
from eyas.drafter.model import Drafter
from eyas.target.facts import TargetFacts
from eyas.train.corpus.corpus import Corpus
from eyas.train.corpus_hits import hits_of_corpus
from eyas.train.estimate import RoundCounts, walk_answers
from eyas.train.features import OpenSource

LEVEL = 0.95
DRAWS = 4000
SEED = 11

Counts = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class AcceptanceChange:
    """What became of the acceptance length on some conversations."""

    conversations: int
    before: RoundCounts
    after: RoundCounts
    gain: Estimate
    """after / before - 1 of the acceptance lengths, and where it may lie."""

    def as_json(self) -> dict[str, Any]:
        """For the record."""
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
    """Walk the rounds of every drafter through a corpus: counts [P, C] of each conversation."""
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
    """Hold the same conversations against each other."""
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
    """Tokens per verification."""
    lengths: NDArray[np.float64] = 1 + counts[..., 1:].sum(axis=-1) / np.maximum(1, counts[..., 0])
    return lengths


def _counts(counts_C: Counts) -> RoundCounts:
    rounds, *accepted_at = counts_C.tolist()
    return RoundCounts(rounds=rounds, accepted_at=tuple(accepted_at))


def _as_json(counts: RoundCounts) -> dict[str, Any]:
    return {
        "acceptance_length": plain(counts.acceptance_length),
        "rounds": counts.rounds,
        "accepted_at": list(counts.accepted_at),
        "conditional": [plain(share) for share in conditional_acceptance([counts.rounds, *counts.accepted_at])],
    }
