"""The server's state as one JSON object, for the web page and for scripts: gauges now, counts since the start.

Counts never decrease while the server runs, except for `rows_by_depth`, which a replaced engine restarts. So a client
that polls gets rates as differences over `at_seconds`, the server's clock.
"""

import asyncio
from collections import deque
from dataclasses import asdict
from itertools import pairwise
from typing import Annotated, Any, Literal

from prometheus_client import Counter, Histogram
from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from eyas import __version__
from eyas.serve.builders.response_builder import speculative_counts
from eyas.serve.context import ServerContext
from eyas.serve.engine_client import EngineSnapshot
from eyas.serve.learning.status_schema import LEARNER_SCHEMA
from eyas.serve.monitoring.drafter_changes import DrafterChange

DRIFTS = "raised while the drafter's state or acceptance degrades with depth: requests on auto then draft less deep"
COLLAPSED = "raised while the drafter is of no use: requests on auto then decode plainly, except for probes"
SAMPLE_SECONDS = 10
SAMPLES = 3600 // SAMPLE_SECONDS


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Served(_Section):
    """The models, and how requests that do not say are drafted for."""

    model: str
    target: str
    engine: str = Field(description="What computes the answers: eyas, or vLLM's version.")
    drafter: str | None
    drafter_quantization: str | None = Field(description="Of the drafter's matrices.")
    suffix: bool = Field(description="Whether there are suffix drafts.")
    mode: Literal["auto", "off", "fixed"]
    method: Literal["auto", "eagle3", "suffix"] | None = Field(description="Who drafts; null: nobody.")
    depth: int | None
    per_request: bool = Field(description="Whether requests may choose mode and depth.")
    max_depth: int = Field(description="The deepest that a request may ask for; 0 without a drafter.")
    max_model_len: int
    max_num_seqs: int
    quantization: str = Field(description="Of the target's weights.")
    kv_cache_dtype: Literal["auto", "fp8"] = Field(description="Of keys and values; auto: as computed.")
    sampling_defaults: dict[str, Any] = Field(
        description="Values of the generation config, for requests that leave them out."
    )


class ServerLoad(_Section):
    """Answers by state, and how many there is room for."""

    running: int
    waiting: int
    in_flight: int
    capacity: int


class KvBlocks(_Section):
    """KV blocks, and lookups in the prefix cache."""

    total: int
    used: int
    cached: int
    lookups: int
    hits: int


class Counts(_Section):
    """Counts since the start."""

    tokens: int
    passes: int
    drafts: int
    drafted_tokens: int
    accepted_tokens: int
    accepted_by_depth: list[int]
    suffix_drafted_tokens: int
    suffix_accepted_tokens: int
    rows_by_depth: dict[str, int] = Field(
        description="How often this depth was chosen for an answer; 0 is a plain step."
    )
    failed_steps: int
    replaced_engines: int
    errors_by_status: dict[str, int] = Field(description="Errors sent to clients, such as 429 while the queue is full.")


class Lookups(_Section):
    """Whether looking up suffix drafts pays."""

    looked_up: bool
    seconds: float = Field(description="Of steps, as they would be without drafts.")
    seconds_saved: float = Field(description="By lookups, less what these took.")


class LatencyHistogram(_Section):
    """A histogram since the start."""

    upper_seconds: list[float] = Field(description="Upper bounds of the buckets.")
    counts: list[int] = Field(description="How many fell into each bucket; the last is for those beyond all bounds.")


class Latency(_Section):
    """Latencies since the start."""

    time_to_first_token: LatencyHistogram
    inter_token_latency: LatencyHistogram


class Learning(_Section):
    """Answers that are kept to learn from."""

    collected: int = Field(description="Answers kept since the start.")
    dropped: int = Field(description="Answers that could not be kept.")
    bytes: int = Field(description="Of all that is kept now.")
    max_bytes: int
    paused: str | None = Field(description="Why none can be kept at present.")
    learner: Annotated[dict[str, Any] | None, WithJsonSchema(LEARNER_SCHEMA)]


class Alarm(_Section):
    """An alarm."""

    name: str
    raised: bool
    text: str = Field(description="What it means; while raised, the evidence.")


class Notice(_Section):
    """An event of the engine."""

    at_seconds: float
    text: str


class Status(_Section):
    """The body of /status."""

    version: str
    state: Literal["ok", "draining", "restarting", "failed"]
    at_seconds: float = Field(description="Time of the snapshot, since the start.")
    served: Served
    load: ServerLoad
    kv_blocks: KvBlocks
    counts: Counts
    lookups_by_requests: dict[str, Lookups] = Field(description="By the most requests of a step.")
    latency: Latency
    drafter_changes: list[DrafterChange] = Field(
        description="Drafters that came to work since the start, the oldest first; the latest of them."
    )
    learning: Learning | None = Field(description="null: no answers are kept.")
    alarms: list[Alarm]
    notices: list[Notice] = Field(description="The engine's latest events, the newest first.")


