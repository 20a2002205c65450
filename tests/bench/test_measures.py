"""Rows follow the formulas of docs/bench.md, worked out by hand here."""

from typing import Any

import pytest

from eyas.bench.compare import compare
from eyas.bench.counters import Counters, DraftCounts
from eyas.bench.experiment import Run
from eyas.bench.load import Load
from eyas.bench.measures import make_rows, percentiles, spread
from eyas.bench.server import ServerInfo
from eyas.bench.stream import StreamedAnswer
from eyas.bench.variants import OFF, PLAIN, SPECULATIVE, Variant, list_variants
from eyas.errors import UserError
from eyas.remote.address import Address


def server(**changes: Any) -> ServerInfo:
    given = {"name": "s", "address": Address.of("http://h:1"), "model": "m", "kind": "eyas", "card": {}}
    return ServerInfo(**{**given, "version": None, "drafts": True, **changes})


def answer(key: str = "a", **changes: Any) -> StreamedAnswer:
    given = {"category": "c", "turn": 1, "sent": 0.0, "first": 1.0, "last": 3.0, "text": key, "tokens": 5}
    return StreamedAnswer(key=key, **{**given, **changes})


def run(*answers: StreamedAnswer, mode: str = SPECULATIVE, seconds: float = 4.0, **changes: Any) -> Run:
    given = {"load": Load(users=2), "repetition": 0, "whole": True, "counters": None, "client_cpu_share": 0.1}
    given |= {"client_late": (0.001,)}
    variant = Variant(name="s", mode=mode, server=server())
    return Run(variant=variant, answers=answers, seconds=seconds, **{**given, **changes})


def test_throughput_and_the_speed_of_a_user() -> None:
    (row,) = make_rows([run(answer("a"), answer("b", sent=1.0, first=2.0, last=5.0, tokens=15))])
    assert row["tokens_per_second"]["median"] == 5.0  # 20 tokens in 4 seconds
    assert row["user_tokens_per_second"]["median"] == pytest.approx(20 / 7, abs=1e-4)  # waited for 3 + 4 seconds
    assert row["time_to_first_token_ms"]["mean"] == 1000.0
    assert row["time_per_output_token_ms"]["mean"] == pytest.approx((2 / 4 + 3 / 14) / 2 * 1e3, abs=1e-3)
    assert row["latency_ms"]["count"] == 2


def test_failed_answers_are_counted_but_not_measured() -> None:
    failed = StreamedAnswer(key="b", category="c", turn=1, sent=0.0, error="500: oh")
    (row,) = make_rows([run(answer(), failed)])
    assert (row["requests"], row["failed"], row["failures"]) == (1, 1, {"500: oh": 1})
    assert row["tokens_per_second"]["median"] == 5 / 4


def test_repetitions_give_a_median_and_a_spread_and_ratios_are_by_repetition() -> None:
    speeds = {SPECULATIVE: (4.0, 2.0, 8.0), PLAIN: (8.0, 4.0, 8.0)}  # seconds; the ratios are 2, 2 and 1
    runs = [
        run(answer(), mode=mode, seconds=seconds[i], repetition=i) for i in range(3) for mode, seconds in speeds.items()
    ]
    fast, plain = make_rows(runs)
    assert fast["tokens_per_second"] == {"median": 1.25, "low": 0.625, "high": 2.5, "all": [1.25, 2.5, 0.625]}
    assert fast["against_plain"]["tokens_per_second"]["all"] == [2.0, 2.0, 1.0]
    assert plain["against_plain"] is None
    assert fast["same_as_plain"] == {"same": 3, "of": 3, "different": []}


def test_conversations_are_not_compared_after_a_difference() -> None:
    def talk(first: str, second: str, mode: str) -> Run:
        return run(answer("k", text=first), answer("k", turn=2, text=second), answer("l"), mode=mode)

    fast, _ = make_rows([talk("x", "y", SPECULATIVE), talk("z", "w", PLAIN)])
    assert fast["same_as_plain"] == {"same": 1, "of": 2, "different": ["k turn 1"]}
    fast, _ = make_rows([talk("x", "y", SPECULATIVE), talk("x", "w", PLAIN)])
    assert fast["same_as_plain"] == {"same": 2, "of": 3, "different": ["k turn 2"]}


