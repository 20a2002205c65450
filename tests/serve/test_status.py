"""The server's state as JSON: what the dashboard draws is what happened."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any
from unittest.mock import AsyncMock

import pytest

from eyas.engine.speculation.acceptance import RECENT
from eyas.engine.speculation.step_report import RoundOutcome, StepReport
from eyas.serve.model_info import ServerLimits
from eyas.serve.monitoring.drafter_changes import MOST, DrafterChanges
from eyas.serve.monitoring.status import SAMPLE_SECONDS, SAMPLES, status_of
from eyas.serve.transport.server import Server


def fits(value: Any, schema: Mapping[str, Any], schemas: Mapping[str, Any], at: str = "status") -> None:
    """Assert that a value satisfies the schema, as far as this schema's few keywords go, and holds nothing else."""
    if "$ref" in schema:
        schema = schemas[schema["$ref"].rpartition("/")[2]]
    if "anyOf" in schema:
        some, none = schema["anyOf"]
        assert none == {"type": "null"}
        if value is not None:
            fits(value, some, schemas, at)
        return
    if "enum" in schema:
        assert value in schema["enum"], at
        return
    kinds = {"object": dict, "array": list, "string": str, "integer": int, "number": (int, float), "boolean": bool}
    names = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    assert any(value is None if name == "null" else isinstance(value, kinds[name]) for name in names), at  # type: ignore[arg-type]
    if isinstance(value, dict):
        properties, others = schema.get("properties", {}), schema.get("additionalProperties", False)
        assert set(schema.get("required", ())) <= set(value), at
        for name, inner in value.items():
            assert name in properties or others, f"{at}.{name}"
            if others is not True:
                fits(inner, properties.get(name) or others, schemas, f"{at}.{name}")
    if isinstance(value, list):
        for index, inner in enumerate(value):
            fits(inner, schema["items"], schemas, f"{at}.{index}")


def test_the_status_satisfies_its_schema(client: Any) -> None:
    document = client.get("/openapi.json").json
    told = document["paths"]["/status"]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
    assert told == {"$ref": "#/components/schemas/Status"}
    reply = client.get("/status")
    assert reply.headers["cache-control"] == "no-store"
    fits(reply.json, told, document["components"]["schemas"])


def test_differences_of_counts_match_the_requests_between(new_server: Any) -> None:
    with new_server() as client:
        before = client.get("/status").json
        assert before["counts"]["tokens"] == before["load"]["running"] == 0
        fields = {"max_tokens": 40, "ignore_eos": True, "speculative": {"mode": "fixed", "depth": 3}}
        figures = client.complete(**fields).json["usage"]["speculative"]
        after = client.get("/status").json
        assert after["at_seconds"] > before["at_seconds"]
        counts = after["counts"]
        assert counts["tokens"] == 40
        for name in ("passes", "drafts", "drafted_tokens", "accepted_tokens", "accepted_by_depth"):
            assert counts[name] == figures[name], name
        assert counts["rows_by_depth"]["3"] >= counts["drafts"]
        assert after["kv_blocks"]["used"] == 0
        assert after["kv_blocks"]["total"] == client.engine.block_manager.blocks
        assert after["load"] == {"running": 0, "waiting": 0, "in_flight": 0, "capacity": 4 + 256}


def test_the_status_describes_the_served_models(client: Any, target: Any) -> None:
    assert client.get("/status").json["served"] == {
        "model": "tiny",
        "target": "tiny",
        "engine": "eyas",
        "drafter": "tiny-drafter",
        "drafter_quantization": "none",
        "suffix": False,
        "mode": "auto",
        "method": "auto",
        "depth": None,
        "per_request": True,
        "max_depth": 7,
        "max_model_len": 256,
        "max_num_seqs": 4,
        "quantization": "none",
        "kv_cache_dtype": "auto",
        "sampling_defaults": {},
    }
    assert client.get("/status").json["state"] == "ok"


