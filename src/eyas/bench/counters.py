"""Counts of speculative decoding that servers report: in a response, or on their Prometheus page.

Acceptance length is 1 + accepted / drafts, pooled: tokens per verified draft. Acceptance at a depth is the share of
drafts whose tokens up to that depth were all accepted.

eyas and vLLM use the same metric names with different prefixes. SGLang reports a running average, which belongs to no
particular run; it is passed on as such.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

PREFIXES = ("eyas_", "vllm:")
RUNNING_AVERAGE = "sglang:spec_accept_length"
SCALARS = ("drafts", "drafted", "accepted", "suffix_drafted", "suffix_accepted")


@dataclass(frozen=True, kw_only=True)
class DraftCounts:
    """Drafts, draft tokens, and accepted draft tokens."""

    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_at: tuple[int, ...] = ()
    """Accepted tokens by depth, from depth 1."""
    suffix_drafted: int = 0
    suffix_accepted: int = 0
    """Suffix drafts among these; 0 where a server does not report them."""

    @property
    def length(self) -> float | None:
        """Acceptance length; None without drafts."""
        return 1 + self.accepted / self.drafts if self.drafts else None

    @property
    def by_depth(self) -> tuple[float, ...]:
        return tuple(count / self.drafts for count in self.accepted_at) if self.drafts else ()

    def __add__(self, other: "DraftCounts") -> "DraftCounts":
        return self._combined(other, 1)

    def since(self, earlier: "DraftCounts") -> "DraftCounts":
        return self._combined(earlier, -1)

    def _combined(self, other: "DraftCounts", sign: int) -> "DraftCounts":
        at = zip_longest(self.accepted_at, other.accepted_at, fillvalue=0)
        scalars = {name: getattr(self, name) + sign * getattr(other, name) for name in SCALARS}
        return DraftCounts(**scalars, accepted_at=tuple(a + sign * b for a, b in at))


def pooled(parts: Iterable[DraftCounts | None]) -> DraftCounts | None:
    """Sum of all counts; None if there are none."""
    known = [part for part in parts if part is not None]
    return sum(known, start=DraftCounts()) if known else None


def draft_counts_of_event(event: Mapping[str, Any]) -> DraftCounts | None:
    """Counts of one request in an event of its stream: eyas sends them in `usage`, vLLM (if asked) in `metrics`."""
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
            # The histogram counts drafts with exactly 0, 1, 2, ... accepted tokens; a depth needs at least as many.
            exactly = [int(count) for count in own["acceptance_histogram"]]
            return DraftCounts(
                drafts=int(own["num_spec_steps"]),
                drafted=int(own["num_draft_tokens"]),
                accepted=int(own["num_accepted_draft_tokens"]),
                accepted_at=tuple(sum(exactly[depth:]) for depth in range(1, len(exactly))),
            )
    except (KeyError, TypeError, ValueError):
        return None  # the name means something else here
    return None


@dataclass(frozen=True, kw_only=True)
class Counters:
    """Counters of a server since its start."""

    draft_counts: DraftCounts | None = None
    """None where the server does not count drafts, as vLLM without speculation."""
    generated: int | None = None
    prefix_queries: int = 0
    prefix_hits: int = 0
    running_average: float | None = None

    def since(self, earlier: "Counters") -> "Counters | None":
        """The difference; None where counters shrank, because the server was restarted."""
        draft_counts = self.draft_counts
        if draft_counts is not None and earlier.draft_counts is not None:
            draft_counts = draft_counts.since(earlier.draft_counts)
        generated = None if self.generated is None else self.generated - (earlier.generated or 0)
        queries = self.prefix_queries - earlier.prefix_queries
        if min(draft_counts.drafts if draft_counts is not None else 0, generated or 0, queries) < 0:
            return None
        return Counters(
            draft_counts=draft_counts,
            generated=generated,
            prefix_queries=queries,
            prefix_hits=self.prefix_hits - earlier.prefix_hits,
            running_average=self.running_average,
        )


def read_counters(text: str) -> Counters | None:
    """Parse Prometheus' text format; None if no known metric is in it."""
    found: dict[str, float] = defaultdict(float)
    at: dict[int, float] = defaultdict(float)
    try:
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        # eyas reports its counters under vLLM's names too: read them once.
        prefix = next((p for p in PREFIXES if any(sample.name.startswith(p) for sample in samples)), PREFIXES[0])
        for sample in samples:
            name = sample.name.removeprefix(prefix)
            if name == "spec_decode_num_accepted_tokens_per_pos_total":
                at[int(sample.labels["position"])] += sample.value  # one page may serve several engines
            elif name.endswith("_per_source_total"):
                found[f"{sample.labels['source']} {name}"] += sample.value
            elif name != sample.name:
                found[name] += sample.value
            elif name == RUNNING_AVERAGE:
                found[name] = sample.value
    except (ValueError, KeyError):
        return None
    if not found:
        return None

    def count(name: str) -> int:
        return int(found.get(f"{name}_total", 0))

    draft_counts = None
    if "spec_decode_num_drafts_total" in found:
        draft_counts = DraftCounts(
            drafts=count("spec_decode_num_drafts"),
            drafted=count("spec_decode_num_draft_tokens"),
            accepted=count("spec_decode_num_accepted_tokens"),
            accepted_at=tuple(int(at[position]) for position in range(max(at, default=-1) + 1)),
            suffix_drafted=count("suffix spec_decode_num_draft_tokens_per_source"),
            suffix_accepted=count("suffix spec_decode_num_accepted_tokens_per_source"),
        )
    return Counters(
        draft_counts=draft_counts,
        generated=count("generation_tokens") if "generation_tokens_total" in found else None,
        prefix_queries=count("prefix_cache_queries"),
        prefix_hits=count("prefix_cache_hits"),
        running_average=found.get(RUNNING_AVERAGE),
    )
