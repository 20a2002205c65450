"""From runs to rows: one row for each server, mode and load. The formulas are in docs/bench.md."""

from collections.abc import Mapping, Sequence
from typing import Any

from eyas.bench.counters import Counters
from eyas.bench.draft_counts import DraftCounts, pooled
from eyas.bench.experiment import Run
from eyas.bench.load import Load
from eyas.bench.statistics import Json, percentiles, spread
from eyas.bench.stream import StreamedAnswer
from eyas.bench.variants import PLAIN

Place = tuple[str, int]
"""A conversation's key and the turn."""
NAMED = 5
"""So many answers that differ are named."""


def make_rows(runs: Sequence[Run]) -> list[Json]:
    """All rows, in the order they were first measured."""
    cells: dict[tuple[str, str, str], list[Run]] = {}
    for run in runs:
        cells.setdefault((run.variant.name, run.variant.mode, run.load.label), []).append(run)
    return [_row(own, cells.get((name, PLAIN, load), [])) for (name, _, load), own in cells.items()]


def row_label(row: Mapping[str, Any]) -> str:
    """A row's name."""
    return f"{row['server']}, {row['mode']}, {Load(users=row['users'], rate=row['rate']).label}"


def _row(runs: Sequence[Run], baseline: Sequence[Run]) -> Json:
    """Whole runs count; broken ones only where there is nothing else, and the row says so."""
    used = [run for run in runs if run.whole] or list(runs)
    first = used[0]
    good = [answer for run in used for answer in run.answers if answer.error is None]
    failed = [answer for run in used for answer in run.answers if answer.error is not None]
    is_baseline = first.variant.mode == PLAIN
    return {
        "server": first.variant.name,
        "mode": first.variant.mode,
        "users": first.load.users,
        "rate": first.load.rate,
        "whole": all(run.whole for run in used),
        "repetitions": len(used),
        "requests": len(good),
        "failed": len(failed),
        "failures": _failures(failed),
        "output_tokens": sum(answer.tokens for answer in good),
        "prompt_tokens": sum(answer.prompt_tokens for answer in good),
        "tokens_per_second": spread([throughput(run) for run in used if run.seconds > 0]),
        "user_tokens_per_second": spread([speed for run in used if (speed := user_speed(run.answers)) is not None]),
        "requests_per_second": spread([len(_good(run)) / run.seconds for run in used if run.seconds > 0]),
        "request_tokens_per_second": percentiles([a.tokens / a.seconds for a in good if a.seconds > 0]),
        "time_to_first_token_ms": percentiles(
            [a.time_to_first_token for a in good if a.time_to_first_token is not None], scale=1e3
        ),
        "time_per_output_token_ms": percentiles(
            [a.time_per_output_token for a in good if a.time_per_output_token is not None], scale=1e3
        ),
        "inter_token_latency_ms": percentiles([gap for a in good for gap in a.event_gaps], scale=1e3),
        "chunk_gap_ms": percentiles([gap for a in good for gap in a.chunk_gaps], scale=1e3),
        "latency_ms": percentiles([a.seconds for a in good], scale=1e3),
        "tokens_per_chunk": round(sum(a.tokens for a in good) / chunks, 4) if (chunks := _chunks(good)) else None,
        "acceptance": acceptance(used),
        "server_counted_tokens": _generated(used),
        "prefix_cache_share": _prefix_share([run.counters for run in used]),
        "against_plain": None if is_baseline else _against(used, baseline),
        "same_as_plain": None if is_baseline else _compared(used, baseline),
        "same_again": _repeated(used),
        "categories": _categories(good),
        "client": {
            "cpu_share": round(max(run.client_cpu_share for run in used), 4),
            "late_ms": percentiles([late for run in used for late in run.client_late], scale=1e3),
        },
    }


def throughput(run: Run) -> float:
    """Output tokens of the whole server per second."""
    return sum(answer.tokens for answer in _good(run)) / run.seconds


def user_speed(answers: Sequence[StreamedAnswer]) -> float | None:
    """Output tokens per second that a user has who waits for an answer, the wait for its first token included."""
    good = [answer for answer in answers if answer.error is None]
    waited = sum(answer.seconds for answer in good)
    return sum(answer.tokens for answer in good) / waited if waited > 0 else None


def acceptance(runs: Sequence[Run]) -> Json:
    """Pooled over requests where they tell, else from the server's counts; and how it differs between requests."""
    answers = [answer for run in runs for answer in _good(run)]
    told = pooled(answer.draft_counts for answer in answers)
    # What the requests tell is theirs alone; counts of the server include whoever else asks.
    counted = pooled(run.counters.draft_counts if run.counters is not None else None for run in runs)
    source, found = (
        ("responses", told) if told is not None else ("metrics", counted) if counted is not None else (None, None)
    )
    lengths = [
        a.draft_counts.length for a in answers if a.draft_counts is not None and a.draft_counts.length is not None
    ]
    average = next((run.counters.running_average for run in reversed(runs) if run.counters is not None), None)
    return {
        "source": source,
        **draft_counts_json(found),
        "per_request": percentiles(lengths),
        "server_counted": None if counted is None else draft_counts_json(counted),
        "running_average": average,
    }