class StatusSample(_Section):
    """The part of /status that changes by itself; the page computes rates and quantiles from two samples."""

    at_seconds: float
    load: ServerLoad
    kv_blocks: KvBlocks
    counts: Counts
    latency: Latency


class StatusHistory(_Section):
    """The body of /status/history."""

    sample_seconds: int
    samples: list[StatusSample] = Field(description="The oldest first; the fields are those of /status.")


class StatusRecorder:
    """The last hour of /status, for a page that has just been opened: a ring of samples.

    They are kept as JSON text, so answering costs no more than joining them.
    """

    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._samples: deque[str] = deque(maxlen=SAMPLES)

    async def sample(self) -> None:
        """Add a sample of this moment."""
        status = await status_of(self._context)
        self._samples.append(status.model_dump_json(include=set(StatusSample.model_fields)))

    async def run(self) -> None:
        """Sample until cancelled."""
        while True:
            await self.sample()
            await asyncio.sleep(SAMPLE_SECONDS)

    def to_json(self) -> str:
        """The samples as JSON text, the oldest first."""
        return f'{{"sample_seconds":{SAMPLE_SECONDS},"samples":[{",".join(self._samples)}]}}'


def state_of(context: ServerContext) -> Literal["ok", "draining", "restarting", "failed"]:
    """Whether requests are accepted."""
    if context.admission.draining:
        return "draining"
    engine_client = context.engine_client
    if engine_client.failure is not None:
        return "failed"
    return "ok" if engine_client.unavailable is None else "restarting"


async def status_of(context: ServerContext) -> Status:
    """The whole state."""
    snapshot, admission, info = await context.engine_client.snapshot(), context.admission, context.model_info
    stats, metrics, started = snapshot.stats, context.metrics, context.started
    learning = None
    if context.collector is not None:
        loop = context.learning_loop
        learning = Learning(**asdict(context.collector.status), learner=None if loop is None else loop.status())
    return Status(
        version=__version__,
        state=state_of(context),
        at_seconds=round(snapshot.at - started, 3),
        served=Served(
            model=info.name,
            target=info.target,
            engine=info.engine,
            **info.speculative_card(),
            max_depth=context.engine_client.max_depth if info.drafter is not None else 0,
            max_model_len=info.max_model_len,
            max_num_seqs=info.max_num_seqs,
            quantization=info.quantization,
            kv_cache_dtype=info.kv_cache_dtype,  # type: ignore[arg-type]
            sampling_defaults=info.sampling_defaults.given,
        ),
        load=ServerLoad(
            running=snapshot.running,
            waiting=snapshot.waiting,
            in_flight=admission.in_flight,
            capacity=admission.capacity,
        ),
        kv_blocks=KvBlocks(
            total=snapshot.blocks,
            used=snapshot.blocks_used,
            cached=snapshot.blocks_cached,
            lookups=snapshot.prefix_lookups,
            hits=snapshot.prefix_hits,
        ),
        counts=Counts(
            tokens=stats.tokens,
            **speculative_counts(stats),
            rows_by_depth={str(depth): count for depth, count in snapshot.rows_by_depth.items()},
            failed_steps=snapshot.failed_steps,
            replaced_engines=snapshot.replaced,
            errors_by_status=_by_label(metrics.errors, "status"),
        ),
        lookups_by_requests={str(rows): Lookups(**told) for rows, told in snapshot.lookups_by_requests.items()},
        latency=Latency(
            time_to_first_token=_histogram(metrics.time_to_first_token),
            inter_token_latency=_histogram(metrics.inter_token_latency),
        ),
        drafter_changes=context.drafter_changes.since(started),
        learning=learning,
        alarms=_alarms(snapshot),
        notices=[Notice(at_seconds=round(at - started, 3), text=text) for at, text in reversed(snapshot.notices)],
    )


def _by_label(counter: Counter, label: str) -> dict[str, int]:
    (family,) = counter.collect()
    return {one.labels[label]: int(one.value) for one in family.samples if one.name.endswith("_total")}


def _histogram(histogram: Histogram) -> LatencyHistogram:
    """A Prometheus histogram, which is cumulative, as counts of its buckets."""
    (family,) = histogram.collect()
    buckets = [(float(one.labels["le"]), int(one.value)) for one in family.samples if one.name.endswith("_bucket")]
    below = [0, *(count for _, count in buckets)]
    return LatencyHistogram(
        upper_seconds=[bound for bound, _ in buckets[:-1]],
        counts=[count - before for before, count in pairwise(below)],
    )


def _alarms(snapshot: EngineSnapshot) -> list[Alarm]:
    drift = snapshot.drift
    signs = "; ".join(drift.signs.values()) if drift is not None else ""
    return [
        Alarm(name="collapsed", raised=snapshot.collapsed, text=COLLAPSED),
        Alarm(name="drift", raised=bool(signs), text=signs or DRIFTS),
    ]
