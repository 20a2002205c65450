"""Counts of speculation, wherever a server tells them: in an answer, or on its page of metrics.

Acceptance length is 1 + accepted / drafts, pooled: the tokens that one verified draft yields. Acceptance at a depth is
the share of drafts whose token there was accepted together with all before it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any


@dataclass(frozen=True, kw_only=True)
class DraftCounts:
    """How often was drafted, and with what success."""

    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_at: tuple[int, ...] = ()
    """Accepted tokens by depth, the first depth first."""
    suffix_drafted: int = 0
    suffix_accepted: int = 0
    """Of these, suffix drafts; 0 where a server does not tell."""

    @property
    def length(self) -> float | None:
        """Tokens per verified draft; None where nothing was drafted."""
        return 1 + self.accepted / self.drafts if self.drafts else None

    @property
    def by_depth(self) -> tuple[float, ...]:
        """Share of drafts accepted as deep as this."""
        return tuple(count / self.drafts for count in self.accepted_at) if self.drafts else ()

    def __add__(self, other: "DraftCounts") -> "DraftCounts":
        return DraftCounts(
            drafts=self.drafts + other.drafts,
            drafted=self.drafted + other.drafted,
            accepted=self.accepted + other.accepted,
            accepted_at=tuple(a + b for a, b in zip_longest(self.accepted_at, other.accepted_at, fillvalue=0)),
            suffix_drafted=self.suffix_drafted + other.suffix_drafted,
            suffix_accepted=self.suffix_accepted + other.suffix_accepted,
        )

    def since(self, earlier: "DraftCounts") -> "DraftCounts":
        """What came on top."""
        return DraftCounts(
            drafts=self.drafts - earlier.drafts,
            drafted=self.drafted - earlier.drafted,
            accepted=self.accepted - earlier.accepted,
            accepted_at=tuple(a - b for a, b in zip_longest(self.accepted_at, earlier.accepted_at, fillvalue=0)),
            suffix_drafted=self.suffix_drafted - earlier.suffix_drafted,
            suffix_accepted=self.suffix_accepted - earlier.suffix_accepted,
        )


def pooled(parts: Iterable[DraftCounts | None]) -> DraftCounts | None:
    """All together; None where nobody told."""
    told = [part for part in parts if part is not None]
    return sum(told, start=DraftCounts()) if told else None


def draft_counts_of_event(event: Mapping[str, Any]) -> DraftCounts | None:
    """What the event of a stream tells about its request: eyas in `usage`, vLLM in `metrics` where it was told to."""
    usage, metrics = event.get("usage"), event.get("metrics")
    try:
        if isinstance(usage, dict) and isinstance(own := usage.get("speculative"), dict):
            return DraftCounts(
                drafts=int(own["drafts"]),
                drafted=int(own["drafted_tokens"]),
                accepted=int(own["accepted_tokens"]),
                accepted_at=tuple(int(count) for count in own["accepted_by_depth"]),
                suffix_drafted=int(own.get("suffix_drafted_tokens", 0)),
                suffix_accepted=int(own.get("suffix_accepted_tokens", 0)),
            )
        if isinstance(metrics, dict) and isinstance(own := metrics.get("speculative_decoding"), dict):
            # How many drafts had exactly 0, 1, 2, ... tokens accepted: at least as many is what a depth counts.
            exactly = [int(count) for count in own["acceptance_histogram"]]
            return DraftCounts(
                drafts=int(own["num_spec_steps"]),
                drafted=int(own["num_draft_tokens"]),
                accepted=int(own["num_accepted_draft_tokens"]),
                accepted_at=tuple(sum(exactly[depth:]) for depth in range(1, len(exactly))),
            )
    except (KeyError, TypeError, ValueError):
        return None  # another meaning of the same name
    return None