def test_acceptance_comes_from_responses_or_else_from_metrics() -> None:
    counted = Counters(
        draft_counts=DraftCounts(drafts=100, drafted=200, accepted=100, accepted_at=(70, 30)), generated=5
    )
    told = DraftCounts(drafts=10, drafted=20, accepted=12, accepted_at=(7, 5))
    (row,) = make_rows([run(answer(), counters=counted)])
    assert row["acceptance"]["source"] == "metrics"
    assert (row["acceptance"]["length"], row["acceptance"]["by_depth"]) == (2.0, [0.7, 0.3])
    (row,) = make_rows([run(answer(draft_counts=told), answer("b", draft_counts=DraftCounts()), counters=counted)])
    found = row["acceptance"]
    assert (found["source"], found["length"], found["by_depth"]) == ("responses", 2.2, [0.7, 0.5])
    assert found["per_request"]["count"] == 1  # nothing was drafted for the other
    assert found["server_counted"]["length"] == 2.0


def test_a_broken_run_counts_only_without_a_whole_one() -> None:
    whole, broken = run(answer(), seconds=1.0), run(answer(), seconds=2.0, whole=False, repetition=1)
    (row,) = make_rows([whole, broken])
    assert row["whole"]
    assert row["repetitions"] == 1
    assert row["tokens_per_second"]["median"] == 5.0
    (row,) = make_rows([broken])
    assert not row["whole"]
    assert row["tokens_per_second"]["median"] == 2.5


def test_categories_are_kept() -> None:
    (row,) = make_rows([run(answer("a"), answer("b", category="d", tokens=30))])
    assert {name: own["user_tokens_per_second"] for name, own in row["categories"].items()} == {"c": 1.6667, "d": 10.0}


def test_percentiles_are_numpys_with_a_count() -> None:
    found = percentiles([float(value) for value in range(101)], scale=2.0)
    assert (found["count"], found["p50"], found["p99"]) == (101, 100.0, 198.0)
    assert percentiles([])["p50"] is None
    assert spread([]) is None


def test_eyas_is_its_own_baseline_and_others_need_a_second_server() -> None:
    assert [(v.mode, v.extra) for v in list_variants([server()], {}, baseline=True)] == [
        (SPECULATIVE, {}),
        (PLAIN, OFF),
    ]
    assert [v.mode for v in list_variants([server()], {}, baseline=False)] == [SPECULATIVE]
    assert [v.mode for v in list_variants([server(drafts=False)], {}, baseline=True)] == [PLAIN]
    assert [v.mode for v in list_variants([server(kind="vllm")], {}, baseline=True)] == [SPECULATIVE]
    other = server(kind="vllm", drafts=False)
    assert [v.mode for v in list_variants([server(kind="vllm")], {"s": other}, baseline=True)] == [SPECULATIVE, PLAIN]
    with pytest.raises(UserError, match="drafts itself"):
        list_variants([server(kind="vllm")], {"s": server(kind="vllm")}, baseline=True)
    with pytest.raises(UserError, match="its own baseline"):
        list_variants([server(kind="vllm", drafts=False)], {"s": other}, baseline=True)


def test_a_comparison_marks_changes_beyond_the_spread() -> None:
    def record(*speeds: float, **changes: Any) -> dict[str, Any]:
        rows = make_rows([run(answer(), seconds=5 / speed, repetition=i) for i, speed in enumerate(speeds)])
        plan = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": False, "prefill": True}
        own = {"workload": {"sha256": "x"}, "plan": plan, "host": {"cpu": "c"}, "servers": [{"model": "m"}]}
        return own | {"rows": rows, "runs": [], "whole": True} | changes

    found = compare(record(10, 11, 12), record(13, 14, 15))
    (row,) = found["rows"]
    assert row["tokens_per_second"] == {"before": 11.0, "after": 14.0, "ratio": 1.2727, "beyond_spread": True}
    assert found["differences"] == []
    assert compare(record(10, 14), record(12, 13))["rows"][0]["tokens_per_second"]["beyond_spread"] is False
    assert compare(record(10), record(20))["rows"][0]["tokens_per_second"]["beyond_spread"] is None  # no spread known
    other = compare(record(10), record(10, workload={"sha256": "y"}, host={"cpu": "d"}))
    assert other["differences"] == ["the prompts differ", "the client's CPU differs (c and d)"]
    with pytest.raises(UserError, match="nothing in common"):
        compare(record(10), record(10, rows=[]))
