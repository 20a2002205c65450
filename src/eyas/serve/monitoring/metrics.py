"""Prometheus metrics. Names are vLLM's with `eyas_` for `vllm:`; metrics that vLLM has too also come under its name.

`EngineCollector` reads the engine's counts on each scrape. `ServerMetrics` counts what only the server knows, such as
latencies and outcomes, as it happens.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from eyas.engine.speculation.drift import DriftReport
from eyas.serve.engine_client import EngineSnapshot

MetricsNames = Literal["eyas", "vllm", "both"]
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
TTFT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60)
ITL_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5)
E2E_BUCKETS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 300, 600)
TOKEN_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000)
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
"""Metrics that vLLM has too: names without a prefix and without `_total`."""
IN_TOKENS = frozenset({"prefix_cache_queries", "prefix_cache_hits"})
"""Metrics that count blocks here and tokens in vLLM."""


class ServerMetrics:
    """Counters and histograms of one server."""

    def __init__(self, model: str, names: MetricsNames = "both") -> None:
        self._model, self._names = model, names
        self.registry = CollectorRegistry()
        self.engine = EngineCollector()
        self.registry.register(self.engine)
        counter, gauge = partial(Counter, registry=self.registry), partial(Gauge, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry)
        self.requests = counter(
            "eyas_requests",
            "Requests by outcome: stop, length, a status, disconnected, or an error code.",
            ["endpoint", "outcome"],
        )
        self.errors = counter("eyas_errors", "Errors sent to clients by status, those inside a stream too.", ["status"])
        self.in_flight = gauge("eyas_answers_in_flight", "Answers accepted, waiting or running.")
        self.connections = gauge("eyas_connections", "Open connections.")
        self.connections_refused = counter(
            "eyas_connections_refused",
            "Connections ended before a route saw a request: too many, too slow, or no HTTP.",
            ["code"],
        )
        self.prompt_tokens = counter("eyas_prompt_tokens", "Prompt tokens accepted.")
        self.request_success = counter(
            "eyas_request_success",
            "Answers that ended, by why: stop, length, error, or abort if the request ended first.",
            ["finished_reason"],
        )
        self.request_prompt_tokens = histogram(
            "eyas_request_prompt_tokens", "Prompt tokens of a request.", buckets=TOKEN_BUCKETS
        )
        self.request_generation_tokens = histogram(
            "eyas_request_generation_tokens", "Tokens of an answer.", buckets=TOKEN_BUCKETS
        )
        self.time_to_first_token = histogram(
            "eyas_time_to_first_token_seconds", "Time to first token.", buckets=TTFT_BUCKETS
        )
        self.inter_token_latency = histogram(
            "eyas_inter_token_latency_seconds",
            "Time between tokens; tokens of one step share their time.",
            buckets=ITL_BUCKETS,
        )
        self.e2e_latency = histogram(
            "eyas_e2e_request_latency_seconds", "End-to-end request latency.", buckets=E2E_BUCKETS
        )
        self.swaps = counter("eyas_drafter_swaps", "Drafter swaps while serving.")
        self.learn_answers = counter(
            "eyas_learn_answers",
            "Answers to learn from: collected, or dropped since they could not be written.",
            ["outcome"],
        )
        for outcome in ("collected", "dropped"):
            self.learn_answers.labels(outcome)
        self.learn_bytes = gauge("eyas_learn_bytes", "Bytes of answers to learn from.")
        self.learn_paused = gauge("eyas_learn_paused", "1 while answers to learn from cannot be written.")
        self.learn_attempts = counter(
            "eyas_learn_attempts",
            "Adaptations: better, not_better, failed, refused though better, superseded by a drafter asked for.",
            ["outcome"],
        )
        self.learn_swaps = counter("eyas_learn_swaps", "Changes of drafter by the learner: swap or rollback.", ["kind"])
        self.learn_new_answers = gauge("eyas_learn_new_answers", "Answers that no adaptation has learnt from.")
        self.learn_running = gauge("eyas_learn_running", "1 while an adaptation runs.")
        self.learn_drafter = gauge("eyas_learn_drafter", "The learnt drafter at work; 0: the one of the start.")
        self._drafter = gauge("eyas_drafter_info", "The drafter in use.", ["drafter"])
        gauge("eyas_model_info", "What is served.", ["model_name"]).labels(model).set(1)

    def set_drafter(self, name: str | None) -> None:
        """Set the name of the drafter in use."""
        self._drafter.clear()
        self._drafter.labels(name or "none").set(1)

    def render(self, snapshot: EngineSnapshot) -> bytes:
        """All metrics in Prometheus' text format, under the names that the operator chose."""
        self.engine.snapshot = snapshot
        renamed = CollectorRegistry()
        renamed.register(_Renamed(self.registry, self._names, self._model, snapshot.block_size))
        return generate_latest(renamed)


class _Renamed(Collector):
    """The metrics of a registry under other names. `vllm` leaves out what vLLM does not have."""

    def __init__(self, registry: CollectorRegistry, names: MetricsNames, model: str, block_size: int) -> None:
        self._registry, self._names, self._block_size = registry, names, block_size
        self._labels = {"model_name": model, "engine": "0"}  # one engine, numbered as in vLLM

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            if self._names != "vllm":
                yield metric
            name = metric.name.removeprefix(OWN)
            if self._names != "eyas" and name in SHARED_METRICS:
                scale = self._block_size if name in IN_TOKENS else 1
                copy = Metric(VLLM + name, metric.documentation, metric.type)
                for sample in metric.samples:
                    value = sample.value if sample.name.endswith("_created") else sample.value * scale
                    copy.add_sample(VLLM + sample.name.removeprefix(OWN), self._labels | sample.labels, value)
                yield copy


