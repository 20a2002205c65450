"""Limits, keys, failures and figures: what an operator relies on."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from eyas.engine.engine import Engine
from eyas.serve.admission import AdmissionController
from eyas.serve.api_error import ApiError
from eyas.serve.model_info import ServerLimits
from eyas.serve.monitoring.json_logging import LOGGERS, JsonFormatter, log_event, log_json_lines
from eyas.serve.protocol.request_policy import RequestPolicy
from serve.conftest import OPTIONS

LONG = {"prompt": "abcabc", "max_tokens": 200, "temperature": 0, "ignore_eos": True}


def metrics(client: Any) -> dict[str, float]:
    """Samples by name and labels."""
    families = text_string_to_metric_families(client.get("/metrics").text)
    return {
        sample.name + "".join(f",{key}={value}" for key, value in sorted(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def test_a_full_queue_gives_429_with_retry_after(new_server: Any) -> None:
    with new_server(limits=ServerLimits(queue=2)) as client:

        async def main() -> list[Any]:
            return await asyncio.gather(*(client.send("POST", "/v1/completions", json=LONG) for _ in range(9)))

        replies = asyncio.run(main())
        refused = [reply for reply in replies if reply.status == 429]
        assert [reply.status for reply in replies].count(200) == 6
        assert len(refused) == 3
        for reply in refused:
            reply.assert_refused(429, "6 of 6", "try again")
            assert int(reply.headers["retry-after"]) >= 1
        assert len({reply.json["choices"][0]["text"] for reply in replies if reply.status == 200}) == 1
        client.complete(n=7).assert_refused(400, "7 answers", "6")
        client.all_back()


def test_retry_after_grows_with_the_queue_and_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eyas.serve.admission.monotonic", iter([0.0, 100.0] * 5).__next__)
    admission = AdmissionController(max_num_seqs=2, queue=1000)
    with admission.admit(1):
        pass
    short = admission.retry_after
    with admission.admit(8):
        assert short < admission.retry_after <= 60
    admission.drain()
    with pytest.raises(ApiError, match="shutting down"):
        admission.check_capacity()


def test_only_known_keys_use_the_api(new_server: Any) -> None:
    with new_server(keys=("first", "sécond")) as client:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic first"}):
            reply = client.get("/v1/models", headers=headers)
            reply.assert_refused(401, "Authorization: Bearer")
            assert reply.headers["www-authenticate"] == "Bearer"
        for key in ("first", "sécond"):
            assert client.get("/v1/models", headers={"authorization": f"Bearer {key}".encode()}).status == 200
        assert client.get("/health").status == 200
        assert client.get("/metrics").status == 200


def test_a_large_body_is_not_read_to_its_end(new_server: Any) -> None:
    with new_server(limits=ServerLimits(body_bytes=1000)) as client:
        client.complete(prompt="a" * 2000).assert_refused(413, "1,000 bytes")


def test_a_request_has_a_deadline(new_server: Any) -> None:
    with new_server(limits=ServerLimits(request_seconds=0.05)) as client:
        slow = client.engine.step
        client.engine.step = lambda: (__import__("time").sleep(0.02), slow())[1]
        client.complete(**LONG).assert_refused(504, "took longer")
        reply = client.complete(**LONG, stream=True)
        assert reply.status in (200, 504)
        assert '"timeout_error"' in reply.text
        assert "[DONE]" not in reply.text
        wait_until_idle(client)


def wait_until_idle(client: Any) -> None:
    async def main() -> None:
        while client.engine.busy:
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(main(), 10))
    client.all_back()


def fail_once(engine: Engine, error: Exception, *, after: int) -> None:
    """Let a later step fail in the middle: tokens were verified, not all were written down."""
    commit, left = engine.scheduler.commit, [after]

    def commit_or_fail(*arguments: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise error
        commit(*arguments)

    engine.scheduler.commit = commit_or_fail  # type: ignore[method-assign, assignment]


def test_a_failing_step_loses_its_requests_and_no_others(new_server: Any, caplog: pytest.LogCaptureFixture) -> None:
    with new_server() as client:
        expected = client.complete(**LONG).json["choices"][0]["text"]
        fail_once(client.engine, MemoryError("no more"), after=30)

        async def main() -> list[Any]:
            return await asyncio.gather(*(client.send("POST", "/v1/completions", json=LONG) for _ in range(7)))

        replies = asyncio.run(main())
        statuses = sorted(reply.status for reply in replies)
        assert statuses == [200, 200, 200, 500, 500, 500, 500]  # four ran, three waited
        for reply in replies:
            if reply.status == 500:
                reply.assert_refused(500, "MemoryError", "try again")
            else:
                assert reply.json["choices"][0]["text"] == expected
        assert len(client.engines) == 1
        assert any("MemoryError: no more" in notice and "4 requests are lost" in notice for notice in caplog.messages)
        client.all_back()
        assert metrics(client)["eyas_engine_failed_steps_total"] == 1


def test_a_stream_that_fails_ends_with_an_error(new_server: Any) -> None:
    with new_server() as client:
        fail_once(client.engine, RuntimeError("boom"), after=5)
        text = client.complete(**LONG, stream=True).text
        last = json.loads(text.strip().split("\n\n")[-1].removeprefix("data: "))
        assert last["error"]["code"] == "engine_failed"
        assert client.complete().status == 200


def test_an_engine_that_fails_again_is_replaced(new_server: Any, caplog: pytest.LogCaptureFixture) -> None:
    with new_server() as client:
        expected = client.complete().json["choices"]

        def broken() -> None:
            raise ValueError("worn out")

        client.engine.step = broken
        client.complete().assert_refused(500, "ValueError")
        assert len(client.engines) == 2
        assert client.complete().json["choices"] == expected
        client.all_back()
        assert any("replaced" in notice and "all its requests are lost" in notice for notice in caplog.messages)
        told = metrics(client)
        assert told["eyas_engine_replaced_total"] == 1
        assert told["eyas_generation_tokens_total"] == 16  # of both engines


def test_an_engine_that_fails_its_integrity_check_is_replaced_at_once(new_server: Any) -> None:
    with new_server() as client:
        engine = client.engine
        fail_once(engine, RuntimeError("boom"), after=3)

        def check() -> None:
            raise AssertionError("a page has two owners")

        engine.scheduler.check = check
        client.complete().assert_refused(500, "RuntimeError")
        assert len(client.engines) == 2
        assert client.complete().status == 200


def test_an_engine_that_cannot_be_replaced_shows_in_health_checks(new_server: Any) -> None:
    with new_server() as client:
        supervisor = client.application.context.engine_client.supervisor

        def broken() -> None:
            raise ValueError("worn out")

        client.engine.step = client.engine.scheduler.check = supervisor._build = broken
        client.complete().assert_refused(503, "could not be replaced")
        assert client.get("/health").status == 503
        assert client.get("/health").json == {"status": "failed", "reason": "ValueError"}
        client.complete().assert_refused(503, "could not be replaced")
        assert client.get("/metrics").status == 200


def test_metrics_count_requests_and_tokens(new_server: Any) -> None:
    with new_server() as client:
        fields = {"max_tokens": 40, "ignore_eos": True, "speculative": {"mode": "fixed", "depth": 3}}
        figures = client.complete(**fields).json["usage"]["speculative"]
        client.complete(colour="red")
        told = metrics(client)
        assert told["eyas_generation_tokens_total"] == 40
        assert told["eyas_prompt_tokens_total"] == 6
        assert told["eyas_spec_decode_num_drafts_total"] == figures["drafts"]
        assert told["eyas_spec_decode_num_accepted_tokens_total"] == figures["accepted_tokens"]
        by_depth = [told[f"eyas_spec_decode_num_accepted_tokens_per_pos_total,position={i}"] for i in range(3)]
        assert by_depth == figures["accepted_by_depth"]
        assert told["eyas_spec_decode_acceptance_length"] == pytest.approx(figures["acceptance_length"], abs=1e-4)
        assert told["eyas_spec_decode_chosen_depth_share,depth=3"] > 0
        assert told["eyas_requests_total,endpoint=/v1/completions,outcome=length"] == 1
        assert told["eyas_requests_total,endpoint=/v1/completions,outcome=unknown_parameter"] == 1
        assert told["eyas_time_to_first_token_seconds_count"] == 1
        # a busy server may send the first tokens together, with no interval between them
        assert 30 <= told["eyas_inter_token_latency_seconds_count"] <= 39
        assert told["eyas_kv_blocks_used"] == told["eyas_num_requests_running"] == told["eyas_answers_in_flight"] == 0
        assert told["eyas_kv_blocks"] == client.engine.block_manager.blocks


def test_the_log_has_figures_and_no_text(client: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="eyas"):
        reply = client.chat("a very secret question", user="someone")
        client.chat("a very secret question", colour="a secret too")
        client.chat(messages=[{"role": "user", "content": "secret", "secret": 1}])
    records = [record for record in caplog.records if record.name.startswith("eyas")]
    lines = [json.loads(JsonFormatter().format(record)) for record in records]
    assert len(lines) == 3
    assert not any("secret" in json.dumps(line) for line in lines)
    assert lines[0]["user"] == "someone"
    assert lines[0]["status"] == 200
    assert lines[0]["completion_tokens"] == reply.json["usage"]["completion_tokens"]
    assert lines[0]["request_id"] == reply.headers["x-request-id"]
    assert lines[1]["outcome"] == "unknown_parameter"


@pytest.fixture
def restored_loggers() -> Iterator[None]:
    """Loggers as they were, after a test that sets them up for a server."""
    loggers = [logging.getLogger(name) for name in LOGGERS]
    before = [(logger.handlers, logger.propagate, logger.level) for logger in loggers]
    yield
    logging.captureWarnings(False)
    for logger, (handlers, propagate, level) in zip(loggers, before, strict=True):
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


@pytest.mark.usefixtures("restored_loggers")
def test_a_running_server_logs_json_lines(capsys: pytest.CaptureFixture[str]) -> None:
    logging.getLogger("eyas").handlers = [logging.StreamHandler()]  # what the command line had set up
    log_json_lines()
    logging.getLogger("eyas.engine.runner.graph_capture").warning("no room for graphs")
    logging.getLogger("eyas.target.model").info("loading tiny")
    logging.getLogger("eyas.engine").debug("not shown")
    logging.getLogger("uvicorn.error").info("not shown")
    logging.getLogger("uvicorn.error").warning("Invalid HTTP request received.")
    logging.getLogger("asyncio").error("socket.accept() out of system resource\nsocket: <fd=4>")
    log_event(logging.getLogger("eyas.serve.endpoints.completions"), "request", status=200, user=None)
    try:
        raise ValueError("worn out")
    except ValueError:
        logging.getLogger("eyas.serve.endpoints.completions").exception("a bug")
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert all(line.pop("time").endswith("Z") for line in lines)
    assert "ValueError: worn out" in lines[5].pop("trace")
    assert lines == [
        {"level": level, "event": "notice", "logger": logger, "message": message}
        for level, logger, message in (
            ("warning", "eyas.engine.runner.graph_capture", "no room for graphs"),
            ("info", "eyas.target.model", "loading tiny"),
            ("warning", "uvicorn.error", "Invalid HTTP request received."),
            ("error", "asyncio", "socket.accept() out of system resource"),
        )
    ] + [
        {"level": "info", "event": "request", "status": 200},
        {"level": "error", "event": "notice", "logger": "eyas.serve.endpoints.completions", "message": "a bug"},
    ]


@pytest.mark.usefixtures("restored_loggers")
def test_the_log_level_is_the_operators(capsys: pytest.CaptureFixture[str]) -> None:
    for level, shown in ((logging.DEBUG, 3), (logging.INFO, 2), (logging.WARNING, 1), (logging.ERROR, 0)):
        log_json_lines(level)
        for number in (logging.DEBUG, logging.INFO, logging.WARNING):
            logging.getLogger("eyas.engine").log(number, "said")
        logging.getLogger("uvicorn.error").info("never shown")
        assert capsys.readouterr().err.count("said") == shown


def test_the_model_is_described(client: Any) -> None:
    (card,) = client.get("/v1/models").json["data"]
    assert card == client.get("/v1/models/tiny").json
    assert card["id"] == "tiny"
    assert card["max_model_len"] == 256
    assert card["engine"] == "eyas"
    assert card["speculative"] == {
        "drafter": "tiny-drafter",
        "drafter_quantization": "none",
        "suffix": False,
        "mode": "auto",
        "method": "auto",
        "depth": None,
        "per_request": True,
    }
    assert client.get("/health").json == {"status": "ok"}


def test_priority_changes_the_order_and_not_the_answers(new_server: Any) -> None:
    policy = RequestPolicy(scheduling_policy="priority")
    with new_server(policy=policy, options=replace(OPTIONS, max_num_seqs=1)) as client:
        ended: list[str] = []

        async def ask(name: str, priority: int) -> str:
            reply = await client.send("POST", "/v1/completions", json=LONG | {"max_tokens": 60, "priority": priority})
            ended.append(name)
            return str(reply.json["choices"][0]["text"])

        async def main() -> list[str]:
            first = asyncio.create_task(ask("first", 0))
            while not client.engine.scheduler.running:
                await asyncio.sleep(0.001)
            asks = [asyncio.create_task(ask(name, priority)) for name, priority in (("bulk", 5), ("urgent", -5))]
            return await asyncio.gather(first, *asks)

        texts = asyncio.run(main())
        assert ended == ["first", "urgent", "bulk"]
        assert len(set(texts)) == 1
