"""Experiments with well-behaved and failing servers keep all results."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from each import each
from eyas.bench.experiment import Experiment, ExperimentConfig
from eyas.bench.load import Load
from eyas.bench.record import RecordBuilder
from eyas.bench.requests import RequestOptions
from eyas.bench.server import identify
from eyas.bench.variants import list_variants
from eyas.bench.workload import Task, Workload, synthetic_workload
from eyas.errors import UserError
from eyas.remote.address import Address
from fake_openai import Behaviour, Fake

TASKS = tuple(Task(key=f"k{i}", category="ab"[i % 2], turns=("Hello", "More")[: 1 + i % 2]) for i in range(6))


async def config_of(*fakes: Fake, baselines: dict[str, Fake] | None = None, **changes: Any) -> ExperimentConfig:
    async def met(name: str, fake: Fake) -> Any:
        return await identify(name, Address.of(fake.url), model=None, timeout=5)

    servers = [await met(f"s{place}", fake) for place, fake in enumerate(fakes)]
    others = {name: await met(name, fake) for name, fake in (baselines or {}).items()}
    given: dict[str, Any] = {"loads": (Load(users=2),), "workload": Workload(tasks=TASKS), "repetitions": 2}
    given |= {"options": RequestOptions(max_tokens=8), "timeout": 5.0}
    return ExperimentConfig(variants=list_variants(servers, others, baseline=True), **{**given, **changes})


def measure(*fakes: Fake, **changes: Any) -> tuple[Experiment, dict[str, Any], list[str]]:
    steps: list[str] = []

    async def work() -> Experiment:
        config = await config_of(*fakes, **changes)
        experiment = Experiment(config, step=lambda name, done, total: steps.append(name), measured=lambda: None)
        await experiment.run()
        return experiment

    experiment = asyncio.run(work())
    return experiment, RecordBuilder(experiment, "eyas bench").build(), steps


def test_eyas_is_measured_with_and_without_drafting_in_turn() -> None:
    with Fake(Behaviour(kind="eyas", drafts=True, together=4)) as fake:
        experiment, record, steps = measure(fake, repetitions=3, timeout=60.0)
    assert experiment.whole
    assert record["stopped"] is None
    order = [step.split(", ")[1] for step in steps if not step.endswith(("warm-up", "prompts", "measured"))]
    assert order == ["speculative", "plain", "plain", "speculative", "speculative", "plain"]
    fast, plain = record["rows"]
    assert fast["acceptance"]["source"] == "responses"
    assert fast["acceptance"]["by_depth"] == [0.7, 0.5]
    assert plain["acceptance"]["length"] is None
    assert fast["requests"] == 27
    assert fast["output_tokens"] == 27 * 8
    assert fast["same_as_plain"] == {"same": 27, "of": 27, "different": []}
    assert fake.most_at_once == 4  # the prompts beforehand; two users after that
    assert record["workload"]["categories"] == {"a": 3, "b": 3}
    asked = [body for body in fake.bodies if body["max_tokens"] == 8]
    assert all(body["stream_options"] == {"include_usage": True} and body["temperature"] == 0 for body in asked)
    second = next(body["messages"] for body in asked if len(body["messages"]) > 1)
    assert [message["role"] for message in second] == ["user", "assistant", "user"]


def test_vllm_is_measured_against_a_second_server_and_its_counts_are_read() -> None:
    with Fake(Behaviour(kind="vllm", drafts=True)) as fast, Fake(Behaviour(kind="vllm", pause=0.05)) as slow:
        experiment, record, _ = measure(fast, baselines={"s0": slow})
    first, plain = record["rows"]
    assert experiment.whole
    assert first["acceptance"]["source"] == "metrics"
    assert (first["acceptance"]["length"], first["acceptance"]["by_depth"]) == (2.2, [0.7, 0.5])
    assert first["acceptance"]["drafts"] == 2 * 9 * 10  # warm-up is not in it
    assert plain["acceptance"]["source"] is None
    assert first["against_plain"]["user_tokens_per_second"]["median"] > 1.2
    assert plain["chunk_gap_ms"]["p50"] >= 40
    assert not any("somebody else" in warning for warning in record["warnings"])


def test_other_clients_of_the_server_cause_a_warning() -> None:
    with Fake(Behaviour(kind="vllm", others=20)) as fake:
        _, record, _ = measure(fake)
    assert any("somebody else was asking" in warning for warning in record["warnings"])


def test_texts_that_differ_from_plain_decoding_cause_a_warning() -> None:
    def text(body: dict[str, Any]) -> str:
        return "plain" if "speculative" in body else "drafted"

    with Fake(Behaviour(kind="eyas", drafts=True, text=text)) as fake:
        _, record, _ = measure(fake)
    assert record["rows"][0]["same_as_plain"]["same"] == 0
    assert any("greedy answers are not those without speculation" in warning for warning in record["warnings"])


def test_an_open_loop_is_measured() -> None:
    with Fake(Behaviour(together=6)) as fake:
        _, record, _ = measure(fake, loads=(Load(rate=200.0),), repetitions=1, prefill=False, warmup=0, timeout=60.0)
    (row,) = record["rows"]
    assert (row["rate"], row["users"], row["mode"], row["requests"]) == (200.0, None, "as served", 6)
    assert fake.most_at_once == 6
    assert len(fake.bodies) == 6


def test_synthetic_prompts_are_sent_as_ids() -> None:
    with Fake() as fake:
        workload = synthetic_workload(9, tasks=3, vocabulary=50, seed=0)
        options = RequestOptions(max_tokens=8, ignore_eos=True, temperature=0.5, seed=7, extra={"top_p": 0.9})
        _, record, _ = measure(fake, workload=workload, options=options, repetitions=1)
    assert record["rows"][0]["failed"] == 0
    body = fake.bodies[-1]
    assert len(body["prompt"]) == 9
    assert body["ignore_eos"] is True
    assert body["top_p"] == 0.9
    assert {body["seed"] for body in fake.bodies} == {7, 8, 9}


def test_results_survive_a_server_that_dies() -> None:
    with Fake(Behaviour(dies_after=20)) as dying, Fake() as other:
        experiment, record, _ = measure(dying, other, warmup=0, prefill=False, repetitions=3)
    assert not experiment.whole
    (problem,) = experiment.problems
    assert "s0" in problem
    assert "died at 2 users in repetition 3" in problem
    first, second = record["rows"]
    assert first["repetitions"] == 2
    assert first["whole"]
    assert second["repetitions"] == 3
    assert [run["whole"] for run in record["runs"] if run["server"] == "s0"] == [True, True, False]
    assert problem in record["stopped"]
    assert problem in record["warnings"]


def test_single_failures_are_counted_and_a_server_that_refuses_all_is_given_up() -> None:
    def refuse(body: dict[str, Any]) -> str | None:
        return "too long" if len(body["messages"]) > 1 else None

    with Fake(Behaviour(refuse=refuse)) as fake:
        experiment, record, _ = measure(fake)
    assert experiment.whole
    assert record["rows"][0]["failures"] == {"400: too long": 6}
    assert any("6 of 18 requests failed" in warning for warning in record["warnings"])
    with Fake(Behaviour(refuse=lambda body: "never")) as fake:
        experiment, record, _ = measure(fake)
    assert not experiment.whole
    assert record["rows"] == []
    assert "answered none of 6 requests: 400: never" in experiment.problems[0]


@each(
    ("behaviour", "words"),
    [
        (Behaviour(raw=b"<html>no</html>"), "no events"),
        (Behaviour(usage=False), "told no usage"),
        (Behaviour(raw=b'{"choices": [{"message": {"content": "whole"}}]}'), "no events"),
    ],
)
def test_answers_in_another_format_are_errors(behaviour: Behaviour, words: str) -> None:
    with Fake(behaviour) as fake:
        experiment, _, _ = measure(fake)
    assert words in experiment.problems[0]


def test_an_answer_that_times_out_is_a_failure() -> None:
    with Fake(Behaviour(pause=0.4)) as fake:
        experiment, _, _ = measure(fake, timeout=0.2, workload=Workload(tasks=TASKS[:1]))
    assert "timed out after 0.2 s" in experiment.problems[0]


def test_an_interruption_keeps_finished_answers() -> None:
    async def work(fake: Fake) -> Experiment:
        config = await config_of(fake, warmup=0, prefill=False)
        experiment = Experiment(config, step=lambda *_: None, measured=lambda: None)
        running = asyncio.create_task(experiment.run())
        while len(fake.bodies) < 5:  # two users, so at least three are answered, of nine
            await asyncio.sleep(0.005)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        return experiment

    with Fake(Behaviour(pause=0.03)) as fake:
        experiment = asyncio.run(work(fake))
    record = RecordBuilder(experiment, "").build("interrupted")
    assert record["stopped"] == "interrupted"
    assert not record["whole"]
    assert record["rows"][0]["requests"] > 0
    assert not record["rows"][0]["whole"]
    assert any("interrupted; figures cover" in warning for warning in record["warnings"])


def test_servers_are_identified_or_refused() -> None:
    def ask(url: str, model: str | None = None) -> Any:
        return asyncio.run(identify("s", Address.of(url), model=model, timeout=5))

    with Fake(Behaviour(kind="vllm", drafts=True)) as fake:
        assert (ask(f"{fake.url}/v1/").kind, ask(fake.url).drafts, ask(fake.url).model) == ("vllm", True, "m")
        with pytest.raises(UserError, match=r"does not serve 'x'; give --model m"):
            ask(fake.url, "x")
        with pytest.raises(UserError, match=r"no OpenAI-compatible server.*404"):
            ask(f"{fake.url}/elsewhere")
    with pytest.raises(UserError, match=r"no server at http://127\.0\.0\.1.*start it"):
        ask(fake.url)
    with pytest.raises(UserError, match="no address"):
        ask("localhost:8000")
