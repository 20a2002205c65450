"""The bench against our own server: figures agree with what the engine itself counted."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from eyas.bench.experiment import Experiment, ExperimentConfig
from eyas.bench.load import Load
from eyas.bench.record import RecordBuilder
from eyas.bench.requests import RequestOptions
from eyas.bench.server import identify
from eyas.bench.variants import list_variants
from eyas.bench.workload import Task, Workload, synthetic_workload
from eyas.remote.address import Address
from eyas.serve.transport.server import Server, listen, url_of

pytestmark = pytest.mark.slow


@pytest.fixture
def running(new_server: Any) -> Iterator[tuple[str, Any]]:
    with new_server() as client:
        listener = listen("127.0.0.1", 0)
        server = Server(client.application)
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        yield url_of(listener), client
        server.handle_exit(15, None)
        thread.join(30)


def measure(url: str, workload: Workload, options: RequestOptions) -> dict[str, Any]:
    async def work() -> Experiment:
        server = await identify("eyas", Address.of(url), model=None, timeout=30)
        config = ExperimentConfig(
            variants=list_variants([server], {}, baseline=True),
            loads=(Load(users=2),),
            workload=workload,
            options=options,
            repetitions=2,
        )
        experiment = Experiment(config, step=lambda *_: None, measured=lambda: None)
        await experiment.run()
        return experiment

    return RecordBuilder(asyncio.run(work()), "").build()


def test_our_own_server_is_measured_with_and_without_drafting(running: tuple[str, Any]) -> None:
    url, client = running
    tasks = tuple(Task(key=f"k{i}", category="c", turns=(f"abc{i}", "again")) for i in range(3))
    options = RequestOptions(max_tokens=12, extra={"speculative": {"mode": "fixed", "depth": 2}})
    record = measure(url, Workload(tasks=tasks), options)
    fast, plain = record["rows"]
    assert record["whole"]
    for server in record["servers"]:  # what was measured is told: the weights of both
        assert server["card"]["quantization"] == "none"
        assert server["card"]["speculative"]["drafter_quantization"] == "none"
    assert (fast["requests"], fast["failed"], plain["requests"]) == (12, 0, 12)
    assert fast["same_as_plain"] == {"same": 12, "of": 12, "different": []}
    assert fast["acceptance"]["source"] == "responses"
    assert len(fast["acceptance"]["by_depth"]) <= 2
    assert fast["acceptance"]["length"] > 1
    # The server's page of metrics and the answers tell the same, and the plain requests drafted nothing.
    counted = {key: fast["acceptance"][key] for key in fast["acceptance"]["server_counted"]}
    assert fast["acceptance"]["server_counted"] == counted
    assert plain["acceptance"]["drafts"] == plain["acceptance"]["server_counted"]["drafts"] == 0
    assert fast["server_counted_tokens"] == fast["output_tokens"]
    assert not any("somebody else" in warning for warning in record["warnings"])
    client.all_back()


def test_our_own_server_takes_synthetic_prompts(running: tuple[str, Any]) -> None:
    url, _ = running
    workload = synthetic_workload(20, tasks=3, vocabulary=90, seed=0)
    record = measure(url, workload, RequestOptions(max_tokens=9, ignore_eos=True))
    assert [row["failed"] for row in record["rows"]] == [0, 0]
    assert [row["output_tokens"] for row in record["rows"]] == [54, 54]
    assert record["rows"][0]["prompt_tokens"] == 120
