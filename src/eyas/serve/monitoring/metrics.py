"""Prometheus metrics. Names are vLLM's with `eyas_` for `vllm:`; `vllm_metrics` also tells them under vLLM's own.

`EngineCollector` reads the engine's counts on each scrape. `ServerMetrics` counts what only the server knows, such as
latencies and outcomes, as it happens.
"""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from eyas.engine.output import SpecDecodeStats
from eyas.engine.speculation.drift import DriftReport
from eyas.serve.engine_client import EngineSnapshot
from eyas.serve.monitoring.vllm_metrics import MetricsNames, named

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
TTFT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60)
ITL_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5)
E2E_BUCKETS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 300, 600)
TOKEN_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000)


class ServerMetrics:
    """Counters and histograms of one server."""

    def __init__(self, model: str, names: MetricsNames = "both") -> None:
        self._model, self._names = model, names
        self.registry = CollectorRegistry()
        self.engine = EngineCollector()
        self.registry.register(self.engine)
        self.requests = Counter(
            "eyas_requests",
            "Requests by outcome: stop, length, a status, disconnected, or an error code.",
            ["endpoint", "outcome"],
            registry=self.registry,
        )
        self.errors = Counter(
            "eyas_errors",
            "Errors sent to clients by status, those inside a stream too.",
            ["status"],
            registry=self.registry,
        )
        self.in_flight = Gauge(
            "eyas_answers_in_flight", "Answers accepted, waiting or running.", registry=self.registry
        )
        self.connections = Gauge("eyas_connections", "Open connections.", registry=self.registry)
        self.connections_refused = Counter(
            "eyas_connections_refused",
            "Connections ended before a route saw a request: too many, too slow, or no HTTP.",
            ["code"],
            registry=self.registry,
        )
        self.prompt_tokens = Counter("eyas_prompt_tokens", "Prompt tokens accepted.", registry=self.registry)
        self.request_success = Counter(
            "eyas_request_success",
            "Answers that ended, by why: stop, length, error, or abort if the request ended first.",
            ["finished_reason"],
            registry=self.registry,
        )
        self.request_prompt_tokens = self._histogram(
            "eyas_request_prompt_tokens", "Prompt tokens of a request.", TOKEN_BUCKETS
        )
        self.request_generation_tokens = self._histogram(
            "eyas_request_generation_tokens", "Tokens of an answer.", TOKEN_BUCKETS
        )
        self.time_to_first_token = self._histogram(
            "eyas_time_to_first_token_seconds", "Time to first token.", TTFT_BUCKETS
        )
        self.inter_token_latency = self._histogram(
            "eyas_inter_token_latency_seconds",
            "Time between tokens; tokens of one step share their time.",
            ITL_BUCKETS,
        )
        self.e2e_latency = self._histogram(
            "eyas_e2e_request_latency_seconds", "End-to-end request latency.", E2E_BUCKETS
        )
        self.swaps = Counter("eyas_drafter_swaps", "Drafter swaps while serving.", registry=self.registry)
        self.learn_answers = Counter(
            "eyas_learn_answers",
            "Answers to learn from: collected, or dropped since they could not be written.",
            ["outcome"],
            registry=self.registry,
        )
        for outcome in ("collected", "dropped"):
            self.learn_answers.labels(outcome)
        self.learn_bytes = Gauge("eyas_learn_bytes", "Bytes of answers to learn from.", registry=self.registry)
        self.learn_paused = Gauge(
            "eyas_learn_paused", "1 while answers to learn from cannot be written.", registry=self.registry
        )
        self.learn_attempts = Counter(
            "eyas_learn_attempts",
            "Adaptations: better, not_better, failed, refused though better, superseded by a drafter asked for.",
            ["outcome"],
            registry=self.registry,
        )
        self.learn_swaps = Counter(
            "eyas_learn_swaps", "Changes of drafter by the learner: swap or rollback.", ["kind"], registry=self.registry
        )
        self.learn_new_answers = Gauge(
            "eyas_learn_new_answers", "Answers that no adaptation has learnt from.", registry=self.registry
        )
        self.learn_running = Gauge("eyas_learn_running", "1 while an adaptation runs.", registry=self.registry)
        self.learn_drafter = Gauge(
            "eyas_learn_drafter", "The learnt drafter at work; 0: the one of the start.", registry=self.registry
        )
        self._drafter = Gauge("eyas_drafter_info", "The drafter in use.", ["drafter"], registry=self.registry)
        Gauge("eyas_model_info", "What is served.", ["model_name"], registry=self.registry).labels(model).set(1)

    def set_drafter(self, name: str | None) -> None:
        """Set the name of the drafter in use."""
        self._drafter.clear()
        self._drafter.labels(name or "none").set(1)

    def _histogram(self, name: str, description: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, description, buckets=buckets, registry=self.registry)

    def render(self, snapshot: EngineSnapshot) -> bytes:
        """All metrics in Prometheus' text format."""
        self.engine.snapshot = snapshot
        renamed = CollectorRegistry()
        renamed.register(_Renamed(self.registry, self._names, self._model, snapshot.block_size))
        return generate_latest(renamed)


class _Renamed(Collector):
    """All metrics of a registry under the names that the operator chose."""

    def __init__(self, registry: CollectorRegistry, names: MetricsNames, model: str, block_size: int) -> None:
        self._registry, self._names, self._model, self._block_size = registry, names, model, block_size

    def collect(self) -> Iterator[Metric]:
        """The metrics."""
        return named(self._registry.collect(), self._names, model=self._model, block_size=self._block_size)


