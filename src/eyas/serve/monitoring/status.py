"""The server's state as one JSON object, for the web page and for scripts: gauges now, counts since the start.

Counts never decrease while the server runs, except for `rows_by_depth`, which a replaced engine restarts. So a client
that polls gets rates as differences over `at_seconds`, the server's clock.
"""

from dataclasses import asdict
from itertools import pairwise
from typing import Any

from prometheus_client import Counter, Histogram

from eyas import __version__
from eyas.serve.builders.response_builder import speculative_counts
from eyas.serve.context import ServerContext
from eyas.serve.engine_client import EngineSnapshot
from eyas.serve.learning.status_schema import LEARNER_SCHEMA
from eyas.serve.model_info import ModelInfo

DRIFTS = "raised while the drafter's state or acceptance degrades with depth: requests on auto then draft less deep"
COLLAPSED = "raised while the drafter is of no use: requests on auto then decode plainly, except for probes"

_HISTOGRAM: dict[str, Any] = {
    "type": "object",
    "required": ["upper_seconds", "counts"],
    "properties": {
        "upper_seconds": {"type": "array", "items": {"type": "number"}, "description": "Upper bounds of the buckets."},
        "counts": {
            "type": "array",
            "items": {"type": "integer"},
            "description": "How many fell into each bucket, since the start; the last is for those beyond all bounds.",
        },
    },
}
STATUS_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": [
        "version",
        "state",
        "at_seconds",
        "served",
        "load",
        "kv_blocks",
        "counts",
        "lookups_by_requests",
        "latency",
        "learning",
        "drafter_changes",
        "alarms",
        "notices",
    ],
    "properties": {
        "version": {"type": "string"},
        "state": {"enum": ["ok", "draining", "restarting", "failed"]},
        "at_seconds": {"type": "number", "description": "Time of the snapshot, since the start."},
        "served": {
            "type": "object",
            "properties": {
                "model": {"type": "string"},
                "target": {"type": "string"},
                "engine": {"type": "string", "description": "What computes the answers: eyas, or vLLM's version."},
                "drafter": {"type": ["string", "null"]},
                "drafter_quantization": {"type": ["string", "null"], "description": "Of the drafter's matrices."},
                "suffix": {"type": "boolean", "description": "Whether there are suffix drafts."},
                "mode": {"enum": ["auto", "off", "fixed"]},
                "method": {"enum": ["auto", "eagle3", "suffix", None], "description": "Who drafts; null: nobody."},
                "depth": {"type": ["integer", "null"]},
                "per_request": {"type": "boolean", "description": "Whether requests may choose mode and depth."},
                "max_depth": {
                    "type": "integer",
                    "description": "The deepest that a request may ask for; 0 without a drafter.",
                },
                "max_model_len": {"type": "integer"},
                "max_num_seqs": {"type": "integer"},
                "quantization": {"type": "string", "description": "Of the target's weights."},
                "kv_cache_dtype": {"enum": ["auto", "fp8"], "description": "Of keys and values; auto: as computed."},
                "sampling_defaults": {
                    "type": "object",
                    "description": "Values of the generation config, for requests that leave them out.",
                },
            },
        },
        "load": {
            "type": "object",
            "properties": {name: {"type": "integer"} for name in ("running", "waiting", "in_flight", "capacity")},
        },
        "kv_blocks": {
            "type": "object",
            "properties": {name: {"type": "integer"} for name in ("total", "used", "cached", "lookups", "hits")},
        },
        "counts": {
            "type": "object",
            "properties": {
                **{name: {"type": "integer"} for name in ("tokens", "passes", "drafts", "drafted_tokens")},
                **{name: {"type": "integer"} for name in ("suffix_drafted_tokens", "suffix_accepted_tokens")},
                "accepted_tokens": {"type": "integer"},
                "accepted_by_depth": {"type": "array", "items": {"type": "integer"}},
                "rows_by_depth": {
                    "type": "object",
                    "additionalProperties": {"type": "integer"},
                    "description": "How often this depth was chosen for an answer; 0 is a plain step.",
                },
                "failed_steps": {"type": "integer"},
                "replaced_engines": {"type": "integer"},
                "errors_by_status": {
                    "type": "object",
                    "additionalProperties": {"type": "integer"},
                    "description": "Errors sent to clients, such as 429 while the queue is full.",
                },
            },
        },
        "lookups_by_requests": {
            "type": "object",
            "description": "By requests of a step, up to so many: whether suffix drafts are looked up.",
            "additionalProperties": {
                "type": "object",
                "properties": {
                    "looked_up": {"type": "boolean"},
                    "seconds": {"type": "number", "description": "Of steps, as they would be without drafts."},
                    "seconds_saved": {"type": "number", "description": "By look-ups, less what these took."},
                },
            },
        },
        "latency": {
            "type": "object",
            "properties": {"time_to_first_token": _HISTOGRAM, "inter_token_latency": _HISTOGRAM},
        },
        "learning": {
            "type": ["object", "null"],
            "description": "Answers that are kept to learn from; null: none are.",
            "properties": {
                "collected": {"type": "integer", "description": "Answers kept since the start."},
                "dropped": {"type": "integer", "description": "Answers that could not be kept."},
                "bytes": {"type": "integer", "description": "Of all that is kept now."},
                "max_bytes": {"type": "integer"},
                "paused": {"type": ["string", "null"], "description": "Why none can be kept at present."},
                "learner": LEARNER_SCHEMA,
            },
        },
        "drafter_changes": {
            "type": "array",
            "description": "Drafters that came to work since the start, the oldest first; the latest of them.",
            "items": {
                "type": "object",
                "required": ["at_seconds", "kind", "drafter"],
                "properties": {
                    "at_seconds": {"type": "number"},
                    "kind": {"enum": ["swap", "rollback"], "description": "rollback: the new one was worse."},
                    "drafter": {"type": ["string", "null"]},
                    "reason": {"type": ["string", "null"], "description": "Of the learner; null: it was asked for."},
                    "before": {"type": ["number", "null"], "description": "Acceptance length of the drafter before."},
                    "after": {"type": ["number", "null"], "description": "Of this one, as of the latest look."},
                },
            },
        },
        "alarms": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["name", "raised", "text"],
                "properties": {
                    "name": {"type": "string"},
                    "raised": {"type": "boolean"},
                    "text": {"type": "string", "description": "What it means; while raised, the evidence."},
                },
            },
        },
        "notices": {
            "type": "array",
            "description": "The engine's latest events, the newest first.",
            "items": {
                "type": "object",
                "required": ["at_seconds", "text"],
                "properties": {"at_seconds": {"type": "number"}, "text": {"type": "string"}},
            },
        },
    },
}


