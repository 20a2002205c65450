"""Rows of a bench: one for each server, mode and load. The formulas are in docs/bench.md."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np

from eyas.bench.counters import DraftCounts, pooled
from eyas.bench.experiment import Run
from eyas.bench.load import Load
from eyas.bench.stream import StreamedAnswer
from eyas.bench.variants import PLAIN

Json = dict[str, Any]
NAMED = 5
"""Number of differing answers, and of kinds of failures, that a row names."""
PERCENTILES = (50, 90, 95, 99)


def rounded(value: float | None) -> float | None:
    """A number as records have it."""
    return None if value is None else round(value, 4)


def spread(values: Iterable[float | None]) -> Json | None:
    """Median, lowest and highest over repetitions; None if there are none."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    return {
        "median": rounded(median(known)),
        "low": rounded(min(known)),
        "high": rounded(max(known)),
        "all": [rounded(value) for value in known],
    }


def percentiles(values: Iterable[float | None], *, scale: float = 1.0) -> Json:
    """Count, mean and percentiles, interpolated linearly."""
    known = [value for value in values if value is not None]
    if not known:
        return {"count": 0, "mean": None, **{f"p{share}": None for share in PERCENTILES}}
    scaled = np.asarray(known, dtype=np.float64) * scale
    found = np.percentile(scaled, PERCENTILES)
    return {
        "count": len(known),
        "mean": rounded(float(scaled.mean())),
        **{f"p{share}": rounded(float(value)) for share, value in zip(PERCENTILES, found, strict=True)},
    }


def make_rows(runs: Sequence[Run]) -> list[Json]:
    """All rows, in the order in which they were first measured."""
    cells: dict[tuple[str, str, str], list[Run]] = {}
    for run in runs:
        cells.setdefault((run.variant.name, run.variant.mode, run.load.label), []).append(run)
    return [_row(own, cells.get((name, PLAIN, load), [])) for (name, _, load), own in cells.items()]


def row_label(row: Mapping[str, Any]) -> str:
    """Server, mode and load of a row, in words."""
    return f"{row['server']}, {row['mode']}, {Load(users=row['users'], rate=row['rate']).label}"


def _row(runs: Sequence[Run], baseline: Sequence[Run]) -> Json:
    """The row of these runs; broken ones are used only if there is no whole one, and the row is marked."""
    used = [run for run in runs if run.whole] or list(runs)
    first = used[0]
    good = [answer for run in used for answer in run.good]
    failed = [answer for run in used for answer in run.answers if answer.error is not None]
    plain = {} if first.variant.mode == PLAIN else {run.repetition: run for run in baseline}
    pairs = [(run, plain[run.repetition]) for run in used if run.repetition in plain]
    counted = [run.counters for run in used if run.counters is not None]
    generated = [one.generated for one in counted if one.generated is not None]
    return {
        "server": first.variant.name,
        "mode": first.variant.mode,
        "users": first.load.users,
        "rate": first.load.rate,
        "whole": all(run.whole for run in used),
        "repetitions": len(used),
        "requests": len(good),
        "failed": len(failed),
        "failures": dict(Counter(str(answer.error) for answer in failed).most_common(NAMED)),
        "output_tokens": sum(answer.tokens for answer in good),
        "prompt_tokens": sum(answer.prompt_tokens for answer in good),
        "tokens_per_second": spread(throughput(run) for run in used),
        "user_tokens_per_second": spread(user_speed(run.answers) for run in used),
        "requests_per_second": spread(_ratio(len(run.good), run.seconds) for run in used),
        "request_tokens_per_second": percentiles(_ratio(a.tokens, a.seconds) for a in good),
        "time_to_first_token_ms": percentiles((a.time_to_first_token for a in good), scale=1e3),
        "time_per_output_token_ms": percentiles((a.time_per_output_token for a in good), scale=1e3),
        "inter_token_latency_ms": percentiles((gap for a in good for gap in a.event_gaps), scale=1e3),
        "chunk_gap_ms": percentiles((gap for a in good for gap in a.chunk_gaps), scale=1e3),
        "latency_ms": percentiles((a.seconds for a in good), scale=1e3),
        "tokens_per_chunk": _tokens_per_chunk(good),
        "acceptance": acceptance(used),
        "server_counted_tokens": sum(generated) if len(generated) == len(used) else None,
        "prefix_cache_share": rounded(
            _ratio(sum(one.prefix_hits for one in counted), sum(one.prefix_queries for one in counted))
        ),
        "against_plain": _against(pairs),
        "same_as_plain": _agreement(pairs),
        # A server that does not repeat its own answers cannot be expected to repeat those of plain decoding.
        "same_again": _agreement([(run, used[0]) for run in used[1:]]),
        "categories": _categories(good),
        "client": {
            "cpu_share": rounded(max(run.client_cpu_share for run in used)),
            "late_ms": percentiles((late for run in used for late in run.client_late), scale=1e3),
        },
    }


