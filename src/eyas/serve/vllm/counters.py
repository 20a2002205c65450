"""Reads vLLM's metrics as an engine snapshot; replicas are added up."""

from collections import defaultdict
from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

from eyas.engine.output import SpecDecodeStats
from eyas.serve.engine_client import EngineSnapshot

PREFIX = "vllm:"
PER_POSITION = "spec_decode_num_accepted_tokens_per_pos_total"


def read_snapshot(text: str) -> EngineSnapshot:
    """Read a snapshot from Prometheus' text format."""
    sums: dict[str, float] = defaultdict(float)
    positions: dict[int, float] = defaultdict(float)
    block_size, engines, used = 1, 0, 0.0
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name.removeprefix(PREFIX)
            if name == "cache_config_info":
                engines += 1
                block_size = _number(sample.labels, "block_size", 1)
                blocks = _number(sample.labels, "num_gpu_blocks", 0)
                sums["blocks"] += blocks
            elif name == PER_POSITION:
                positions[int(sample.labels["position"])] += sample.value
            elif name == "kv_cache_usage_perc":
                used += sample.value
            elif name != sample.name:
                sums[name] += sample.value
    accepted_at = [int(positions[position]) for position in sorted(positions)]
    while accepted_at and not accepted_at[-1]:
        accepted_at.pop()
    tokens, accepted = int(sums["generation_tokens_total"]), int(sums["spec_decode_num_accepted_tokens_total"])
    drafts = int(sums["spec_decode_num_drafts_total"])
    return EngineSnapshot(
        running=int(sums["num_requests_running"]),
        waiting=int(sums["num_requests_waiting"]),
        blocks=int(sums["blocks"]),
        block_size=block_size,
        blocks_used=round(used / max(1, engines) * sums["blocks"]),
        prefix_lookups=int(sums["prefix_cache_queries_total"]) // block_size,  # vLLM counts tokens, not blocks
        prefix_hits=int(sums["prefix_cache_hits_total"]) // block_size,
        stats=SpecDecodeStats(
            passes=max(drafts, tokens - accepted),
            drafts=drafts,
            drafted=int(sums["spec_decode_num_draft_tokens_total"]),
            accepted=accepted,
            accepted_at=accepted_at,
            tokens=tokens,
        ),
    )


def _number(labels: Mapping[str, str], name: str, otherwise: int) -> int:
    given = labels.get(name, "")
    return int(given) if given.isdigit() else otherwise