class EngineCollector(Collector):
    """The engine's counts, from the newest snapshot."""

    def __init__(self) -> None:
        self.snapshot = EngineSnapshot()

    def collect(self) -> Iterator[Metric]:
        snapshot, stats = self.snapshot, self.snapshot.stats
        yield _gauge("num_requests_running", "Answers that hold KV blocks.", snapshot.running)
        yield _gauge("num_requests_waiting", "Answers that wait for KV blocks.", snapshot.waiting)
        yield _gauge("kv_blocks", "KV blocks in all.", snapshot.blocks)
        yield _gauge("kv_blocks_used", "KV blocks that running answers hold.", snapshot.blocks_used)
        yield _gauge("kv_blocks_cached", "Free KV blocks that the prefix cache can still use.", snapshot.blocks_cached)
        usage = snapshot.blocks_used / max(1, snapshot.blocks)
        yield _gauge("kv_cache_usage_perc", "Share of KV blocks used, 1 is all.", usage)
        yield _counter("prefix_cache_queries", "KV blocks looked up in the prefix cache.", snapshot.prefix_lookups)
        yield _counter("prefix_cache_hits", "KV blocks found there.", snapshot.prefix_hits)
        yield _counter("generation_tokens", "Tokens generated.", stats.tokens)
        yield _counter("target_passes", "Target passes that chose tokens, per answer.", stats.passes)
        yield _counter("spec_decode_num_drafts", "Drafts verified.", stats.drafts)
        yield _counter("spec_decode_num_draft_tokens", "Tokens drafted and verified.", stats.drafted)
        yield _counter("spec_decode_num_accepted_tokens", "Drafted tokens accepted.", stats.accepted)
        for name, words, total, suffix in (
            ("draft_tokens", "Tokens drafted and verified", stats.drafted, stats.suffix_drafted),
            ("accepted_tokens", "Drafted tokens accepted", stats.accepted, stats.suffix_accepted),
        ):
            by_source = {("drafter",): total - suffix, ("suffix",): suffix}
            name = f"spec_decode_num_{name}_per_source"
            yield _labelled(CounterMetricFamily, name, f"{words}, by who drafted them.", ["source"], by_source)
        yield _labelled(
            CounterMetricFamily,
            "spec_decode_num_accepted_tokens_per_pos",
            "Accepted by position, 0 is the first.",
            ["position"],
            {(position,): count for position, count in enumerate(stats.accepted_at)},
        )
        length = stats.acceptance_length
        yield _gauge("spec_decode_acceptance_length", "Tokens per verified draft since the start.", length)
        yield _labelled(
            GaugeMetricFamily,
            "spec_decode_chosen_depth_share",
            "Share of steps that the drafter drafted this deep, 0 is not at all; suffix drafts are counted by source.",
            ["depth"],
            {(depth,): share for depth, share in snapshot.depth_shares.items()},
        )
        yield _gauge("spec_decode_collapsed", "1 while the drafter is of no use.", float(snapshot.collapsed))
        if snapshot.drift is not None:
            yield from _drift(snapshot.drift)
        yield _counter("engine_failed_steps", "Steps that failed.", snapshot.failed_steps)
        yield _counter("engine_replaced", "Engines that were replaced.", snapshot.replaced)


def _drift(drift: DriftReport) -> Iterator[Metric]:
    """Metrics of the drift probe, for the current engine."""
    yield _gauge("drift_alarm", "1 while the drift alarm fires.", float(drift.firing))
    yield _counter("drift_alarms_fired", "Times it has fired.", drift.fired)
    yield _gauge("drift_deepest_healthy", "The deepest that requests on auto draft.", drift.deepest)
    yield _counter("drift_checkups", "Rounds that were probed.", drift.checkups)
    yield _counter("drift_checkup_seconds", "Seconds spent on check-ups.", drift.seconds)
    if drift.checkups:
        yield _gauge("drift_growth", "Growth of the fed-back state per depth, 0 is flat.", drift.growth.value)
    rms = {(depth,): size for depth, size in enumerate(drift.rms, 1)}
    words = "Size of the fed-back state, latest check-ups."
    yield _labelled(GaugeMetricFamily, "drift_state_rms", words, ["depth"], rms)
    mass = {(region, depth): share for region, shares in drift.mass.items() for depth, share in enumerate(shares, 1)}
    words = "Attention mass of the drafter by region, latest check-ups."
    yield _labelled(GaugeMetricFamily, "drift_attention_mass", words, ["region", "depth"], mass)


def _gauge(name: str, description: str, value: float) -> Metric:
    return GaugeMetricFamily(OWN + name, description, value=value)


def _counter(name: str, description: str, value: float) -> Metric:
    return CounterMetricFamily(OWN + name, description, value=value)


def _labelled(
    family: type[GaugeMetricFamily] | type[CounterMetricFamily],
    name: str,
    description: str,
    labels: Sequence[str],
    values: Mapping[Any, float],
) -> Metric:
    """A metric with labels; the keys of `values` are tuples of their values."""
    metric = family(OWN + name, description, labels=labels)
    for parts, value in values.items():
        metric.add_metric([str(part) for part in parts], value)
    return metric
