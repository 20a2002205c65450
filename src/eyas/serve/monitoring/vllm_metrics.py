"""The metrics that vLLM has too, under its names and labels: for its dashboards, and for `vllm bench serve`."""

from collections.abc import Iterable, Iterator
from typing import Literal

from prometheus_client.metrics_core import Metric

MetricsNames = Literal["eyas", "vllm", "both"]

OWN, VLLM = "eyas_", "vllm:"
SHARED_METRICS = frozenset(
    {
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "prefix_cache_queries",
        "prefix_cache_hits",
        "prompt_tokens",
        "generation_tokens",
        "request_success",
        "request_prompt_tokens",
        "request_generation_tokens",
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "e2e_request_latency_seconds",
        "spec_decode_num_drafts",
        "spec_decode_num_draft_tokens",
        "spec_decode_num_accepted_tokens",
        "spec_decode_num_accepted_tokens_per_pos",
    }
)
"""Names without a prefix and without `_total`."""
IN_TOKENS = frozenset({"prefix_cache_queries", "prefix_cache_hits"})
"""eyas counts blocks here, vLLM the tokens in them."""


def named(metrics: Iterable[Metric], names: MetricsNames, *, model: str, block_size: int) -> Iterator[Metric]:
    """The metrics under these names. What vLLM does not have keeps its own name; `vllm` leaves it out."""
    for metric in metrics:
        if names != "vllm":
            yield metric
        name = metric.name.removeprefix(OWN)
        if names != "eyas" and name in SHARED_METRICS:
            yield _renamed(metric, model, block_size if name in IN_TOKENS else 1)


def _renamed(metric: Metric, model: str, scale: int) -> Metric:
    # One engine, numbered 0 as vLLM numbers it.
    labels = {"model_name": model, "engine": "0"}
    copy = Metric(VLLM + metric.name.removeprefix(OWN), metric.documentation, metric.type)
    for sample in metric.samples:
        value = sample.value if sample.name.endswith("_created") else sample.value * scale
        copy.add_sample(VLLM + sample.name.removeprefix(OWN), labels | sample.labels, value)
    return copy
