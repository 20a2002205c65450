"""A server's page of metrics, before and after: what happened between.

eyas and vLLM count the same things under names that differ by a prefix. SGLang tells a running average instead of
counts, which belongs to no run in particular; it is passed on as what it is.
"""

from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from eyas.bench.drafting import Drafting

PREFIXES = ("eyas_", "vllm:")
RUNNING_AVERAGE = "sglang:spec_accept_length"


@dataclass(frozen=True, kw_only=True)
class Counters:
    """What a server has counted since it started."""

    drafting: Drafting | None = None
    """None where the server does not count drafts, as vLLM without speculation."""
    generated: int | None = None
    prefix_asked: int = 0
    prefix_found: int = 0
    running_average: float | None = None

    def since(self, earlier: "Counters") -> "Counters | None":
        """What came on top; None where counts went back, because another process answers now."""
        drafting = self.drafting
        if drafting is not None and earlier.drafting is not None:
            drafting = drafting.since(earlier.drafting)
        generated = None if self.generated is None else self.generated - (earlier.generated or 0)
        grown = (
            drafting.drafts if drafting is not None else 0,
            generated or 0,
            self.prefix_asked - earlier.prefix_asked,
        )
        if min(grown) < 0:
            return None
        return Counters(
            drafting=drafting,
            generated=generated,
            prefix_asked=self.prefix_asked - earlier.prefix_asked,
            prefix_found=self.prefix_found - earlier.prefix_found,
            running_average=self.running_average,
        )

    @property
    def prefix_share(self) -> float | None:
        """Of what was looked for in the prefix cache, how much was found."""
        return self.prefix_found / self.prefix_asked if self.prefix_asked else None


def read_counters(text: str) -> Counters | None:
    """From Prometheus' text format; None where there is nothing known in it."""
    found: dict[str, float] = {}
    at: dict[int, float] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                name = next((sample.name.removeprefix(p) for p in PREFIXES if sample.name.startswith(p)), sample.name)
                if name == "spec_decode_num_accepted_tokens_per_pos_total":
                    position = int(sample.labels["position"])
                    at[position] = at.get(position, 0.0) + sample.value  # several engines behind one page
                elif name == sample.name:
                    if name == RUNNING_AVERAGE:
                        found[name] = sample.value
                else:
                    found[name] = found.get(name, 0.0) + sample.value
    except (ValueError, KeyError):
        return None
    if not found:
        return None
    drafting = None
    if "spec_decode_num_drafts_total" in found:
        drafting = Drafting(
            drafts=int(found["spec_decode_num_drafts_total"]),
            drafted=int(found.get("spec_decode_num_draft_tokens_total", 0)),
            accepted=int(found.get("spec_decode_num_accepted_tokens_total", 0)),
            accepted_at=tuple(int(at.get(position, 0)) for position in range(max(at, default=-1) + 1)),
        )
    return Counters(
        drafting=drafting,
        generated=int(found["generation_tokens_total"]) if "generation_tokens_total" in found else None,
        prefix_asked=int(found.get("prefix_cache_queries_total", 0)),
        prefix_found=int(found.get("prefix_cache_hits_total", 0)),
        running_average=found.get(RUNNING_AVERAGE),
    )
