"""The server's state as one JSON object, for the page and for scripts: gauges as they are, counts since the start.

Counts never go back while the server runs (but for `rows_by_depth`, which a replaced engine begins anew), so that a
client that looks from time to time gets rates as differences, over `at_seconds` and not over its own clock.
"""

from typing import Any

from eyas import __version__
from eyas.serve.admission import AdmissionController
from eyas.serve.engine_client import EngineClient, EngineSnapshot
from eyas.serve.model_info import ModelInfo

DRIFTS = (
    "raised while the drafter's state or acceptance does not hold with depth: requests on auto then draft less deep"
)
COLLAPSED = "raised while the drafter is of no use: requests on auto then decode plainly, except for probes"

STATUS_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["version", "state", "at_seconds", "served", "load", "kv_blocks", "counts", "alarms", "notices"],
    "properties": {
        "version": {"type": "string"},
        "state": {"enum": ["ok", "draining", "failed"]},
        "at_seconds": {"type": "number", "description": "Since the start, when the engine was looked at."},
        "served": {
            "type": "object",
            "properties": {
                "model": {"type": "string"},
                "target": {"type": "string"},
                "drafter": {"type": ["string", "null"]},
                "mode": {"enum": ["auto", "off", "fixed"]},
                "depth": {"type": ["integer", "null"]},
                "max_depth": {"type": "integer", "description": "The deepest a request may ask for; 0: no drafter."},
                "max_model_len": {"type": "integer"},
                "max_num_seqs": {"type": "integer"},
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
                "accepted_tokens": {"type": "integer"},
                "accepted_by_depth": {"type": "array", "items": {"type": "integer"}},
                "rows_by_depth": {
                    "type": "object",
                    "additionalProperties": {"type": "integer"},
                    "description": "How often an answer's next tokens were to be drafted this deep; 0 is not at all.",
                },
                "failed_steps": {"type": "integer"},
                "replaced_engines": {"type": "integer"},
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
                    "text": {"type": "string", "description": "What it means, or what it rests on while raised."},
                },
            },
        },
        "notices": {
            "type": "array",
            "description": "What the engine last had to say, the newest first.",
            "items": {
                "type": "object",
                "required": ["at_seconds", "text"],
                "properties": {"at_seconds": {"type": "number"}, "text": {"type": "string"}},
            },
        },
    },
}


def state_of(engine_client: EngineClient, admission: AdmissionController) -> str:
    """Whether requests are taken, in a word."""
    return "draining" if admission.draining else "failed" if engine_client.failure is not None else "ok"


async def status_of(
    engine_client: EngineClient, model_info: ModelInfo, admission: AdmissionController, *, started: float
) -> dict[str, Any]:
    """Everything; `started` is when, by the monotonic clock."""
    snapshot = await engine_client.snapshot()
    return {
        "version": __version__,
        "state": state_of(engine_client, admission),
        "at_seconds": round(snapshot.at - started, 3),
        "served": _served(model_info, engine_client.max_depth),
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
        "counts": _counts(snapshot, engine_client),
        "alarms": _alarms(snapshot),
        "notices": [{"at_seconds": round(at - started, 3), "text": text} for at, text in reversed(snapshot.notices)],
    }


def _served(model_info: ModelInfo, max_depth: int) -> dict[str, Any]:
    drafted = model_info.drafter is not None
    return {
        "model": model_info.name,
        "target": model_info.target,
        "drafter": model_info.drafter,
        "mode": model_info.speculation.mode if drafted else "off",
        "depth": model_info.speculation.depth,
        "max_depth": max_depth if drafted else 0,
        "max_model_len": model_info.max_model_len,
        "max_num_seqs": model_info.max_num_seqs,
    }


def _alarms(snapshot: EngineSnapshot) -> list[dict[str, Any]]:
    drift = snapshot.drift
    signs = "; ".join(drift.signs.values()) if drift is not None else ""
    return [
        {"name": "collapsed", "raised": snapshot.collapsed, "text": COLLAPSED},
        {"name": "drift", "raised": bool(signs), "text": signs or DRIFTS},
    ]


def _counts(snapshot: EngineSnapshot, engine_client: EngineClient) -> dict[str, Any]:
    tally = snapshot.tally
    return {
        "tokens": tally.tokens,
        "passes": tally.passes,
        "drafts": tally.drafts,
        "drafted_tokens": tally.drafted,
        "accepted_tokens": tally.accepted,
        "accepted_by_depth": list(tally.accepted_at),
        "rows_by_depth": {str(depth): count for depth, count in snapshot.rows_by_depth.items()},
        "failed_steps": engine_client.supervisor.failed_steps,
        "replaced_engines": engine_client.supervisor.replaced,
    }