def test_an_alarm_is_raised_with_its_evidence_and_logged_once(
    new_server: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with new_server() as client:
        alarms = client.get("/status").json["alarms"]
        assert [(alarm["name"], alarm["raised"]) for alarm in alarms] == [("collapsed", False), ("drift", False)]
        controller = client.engine.controller
        for _ in range(2 * RECENT):
            controller.observe(StepReport(rounds=[RoundOutcome(key=0, drafted=3, accepted=0)]))
        for _ in range(2):
            told = client.get("/status").json
            assert told["alarms"][0]["raised"]
            (notice,) = told["notices"]
            assert "eyas check" in notice["text"]
            assert 0 <= notice["at_seconds"] <= told["at_seconds"]
        logged = [record.getMessage() for record in caplog.records if record.name == "eyas.serve.local_engine"]
        assert logged == [notice["text"]]


def test_the_drift_alarm_shows_in_status_and_metrics_while_it_fires(new_server: Any) -> None:
    with new_server() as client:
        assert "eyas_drift_alarm 0.0" in client.get("/metrics").text
        drift = client.engine.drift
        for number in range(16):
            grown = [1.5**depth + 0.001 * number for depth in range(drift.max_depth)]
            drift.observe_checkup(grown, dict.fromkeys(("sink", "prompt", "verified", "own"), [0.25] * drift.max_depth))
        alarm = client.get("/status").json["alarms"][1]
        assert (alarm["name"], alarm["raised"]) == ("drift", True)
        assert "grows by" in alarm["text"]
        assert "drift alarm" in client.get("/status").json["notices"][0]["text"]
        metrics = client.get("/metrics").text
        for line in (
            "eyas_drift_alarm 1.0",
            "eyas_drift_alarms_fired_total 1.0",
            f"eyas_drift_deepest_healthy {float(drift.deepest)}",
            'eyas_drift_attention_mass{depth="1",region="sink"} 0.25',
            'eyas_drift_state_rms{depth="1"}',
        ):
            assert line in metrics, line


def test_the_status_shows_draining_and_failure(new_server: Any) -> None:
    with new_server() as client:
        client.application.context.admission.drain()
        assert client.get("/status").json["state"] == "draining"
    with new_server() as client:
        supervisor = client.application.context.engine_client.supervisor

        def broken() -> None:
            raise ValueError("worn out")

        client.engine.step = client.engine.scheduler.check = supervisor._build = broken
        client.complete()
        told = client.get("/status").json
        assert told["state"] == "failed"
        assert told["counts"]["failed_steps"] == 1


def test_latencies_and_errors_are_counted_where_they_happen(new_server: Any) -> None:
    with new_server() as client:
        quick = client.engine.step
        # Steps that end before the first is told are told with it, and have no time of their own.
        client.engine.step = lambda: (time.sleep(0.02), quick())[1]
        client.complete(max_tokens=10, ignore_eos=True, speculative={"mode": "off"})
        client.complete(max_tokens=0)
        client.get("/nowhere")
        told = client.get("/status").json
        latency = told["latency"]
        for histogram in latency.values():
            assert len(histogram["counts"]) == len(histogram["upper_seconds"]) + 1
            assert histogram["upper_seconds"] == sorted(histogram["upper_seconds"])
        assert sum(latency["time_to_first_token"]["counts"]) == 1
        assert sum(latency["inter_token_latency"]["counts"]) == 9
        assert told["counts"]["errors_by_status"] == {"400": 1, "404": 1}


def test_an_error_inside_a_stream_is_counted_too(new_server: Any) -> None:
    with new_server(limits=ServerLimits(request_seconds=0.3)) as client:
        step = client.engine.step
        client.engine.step = lambda: (time.sleep(0.05), step())[1]
        assert client.complete(max_tokens=200, ignore_eos=True, stream=True).status == 200
        assert client.get("/status").json["counts"]["errors_by_status"] == {"504": 1}


def test_the_history_is_bounded_and_repeats_the_status(new_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with new_server() as client:
        assert client.get("/status/history").json == {"sample_seconds": SAMPLE_SECONDS, "samples": []}
        client.complete(max_tokens=10, ignore_eos=True)
        asyncio.run(client.application.history.sample())
        status, reply = client.get("/status").json, client.get("/status/history")
        assert reply.headers["cache-control"] == "no-store"
        document = client.get("/openapi.json").json
        schemas = document["components"]["schemas"]
        fits(reply.json, schemas["StatusHistory"], schemas)
        (sample,) = reply.json["samples"]
        assert {name: sample[name] for name in ("counts", "latency")} == {
            name: status[name] for name in ("counts", "latency")
        }
        same = AsyncMock(return_value=asyncio.run(status_of(client.application.context)))
        monkeypatch.setattr("eyas.serve.monitoring.status.status_of", same)
        for _ in range(SAMPLES + 5):
            asyncio.run(client.application.history.sample())
        assert len(client.get("/status/history").json["samples"]) == SAMPLES
        assert SAMPLES * SAMPLE_SECONDS == 3600


def test_a_server_samples_while_it_runs_and_stops_with_it(new_server: Any) -> None:
    async def run(client: Any) -> None:
        server = Server(client.application)
        await server.startup([])
        await asyncio.sleep(0.05)
        server.force_exit = True  # no lifespan was begun
        await server.shutdown([])
        await asyncio.gather(server.sampling, return_exceptions=True)
        assert server.sampling.cancelled()

    with new_server() as client:
        asyncio.run(run(client))
        assert len(client.get("/status/history").json["samples"]) == 1


def test_drafter_changes_have_times_and_are_bounded() -> None:
    now = iter(range(1000, 2000))
    changes = DrafterChanges(clock=lambda: next(now))
    changes.note_seen(2.0, 2.5)  # of a drafter that no change has brought
    changes.note("learnt-1", reason="better")
    changes.note_seen(2.00001, 2.5)
    changes.note(None, "rollback")
    unseen = {"reason": None, "before": None, "after": None}
    told = [
        {"at_seconds": 10, "kind": "swap", "drafter": "learnt-1", "reason": "better", "before": 2.0, "after": 2.5},
        {"at_seconds": 11, "kind": "rollback", "drafter": None, **unseen},
    ]
    assert [one.model_dump() for one in changes.since(990)] == told
    for _ in range(2 * MOST):
        changes.note("other")
    assert len(changes.since(0)) == MOST


def test_the_history_needs_the_key(new_server: Any) -> None:
    with new_server(keys=("secret",)) as client:
        client.get("/status/history").assert_refused(401)