def draft_counts_json(found: DraftCounts | None) -> Json:
    """Counts and what follows from them."""
    found = found or DraftCounts()
    return {
        "length": None if found.length is None else round(found.length, 4),
        "by_depth": [round(share, 4) for share in found.by_depth],
        "drafts": found.drafts,
        "drafted_tokens": found.drafted,
        "accepted_tokens": found.accepted,
        "accepted_by_depth": list(found.accepted_at),
        "suffix_drafted_tokens": found.suffix_drafted,
        "suffix_accepted_tokens": found.suffix_accepted,
    }


def _against(runs: Sequence[Run], baseline: Sequence[Run]) -> Json | None:
    """Ratios to the plain run of the same repetition, where the machine was in the same mood."""
    plain = {run.repetition: run for run in baseline if run.whole and run.seconds > 0}
    pairs = [(run, plain[run.repetition]) for run in runs if run.repetition in plain and run.seconds > 0]
    if not pairs:
        return None
    speeds = [(user_speed(run.answers), user_speed(other.answers)) for run, other in pairs]
    return {
        "tokens_per_second": spread([throughput(run) / throughput(other) for run, other in pairs if throughput(other)]),
        "user_tokens_per_second": spread([own / other for own, other in speeds if own is not None and other]),
    }


def _compared(runs: Sequence[Run], baseline: Sequence[Run]) -> Json | None:
    plain = {run.repetition: run for run in baseline}
    pairs = [(run, plain[run.repetition]) for run in runs if run.repetition in plain]
    return _agreement(pairs) if pairs else None


def _repeated(runs: Sequence[Run]) -> Json | None:
    """Against the first repetition: what a server does not repeat itself cannot be asked of its drafter."""
    return _agreement([(run, runs[0]) for run in runs[1:]]) if len(runs) > 1 else None


def _agreement(pairs: Sequence[tuple[Run, Run]]) -> Json:
    """How many answers are the same. After the first that differs, a conversation is another one and not compared."""
    same = of = 0
    different: dict[str, None] = {}
    for run, other in pairs:
        own, theirs = _texts(run), _texts(other)
        gone: set[str] = set()
        for place in sorted(own.keys() & theirs.keys(), key=lambda place: place[1]):
            if place[0] in gone:
                continue
            of += 1
            if own[place] == theirs[place]:
                same += 1
            else:
                gone.add(place[0])
                different[f"{place[0]} turn {place[1]}"] = None
    return {"same": same, "of": of, "different": list(different)[:NAMED]}


def _texts(run: Run) -> Mapping[Place, str]:
    return {(answer.key, answer.turn): answer.text for answer in _good(run)}


def _categories(answers: Sequence[StreamedAnswer]) -> Json:
    names = sorted({answer.category for answer in answers})
    table: Json = {}
    for name in names:
        own = [answer for answer in answers if answer.category == name]
        speed, draft_counts = user_speed(own), pooled(answer.draft_counts for answer in own)
        table[name] = {
            "requests": len(own),
            "output_tokens": sum(answer.tokens for answer in own),
            "user_tokens_per_second": None if speed is None else round(speed, 4),
            "tokens_per_chunk": round(sum(a.tokens for a in own) / chunks, 4) if (chunks := _chunks(own)) else None,
            "acceptance_length": draft_counts_json(draft_counts)["length"],
        }
    return table


def _prefix_share(counted: Sequence[Counters | None]) -> float | None:
    asked = sum(one.prefix_queries for one in counted if one is not None)
    return round(sum(one.prefix_hits for one in counted if one is not None) / asked, 4) if asked else None


def _generated(runs: Sequence[Run]) -> int | None:
    counts = [run.counters.generated if run.counters is not None else None for run in runs]
    return None if None in counts else sum(count or 0 for count in counts)


def _failures(failed: Sequence[StreamedAnswer]) -> dict[str, int]:
    words: dict[str, int] = {}
    for answer in failed:
        words[str(answer.error)] = words.get(str(answer.error), 0) + 1
    return dict(sorted(words.items(), key=lambda pair: -pair[1])[:NAMED])


def _chunks(answers: Sequence[StreamedAnswer]) -> int:
    return sum(answer.chunks for answer in answers)


def _good(run: Run) -> list[StreamedAnswer]:
    return [answer for answer in run.answers if answer.error is None]


def requests_json(run: Run) -> list[Json]:
    """Every request of a run, without its text."""
    rows: list[Json] = []
    for answer in sorted(run.answers, key=lambda answer: answer.sent):
        own: dict[str, Any] = {"key": answer.key, "category": answer.category, "turn": answer.turn}
        own["sent"] = round(answer.sent, 4)
        if answer.error is not None:
            rows.append(own | {"error": answer.error})
            continue
        length = None if answer.draft_counts is None else answer.draft_counts.length
        rows.append(
            own
            | {
                "tokens": answer.tokens,
                "prompt_tokens": answer.prompt_tokens,
                "first_ms": None if answer.time_to_first_token is None else round(answer.time_to_first_token * 1e3, 2),
                "latency_ms": round(answer.seconds * 1e3, 2),
                "chunks": answer.chunks,
                "acceptance_length": None if length is None else round(length, 4),
                "text_sha256": answer.digest,
            }
        )
    return rows
