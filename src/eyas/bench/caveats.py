"""What a reader must know before believing the figures: found in the rows, said in words."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from eyas.bench.experiment import Plan
from eyas.bench.strain import BUSY
from eyas.bench.variants import PLAIN

Row = Mapping[str, Any]
UNLIKE = 0.1
"""Prefix caches that differ by this share make times to the first token incomparable."""
OTHERS = 0.03
"""More tokens than this share beyond our own, and somebody else was asking."""


def caveats(plan: Plan, rows: Sequence[Row]) -> list[str]:
    """All of them, the gravest first."""
    return [
        *_failures(rows),
        *_client(rows),
        *_others(rows),
        *_caches(rows),
        *_texts(plan, rows),
        *_workload(plan),
        *_variation(rows),
    ]


def words_of(row: Row) -> str:
    """A row's name."""
    load = f"{row['rate']:g}/s" if row["users"] is None else f"{row['users']} user{'s' if row['users'] != 1 else ''}"
    return f"{row['server']}, {row['mode']}, {load}"


def _failures(rows: Sequence[Row]) -> Iterator[str]:
    for row in rows:
        if row["failed"]:
            first = next(iter(row["failures"]))
            asked = row["failed"] + row["requests"]
            yield f"{words_of(row)}: {row['failed']} of {asked} requests failed and are in no figure: {first}"
        if not row["whole"]:
            yield f"{words_of(row)}: broken off; figures are of the {row['requests']} answers until then"


def _client(rows: Sequence[Row]) -> Iterator[str]:
    for row in rows:
        client, gap = row["client"], row["chunk_gap_ms"]["p50"]
        if client["cpu_share"] >= BUSY:
            yield (
                f"{words_of(row)}: the client itself used {client['cpu_share']:.0%} of a core, a bottleneck; "
                "run it on another machine or with fewer users"
            )
        late = client["late_ms"]["p99"]
        if late is not None and gap is not None and late > max(5.0, gap / 2):
            yield (
                f"{words_of(row)}: the client woke up to {late:.0f} ms late where chunks came every {gap:.0f} ms: "
                "percentiles of gaps are its own as much as the server's"
            )


def _others(rows: Sequence[Row]) -> Iterator[str]:
    for row in rows:
        counted, own = row["server_counted_tokens"], row["output_tokens"]
        if counted is not None and not row["failed"] and counted > own * (1 + OTHERS) + 8:
            yield f"{words_of(row)}: the server made {counted} tokens and we got {own}: somebody else was asking it too"


def _caches(rows: Sequence[Row]) -> Iterator[str]:
    plain = {(row["server"], row["users"], row["rate"]): row for row in rows if row["mode"] == PLAIN}
    for row in rows:
        other = plain.get((row["server"], row["users"], row["rate"]))
        if other is None or other is row or None in (row["prefix_cache_share"], other["prefix_cache_share"]):
            continue
        if abs(row["prefix_cache_share"] - other["prefix_cache_share"]) > UNLIKE:
            yield (
                f"{words_of(row)}: its prefix cache held {row['prefix_cache_share']:.0%} of the prompts, the plain "
                f"one's {other['prefix_cache_share']:.0%}: times to the first token do not compare"
            )


def _texts(plan: Plan, rows: Sequence[Row]) -> Iterator[str]:
    if plan.asking.temperature > 0:
        return
    for row in rows:
        found = row["same_as_plain"]
        if found and found["same"] < found["of"]:
            again = row["same_again"]
            own = f"; of its own answers it repeats {again['same']} of {again['of']}" if again else ""
            yield (
                f"{words_of(row)}: {found['of'] - found['same']} of {found['of']} greedy answers are not those without "
                f"speculation, for instance {found['different'][0]}{own}"
            )


def _workload(plan: Plan) -> Iterator[str]:
    for source in plan.workload.sources:
        if source.left_out:
            count = source.read + len(source.left_out)
            yield (
                f"{source.path}: {len(source.left_out)} of {count} records left out, the first: {source.left_out[0]}"
            )
    most = max((load.users or 0 for load in plan.loads), default=0)
    if most > len(plan.workload.tasks):
        yield f"{most} users share {len(plan.workload.tasks)} conversations: some never ask; give more prompts"
    elif most and len(plan.workload.tasks) < 2 * most:
        yield f"{most} users have less than two conversations each: much of a run is its beginning and end"


def _variation(rows: Sequence[Row]) -> Iterator[str]:
    for row in rows:
        found = row["tokens_per_second"]
        if found and found["median"] and (found["high"] - found["low"]) / found["median"] > 0.25:
            yield (
                f"{words_of(row)}: repetitions lie between {found['low']:.1f} and {found['high']:.1f} tokens/s: "
                "a restless machine; repeat more often"
            )