class EngineCollector(Collector):
    """The engine's counts, from the newest snapshot."""

    def __init__(self) -> None:
        self.snapshot = EngineSnapshot()

    def collect(self) -> Iterator[Metric]:
        """All metrics of the engine."""
        snapshot, stats = self.snapshot, self.snapshot.stats
        yield _gauge("eyas_num_requests_running", "Answers that hold KV blocks.", snapshot.running)
        yield _gauge("eyas_num_requests_waiting", "Answers that wait for KV blocks.", snapshot.waiting)
        yield _gauge("eyas_kv_blocks", "KV blocks in all.", snapshot.blocks)
        yield _gauge("eyas_kv_blocks_used", "KV blocks that running answers hold.", snapshot.blocks_used)
        yield _gauge(
            "eyas_kv_blocks_cached", "Free KV blocks that the prefix cache can still use.", snapshot.blocks_cached
        )
        yield _gauge(
            "eyas_kv_cache_usage_perc",
            "Share of KV blocks used, 1 is all.",
            snapshot.blocks_used / max(1, snapshot.blocks),
        )
        yield _counter("eyas_prefix_cache_queries", "KV blocks looked up in the prefix cache.", snapshot.prefix_lookups)
        yield _counter("eyas_prefix_cache_hits", "KV blocks found there.", snapshot.prefix_hits)
        yield _counter("eyas_generation_tokens", "Tokens generated.", stats.tokens)
        yield _counter("eyas_target_passes", "Target passes that chose tokens, per answer.", stats.passes)
        yield _counter("eyas_spec_decode_num_drafts", "Drafts verified.", stats.drafts)
        yield _counter("eyas_spec_decode_num_draft_tokens", "Tokens drafted and verified.", stats.drafted)
        yield _counter("eyas_spec_decode_num_accepted_tokens", "Drafted tokens accepted.", stats.accepted)
        yield from _by_source(stats)
        by_depth = CounterMetricFamily(
            "eyas_spec_decode_num_accepted_tokens_per_pos", "Accepted by position, 0 is the first.", labels=["position"]
        )
        for position, count in enumerate(stats.accepted_at):
            by_depth.add_metric([str(position)], count)
        yield by_depth
        yield _gauge(
            "eyas_spec_decode_acceptance_length", "Tokens per verified draft since the start.", stats.acceptance_length
        )
        depths = GaugeMetricFamily(
            "eyas_spec_decode_chosen_depth_share",
            "Share of steps that the drafter drafted this deep, 0 is not at all; suffix drafts are counted by source.",
            labels=["depth"],
        )
        for depth, share in snapshot.depth_shares.items():
            depths.add_metric([str(depth)], share)
        yield depths
        yield _gauge("eyas_spec_decode_collapsed", "1 while the drafter is of no use.", float(snapshot.collapsed))
        if snapshot.drift is not None:
            yield from _drift(snapshot.drift)
        yield _counter("eyas_engine_failed_steps", "Steps that failed.", snapshot.failed_steps)
        yield _counter("eyas_engine_replaced", "Engines that were replaced.", snapshot.replaced)


def _drift(drift: DriftReport) -> Iterator[Metric]:
    """Metrics of the drift probe, for the current engine."""
    yield _gauge("eyas_drift_alarm", "1 while the drift alarm fires.", float(drift.firing))
    yield _counter("eyas_drift_alarms_fired", "Times it has fired.", drift.fired)
    yield _gauge("eyas_drift_deepest_healthy", "The deepest that requests on auto draft.", drift.deepest)
    yield _counter("eyas_drift_checkups", "Rounds that were probed.", drift.checkups)
    yield _counter("eyas_drift_checkup_seconds", "Seconds spent on check-ups.", drift.seconds)
    if drift.checkups:
        yield _gauge("eyas_drift_growth", "Growth of the fed-back state per depth, 0 is flat.", drift.growth.value)
    rms = GaugeMetricFamily("eyas_drift_state_rms", "Size of the fed-back state, latest check-ups.", labels=["depth"])
    for depth, size in enumerate(drift.rms, 1):
        rms.add_metric([str(depth)], size)
    yield rms
    mass = GaugeMetricFamily(
        "eyas_drift_attention_mass",
        "Attention mass of the drafter by region, latest check-ups.",
        labels=["region", "depth"],
    )
    for region, shares in drift.mass.items():
        for depth, share in enumerate(shares, 1):
            mass.add_metric([region, str(depth)], share)
    yield mass


def _by_source(stats: SpecDecodeStats) -> Iterator[Metric]:
    """Drafts by who made them."""
    for name, words, total, suffix in (
        ("draft_tokens", "Tokens drafted and verified", stats.drafted, stats.suffix_drafted),
        ("accepted_tokens", "Drafted tokens accepted", stats.accepted, stats.suffix_accepted),
    ):
        family = CounterMetricFamily(
            f"eyas_spec_decode_num_{name}_per_source", f"{words}, by who drafted them.", labels=["source"]
        )
        family.add_metric(["drafter"], total - suffix)
        family.add_metric(["suffix"], suffix)
        yield family


def _gauge(name: str, description: str, value: float) -> Metric:
    return GaugeMetricFamily(name, description, value=value)


def _counter(name: str, description: str, value: float) -> Metric:
    return CounterMetricFamily(name, description, value=value)
