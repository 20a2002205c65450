"""The table of a bench tells who proposed what was accepted."""

from typing import Any

import pytest

from eyas.bench.counters import DraftCounts, draft_counts_of_event, pooled
from eyas.bench.measures import draft_counts_json
from eyas.cli.bench import print_bench

SPREAD = {"median": 2.0, "low": 1.0, "high": 3.0, "all": [1.0, 2.0, 3.0]}
TAIL = {"count": 1, "mean": 1.0, "p50": 1.0, "p90": 1.0, "p95": 1.0, "p99": 1.0}


def counts(suffix: int) -> DraftCounts:
    told = {"drafts": 10, "drafted_tokens": 40, "accepted_tokens": 30, "accepted_by_depth": [10, 10, 10]}
    sources = {"suffix_drafted_tokens": suffix, "suffix_accepted_tokens": suffix}
    made = draft_counts_of_event({"usage": {"speculative": told | sources}})
    assert made is not None
    return made


def record(found: DraftCounts) -> dict[str, Any]:
    row = {
        "server": "eyas",
        "mode": "speculative",
        "users": 1,
        "rate": None,
        "whole": True,
        "failed": 0,
        "against_plain": None,
        "same_as_plain": None,
        "acceptance": draft_counts_json(found),
        "client": {"cpu_share": 0.1},
        **dict.fromkeys(("tokens_per_second", "user_tokens_per_second"), SPREAD),
        **dict.fromkeys(("time_to_first_token_ms", "time_per_output_token_ms", "chunk_gap_ms"), TAIL),
    }
    return {
        "workload": {"conversations": 1},
        "plan": {"max_tokens": 8, "temperature": 0.0, "repetitions": 1},
        "rows": [row],
        "warnings": [],
    }


def test_accepted_suffix_drafts_are_told_where_there_are_any(capsys: pytest.CaptureFixture[str]) -> None:
    print_bench(record(counts(12)))
    assert "12 of 30 accepted tokens were suffix drafts" in capsys.readouterr().out
    print_bench(record(counts(0)))
    assert "suffix" not in capsys.readouterr().out


def test_counts_by_source_add_up_and_are_told_since_an_earlier_time() -> None:
    both = pooled([counts(12), counts(5)])
    assert both is not None
    assert (both.suffix_drafted, both.suffix_accepted) == (17, 17)
    assert both.since(counts(5)) == counts(12)