def throughput(run: Run) -> float | None:
    """Output tokens of the server per second."""
    return _ratio(sum(answer.tokens for answer in run.good), run.seconds)


def user_speed(answers: Sequence[StreamedAnswer]) -> float | None:
    """Output tokens per second of waiting for answers, time to the first token included."""
    good = [answer for answer in answers if answer.error is None]
    return _ratio(sum(answer.tokens for answer in good), sum(answer.seconds for answer in good))


def acceptance(runs: Sequence[Run]) -> Json:
    """Acceptance pooled over requests if responses report it, else from the server's counters."""
    own = [answer.draft_counts for run in runs for answer in run.good]
    told = pooled(own)
    # Counters of the server include other clients' requests.
    counted = pooled(run.counters.draft_counts if run.counters is not None else None for run in runs)
    source = "responses" if told is not None else "metrics" if counted is not None else None
    average = next((run.counters.running_average for run in reversed(runs) if run.counters is not None), None)
    return {
        "source": source,
        **draft_counts_json(told or counted),
        "per_request": percentiles(counts.length for counts in own if counts is not None),
        "server_counted": None if counted is None else draft_counts_json(counted),
        "running_average": average,
    }


def draft_counts_json(found: DraftCounts | None) -> Json:
    """Counts and the rates that follow, as JSON."""
    found = found or DraftCounts()
    return {
        "length": rounded(found.length),
        "by_depth": [rounded(share) for share in found.by_depth],
        "drafts": found.drafts,
        "drafted_tokens": found.drafted,
        "accepted_tokens": found.accepted,
        "accepted_by_depth": list(found.accepted_at),
        "suffix_drafted_tokens": found.suffix_drafted,
        "suffix_accepted_tokens": found.suffix_accepted,
    }


def _against(pairs: Sequence[tuple[Run, Run]]) -> Json | None:
    """Speed relative to the plain run of the same repetition, which met the machine in the same state."""
    pairs = [(run, plain) for run, plain in pairs if plain.whole and plain.seconds > 0 and run.seconds > 0]
    if not pairs:
        return None
    return {
        "tokens_per_second": spread(_ratio(throughput(run), throughput(plain)) for run, plain in pairs),
        "user_tokens_per_second": spread(
            _ratio(user_speed(run.answers), user_speed(plain.answers)) for run, plain in pairs
        ),
    }


def _agreement(pairs: Sequence[tuple[Run, Run]]) -> Json | None:
    """How many answers are equal. A conversation is not compared after its first difference."""
    if not pairs:
        return None
    same = of = 0
    different: dict[str, None] = {}
    for run, other in pairs:
        own, theirs = ({(answer.key, answer.turn): answer.text for answer in one.good} for one in (run, other))
        diverged: set[str] = set()
        for key, turn in sorted(own.keys() & theirs.keys(), key=lambda place: place[1]):
            if key in diverged:
                continue
            of += 1
            if own[key, turn] == theirs[key, turn]:
                same += 1
            else:
                diverged.add(key)
                different[f"{key} turn {turn}"] = None
    return {"same": same, "of": of, "different": list(different)[:NAMED]}


def _categories(answers: Sequence[StreamedAnswer]) -> Json:
    table: Json = {}
    for name in sorted({answer.category for answer in answers}):
        own = [answer for answer in answers if answer.category == name]
        table[name] = {
            "requests": len(own),
            "output_tokens": sum(answer.tokens for answer in own),
            "user_tokens_per_second": rounded(user_speed(own)),
            "tokens_per_chunk": _tokens_per_chunk(own),
            "acceptance_length": draft_counts_json(pooled(answer.draft_counts for answer in own))["length"],
        }
    return table


def _tokens_per_chunk(answers: Sequence[StreamedAnswer]) -> float | None:
    return rounded(_ratio(sum(answer.tokens for answer in answers), sum(answer.chunks for answer in answers)))


def _ratio(over: float | None, under: float | None) -> float | None:
    return None if over is None or under is None or under <= 0 else over / under


def requests_json(run: Run) -> list[Json]:
    """All requests of a run, without their texts."""
    rows: list[Json] = []
    for answer in sorted(run.answers, key=lambda answer: answer.sent):
        row: Json = {"key": answer.key, "category": answer.category, "turn": answer.turn, "sent": rounded(answer.sent)}
        if answer.error is not None:
            row["error"] = answer.error
        else:
            first = answer.time_to_first_token
            length = None if answer.draft_counts is None else answer.draft_counts.length
            row |= {
                "tokens": answer.tokens,
                "prompt_tokens": answer.prompt_tokens,
                "first_ms": None if first is None else round(first * 1e3, 2),
                "latency_ms": round(answer.seconds * 1e3, 2),
                "chunks": answer.chunks,
                "acceptance_length": rounded(length),
                "text_sha256": answer.digest,
            }
        rows.append(row)
    return rows
