"""Counters on metrics pages of vLLM, eyas and SGLang, of several engines, and of a restarted server."""

from eyas.bench.counters import Counters, DraftCounts, read_counters
from fake_openai import GENERATED, VLLM_METRICS


def vllm(drafts: int, accepted: int, at: tuple[int, int], tokens: int = 0) -> str:
    return GENERATED.format(tokens=tokens) + VLLM_METRICS.format(
        drafts=drafts, drafted=3 * drafts, accepted=accepted, at=at
    )


def read(text: str) -> Counters:
    found = read_counters(text)
    assert found is not None
    return found


def test_counters_of_vllm_are_read() -> None:
    found = read(vllm(10, 12, (7, 5), tokens=22))
    assert found.draft_counts == DraftCounts(drafts=10, drafted=30, accepted=12, accepted_at=(7, 5))
    assert found.generated == 22


def test_several_engines_are_added() -> None:
    text = vllm(10, 12, (7, 5)) + vllm(5, 2, (1, 1)).replace('engine="0"', 'engine="1"')
    found = read(text)
    assert found.draft_counts is not None
    assert (found.draft_counts.drafts, found.draft_counts.accepted_at) == (15, (8, 6))


def test_counters_are_subtracted() -> None:
    before, after = read(vllm(10, 12, (7, 5), 22)), read(vllm(30, 32, (17, 15), 72))
    grown = after.since(before)
    assert grown is not None
    assert grown.generated == 50
    assert grown.draft_counts == DraftCounts(drafts=20, drafted=60, accepted=20, accepted_at=(10, 10))
    assert before.since(after) is None  # counts that shrink are another process's


def test_vllm_without_speculation_has_no_draft_counts() -> None:
    found = read(GENERATED.format(tokens=5))
    assert found.draft_counts is None
    assert found.generated == 5


def test_counters_of_eyas_are_read() -> None:
    from eyas.engine.output import SpecDecodeStats
    from eyas.serve.engine_client import EngineSnapshot
    from eyas.serve.monitoring.metrics import ServerMetrics

    stats = SpecDecodeStats(
        passes=10,
        tokens=20,
        drafts=8,
        drafted=24,
        accepted=12,
        accepted_at=[6, 4, 2],
        suffix_drafted=9,
        suffix_accepted=5,
    )
    snapshot = EngineSnapshot(stats=stats, prefix_lookups=10, prefix_hits=4)
    found = read(ServerMetrics("m").render(snapshot).decode())
    assert found.draft_counts == DraftCounts(
        drafts=8, drafted=24, accepted=12, accepted_at=(6, 4, 2), suffix_drafted=9, suffix_accepted=5
    )
    assert (found.prefix_hits, found.prefix_queries) == (4, 10)


def test_the_running_average_of_sglang_is_kept() -> None:
    text = '# TYPE sglang:spec_accept_length gauge\nsglang:spec_accept_length{tp_rank="0"} 2.9\n'
    found = read(text)
    assert found.running_average == 2.9
    assert found.draft_counts is None


def test_other_pages_have_no_counters() -> None:
    assert read_counters("process_cpu_seconds_total 3\n") is None
    assert read_counters("<html>{</html>") is None