def state_of(context: ServerContext) -> str:
    """Whether requests are accepted, in a word."""
    if context.admission.draining:
        return "draining"
    engine_client = context.engine_client
    if engine_client.failure is not None:
        return "failed"
    return "ok" if engine_client.unavailable is None else "restarting"


async def status_of(context: ServerContext) -> dict[str, Any]:
    """The whole state."""
    snapshot, admission = await context.engine_client.snapshot(), context.admission
    stats, metrics = snapshot.stats, context.metrics
    return {
        "version": __version__,
        "state": state_of(context),
        "at_seconds": round(snapshot.at - context.started, 3),
        "served": _served(context.model_info, context.engine_client.max_depth),
        "load": {
            "running": snapshot.running,
            "waiting": snapshot.waiting,
            "in_flight": admission.in_flight,
            "capacity": admission.capacity,
        },
        "kv_blocks": {
            "total": snapshot.blocks,
            "used": snapshot.blocks_used,
            "cached": snapshot.blocks_cached,
            "lookups": snapshot.prefix_lookups,
            "hits": snapshot.prefix_hits,
        },
        "counts": {
            "tokens": stats.tokens,
            **speculative_counts(stats),
            "rows_by_depth": {str(depth): count for depth, count in snapshot.rows_by_depth.items()},
            "failed_steps": snapshot.failed_steps,
            "replaced_engines": snapshot.replaced,
            "errors_by_status": _by_label(metrics.errors, "status"),
        },
        "lookups_by_requests": {str(rows): told for rows, told in snapshot.lookups_by_requests.items()},
        "latency": {
            "time_to_first_token": _histogram(metrics.time_to_first_token),
            "inter_token_latency": _histogram(metrics.inter_token_latency),
        },
        "drafter_changes": context.drafter_changes.as_json(context.started),
        "learning": _learning(context),
        "alarms": _alarms(snapshot),
        "notices": [
            {"at_seconds": round(at - context.started, 3), "text": text} for at, text in reversed(snapshot.notices)
        ],
    }


def _learning(context: ServerContext) -> dict[str, Any] | None:
    if context.collector is None:
        return None
    loop = context.learning_loop
    return asdict(context.collector.status) | {
        "learner": None if loop is None else loop.status(),
    }


def _served(model_info: ModelInfo, max_depth: int) -> dict[str, Any]:
    return {
        "model": model_info.name,
        "target": model_info.target,
        "engine": model_info.engine,
        **model_info.speculative_card(),
        "max_depth": max_depth if model_info.drafter is not None else 0,
        "max_model_len": model_info.max_model_len,
        "max_num_seqs": model_info.max_num_seqs,
        "quantization": model_info.quantization,
        "kv_cache_dtype": model_info.kv_cache_dtype,
        "sampling_defaults": model_info.sampling_defaults.given,
    }


def _by_label(counter: Counter, label: str) -> dict[str, int]:
    (family,) = counter.collect()
    return {one.labels[label]: int(one.value) for one in family.samples if one.name.endswith("_total")}


def _histogram(histogram: Histogram) -> dict[str, Any]:
    """A Prometheus histogram as counts of its buckets, which it has cumulated."""
    (family,) = histogram.collect()
    buckets = [(float(one.labels["le"]), int(one.value)) for one in family.samples if one.name.endswith("_bucket")]
    below = [0, *(count for _, count in buckets)]
    return {
        "upper_seconds": [bound for bound, _ in buckets[:-1]],
        "counts": [count - before for before, count in pairwise(below)],
    }


def _alarms(snapshot: EngineSnapshot) -> list[dict[str, Any]]:
    drift = snapshot.drift
    signs = "; ".join(drift.signs.values()) if drift is not None else ""
    return [
        {"name": "collapsed", "raised": snapshot.collapsed, "text": COLLAPSED},
        {"name": "drift", "raised": bool(signs), "text": signs or DRIFTS},
    ]
