"""A server's page of metrics, before and after: what happened between.

eyas and vLLM count the same things under names that differ by a prefix. SGLang tells a running average instead of
counts, which belongs to no run in particular; it is passed on as what it is.
"""

from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from eyas.bench.draft_counts import DraftCounts

PREFIXES = ("eyas_", "vllm:")
RUNNING_AVERAGE = "sglang:spec_accept_length"


@dataclass(frozen=True, kw_only=True)
class Counters:
    """What a server has counted since it started."""

    draft_counts: DraftCounts | None = None
    """None where the server does not count drafts, as vLLM without speculation."""
    generated: int | None = None
    prefix_queries: int = 0
    prefix_hits: int = 0
    running_average: float | None = None

    def since(self, earlier: "Counters") -> "Counters | None":
        """What came on top; None where counts went back, because another process answers now."""
        draft_counts = self.draft_counts
        if draft_counts is not None and earlier.draft_counts is not None:
            draft_counts = draft_counts.since(earlier.draft_counts)
        generated = None if self.generated is None else self.generated - (earlier.generated or 0)
        grown = (
            draft_counts.drafts if draft_counts is not None else 0,
            generated or 0,
            self.prefix_queries - earlier.prefix_queries,
        )
        if min(grown) < 0:
            return None
        return Counters(
            draft_counts=draft_counts,
            generated=generated,
            prefix_queries=self.prefix_queries - earlier.prefix_queries,
            prefix_hits=self.prefix_hits - earlier.prefix_hits,
            running_average=self.running_average,
        )


def read_counters(text: str) -> Counters | None:
    """From Prometheus' text format; None where there is nothing known in it."""
    found: dict[str, float] = {}
    at: dict[int, float] = {}
    try:
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        # eyas tells its counts under vLLM's names too: read them once.
        prefix = next((p for p in PREFIXES if any(sample.name.startswith(p) for sample in samples)), PREFIXES[0])
        for sample in samples:
            name = sample.name.removeprefix(prefix)
            if name == "spec_decode_num_accepted_tokens_per_pos_total":
                position = int(sample.labels["position"])
                at[position] = at.get(position, 0.0) + sample.value  # several engines behind one page
            elif name.endswith("_per_source_total"):
                by_source = f"{sample.labels['source']} {name}"
                found[by_source] = found.get(by_source, 0.0) + sample.value
            elif name != sample.name:
                found[name] = found.get(name, 0.0) + sample.value
            elif name == RUNNING_AVERAGE:
                found[name] = sample.value
    except (ValueError, KeyError):
        return None
    if not found:
        return None
    draft_counts = None
    if "spec_decode_num_drafts_total" in found:
        draft_counts = DraftCounts(
            drafts=int(found["spec_decode_num_drafts_total"]),
            drafted=int(found.get("spec_decode_num_draft_tokens_total", 0)),
            accepted=int(found.get("spec_decode_num_accepted_tokens_total", 0)),
            accepted_at=tuple(int(at.get(position, 0)) for position in range(max(at, default=-1) + 1)),
            suffix_drafted=int(found.get("suffix spec_decode_num_draft_tokens_per_source_total", 0)),
            suffix_accepted=int(found.get("suffix spec_decode_num_accepted_tokens_per_source_total", 0)),
        )
    return Counters(
        draft_counts=draft_counts,
        generated=int(found["generation_tokens_total"]) if "generation_tokens_total" in found else None,
        prefix_queries=int(found.get("prefix_cache_queries_total", 0)),
        prefix_hits=int(found.get("prefix_cache_hits_total", 0)),
        running_average=found.get(RUNNING_AVERAGE),
    )
