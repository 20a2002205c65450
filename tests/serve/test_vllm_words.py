"""vLLM's wire words: its metric names, and its figures of speculation with each answer."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from each import each
from eyas.bench.counters import draft_counts_of_event, read_counters

DRAFTED = {"max_tokens": 40, "ignore_eos": True, "speculative": {"mode": "fixed", "depth": 3}}


def samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_metrics_have_vllms_names_and_labels_too(new_server: Any) -> None:
    with new_server() as client:
        figures = client.complete(**DRAFTED).json["usage"]["speculative"]
        told = samples(client.get("/metrics").text)

        def vllm(name: str, **labels: str) -> float:
            return told[f"vllm:{name}", frozenset({"model_name": "tiny", "engine": "0", **labels}.items())]

        assert vllm("spec_decode_num_drafts_total") == figures["drafts"]
        assert vllm("spec_decode_num_draft_tokens_total") == figures["drafted_tokens"]
        assert vllm("spec_decode_num_accepted_tokens_total") == figures["accepted_tokens"]
        by_depth = figures["accepted_by_depth"]
        name = "spec_decode_num_accepted_tokens_per_pos_total"
        assert [vllm(name, position=str(at)) for at in range(len(by_depth))] == by_depth
        assert vllm("generation_tokens_total") == 40
        assert vllm("prompt_tokens_total") == 6
        assert vllm("num_requests_running") == vllm("num_requests_waiting") == vllm("kv_cache_usage_perc") == 0
        assert vllm("request_success_total", finished_reason="length") == 1
        for histogram, count in (
            ("time_to_first_token_seconds", 1),
            ("e2e_request_latency_seconds", 1),
            ("request_prompt_tokens", 1),
            ("request_generation_tokens", 1),
        ):
            assert vllm(f"{histogram}_count") == count
            assert vllm(f"{histogram}_bucket", le="+Inf") == count
        # a busy server may send the first tokens together: nobody saw the time between those
        between = vllm("inter_token_latency_seconds_count")
        assert 30 <= between <= 39
        assert vllm("inter_token_latency_seconds_bucket", le="+Inf") == between
        client.complete(prompt="abcabcab" * 9)
        client.complete(prompt="abcabcab" * 9)
        told = samples(client.get("/metrics").text)
        block = client.engine.block_manager.block_size
        for name in ("prefix_cache_queries_total", "prefix_cache_hits_total"):
            own = told[f"eyas_{name}", frozenset()]
            assert own > 0
            assert vllm(name) == own * block  # in tokens


@pytest.mark.parametrize(("names", "own", "vllm"), [("eyas", True, False), ("vllm", False, True), ("both", True, True)])
def test_the_operator_chooses_the_metric_names(new_server: Any, names: str, own: bool, vllm: bool) -> None:
    with new_server(metrics_names=names) as client:
        client.complete()
        text = client.get("/metrics").text
        assert ("\neyas_generation_tokens_total" in text) == own
        assert ("\nvllm:generation_tokens_total" in text) == vllm


def test_eyas_bench_counts_once(new_server: Any) -> None:
    with new_server() as client:
        figures = client.complete(**DRAFTED).json["usage"]["speculative"]
        counters = read_counters(client.get("/metrics").text)
        assert counters is not None
        assert counters.generated == 40
        assert counters.draft_counts is not None
        assert counters.draft_counts.drafts == figures["drafts"]
        assert list(counters.draft_counts.accepted_at) == figures["accepted_by_depth"]


@each("path", ["chat", "complete"])
def test_an_answer_has_vllms_acceptance_metrics(client: Any, path: str) -> None:
    ask = getattr(client, path)
    whole = ask(**DRAFTED).json
    told, own = whole["metrics"]["speculative_decoding"], whole["usage"]["speculative"]
    assert told["num_spec_tokens"] == 3
    assert len(told["acceptance_histogram"]) == 4
    assert told["num_spec_steps"] == sum(told["acceptance_histogram"]) == own["drafts"]
    assert told["num_accepted_draft_tokens"] == own["accepted_tokens"]
    assert sum(count * at for at, count in enumerate(told["acceptance_histogram"])) == own["accepted_tokens"]
    assert told["num_draft_tokens"] == own["drafted_tokens"]
    assert told["mean_acceptance_length"] == pytest.approx(1 + own["accepted_tokens"] / own["drafts"])
    assert told["draft_acceptance_rate"] == pytest.approx(own["accepted_tokens"] / own["drafted_tokens"])
    assert "per_step_accepted" not in told
    last = ask(**DRAFTED, stream=True, stream_options={"include_usage": True}).events[-1]
    assert last["metrics"] == whole["metrics"]
    # A client that knows vLLM alone reads the same from it.
    assert draft_counts_of_event({"metrics": whole["metrics"]}) == draft_counts_of_event(whole)


@each("path", ["chat", "complete"])
def test_counts_come_with_every_chunk_if_they_are_asked_for(client: Any, path: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = getattr(client, path)(**DRAFTED, stream=True, stream_options=options).events
    made = [event["usage"]["completion_tokens"] for event in events]
    assert made == sorted(made)
    assert made[-2:] == [40, 40]
    assert all(
        event["usage"]["total_tokens"] == event["usage"]["prompt_tokens"] + n
        for event, n in zip(events, made, strict=True)
    )
    events = getattr(client, path)(stream=True, stream_options=options | {"include_usage": False}).events
    assert not any("usage" in event for event in events)  # as vLLM: it needs include_usage


def test_details_list_every_step(client: Any) -> None:
    speculative = {"mode": "fixed", "depth": 2, "details": True}
    told = client.complete(**DRAFTED | {"speculative": speculative}).json["metrics"]["speculative_decoding"]
    assert len(told["per_step_accepted"]) == len(told["per_step_drafted"]) == told["num_spec_steps"]
    assert sum(told["per_step_accepted"]) == told["num_accepted_draft_tokens"]
    assert sum(told["per_step_drafted"]) == told["num_draft_tokens"]


def test_several_answers_and_plain_ones_have_no_acceptance_metrics(client: Any) -> None:
    assert "metrics" not in client.complete(n=2).json
    assert "metrics" not in client.complete(speculative={"mode": "off"}).json
    assert client.complete().json["metrics"]["speculative_decoding"]["num_spec_tokens"] == 7
