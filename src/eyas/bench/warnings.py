"""Warnings about the figures of a bench, found in its rows."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from eyas.bench.experiment import ExperimentConfig
from eyas.bench.load import BUSY
from eyas.bench.measures import row_label
from eyas.bench.variants import PLAIN

Row = Mapping[str, Any]
UNLIKE = 0.1
"""Difference of prefix cache hit rates from which times to the first token do not compare."""
OTHERS = 0.03
"""Share of tokens beyond our own from which another client must have used the server."""


def find_warnings(config: ExperimentConfig, rows: Sequence[Row]) -> list[str]:
    """All warnings, the gravest first."""
    return [
        *_failures(rows),
        *_client(rows),
        *_others(rows),
        *_caches(rows),
        *_texts(config, rows),
        *_workload(config),
        *_variation(rows),
    ]


def _failures(rows: Sequence[Row]) -> Iterator[str]:
    for row in rows:
        if row["failed"]:
            first = next(iter(row["failures"]))
            asked = row["failed"] + row["requests"]
            yield f"{row_label(row)}: {row['failed']} of {asked} requests failed and are left out: {first}"
        if not row["whole"]:
            yield f"{row_label(row)}: interrupted; figures cover the {row['requests']} answers until then"


def _client(rows: Sequence[Row]) -> Iterator[str]:
    for row in rows:
        client, gap = row["client"], row["chunk_gap_ms"]["p50"]
        if client["cpu_share"] >= BUSY:
            yield (
                f"{row_label(row)}: the client itself used {client['cpu_share']:.0%} of a core, a bottleneck; "
                "run it on another machine or with fewer users"
            )
        late = client["late_ms"]["p99"]
        if late is not None and gap is not None and late > max(5.0, gap / 2):
            yield (
                f"{row_label(row)}: the client woke up to {late:.0f} ms late where chunks came every {gap:.0f} ms: "
                "percentiles of gaps include the client's own delays"
            )


def _others(rows: Sequence[Row]) -> Iterator[str]:
    for row in rows:
        counted, own = row["server_counted_tokens"], row["output_tokens"]
        if counted is not None and not row["failed"] and counted > own * (1 + OTHERS) + 8:
            yield (
                f"{row_label(row)}: the server made {counted} tokens and we got {own}: somebody else was asking it too"
            )


def _caches(rows: Sequence[Row]) -> Iterator[str]:
    plain = {(row["server"], row["users"], row["rate"]): row for row in rows if row["mode"] == PLAIN}
    for row in rows:
        other = plain.get((row["server"], row["users"], row["rate"]))
        if other is None or other is row or None in (row["prefix_cache_share"], other["prefix_cache_share"]):
            continue
        if abs(row["prefix_cache_share"] - other["prefix_cache_share"]) > UNLIKE:
            yield (
                f"{row_label(row)}: its prefix cache held {row['prefix_cache_share']:.0%} of the prompts, the plain "
                f"one's {other['prefix_cache_share']:.0%}: times to the first token do not compare"
            )


def _texts(config: ExperimentConfig, rows: Sequence[Row]) -> Iterator[str]:
    if config.options.temperature > 0:
        return
    for row in rows:
        found = row["same_as_plain"]
        if found and found["same"] < found["of"]:
            again = row["same_again"]
            own = f"; of its own answers it repeats {again['same']} of {again['of']}" if again else ""
            yield (
                f"{row_label(row)}: {found['of'] - found['same']} of {found['of']} greedy answers are not those "
                f"without speculation, for instance {found['different'][0]}{own}"
            )


def _workload(config: ExperimentConfig) -> Iterator[str]:
    for source in config.workload.sources:
        if source.left_out:
            count = source.read + len(source.left_out)
            yield (
                f"{source.path}: {len(source.left_out)} of {count} records left out, the first: {source.left_out[0]}"
            )
    most = max((load.users or 0 for load in config.loads), default=0)
    if most > len(config.workload.tasks):
        yield f"{most} users share {len(config.workload.tasks)} conversations: some never ask; give more prompts"
    elif most and len(config.workload.tasks) < 2 * most:
        yield f"{most} users have less than two conversations each: much of a run is its beginning and end"


def _variation(rows: Sequence[Row]) -> Iterator[str]:
    for row in rows:
        found = row["tokens_per_second"]
        if found and found["median"] and (found["high"] - found["low"]) / found["median"] > 0.25:
            yield (
                f"{row_label(row)}: repetitions lie between {found['low']:.1f} and {found['high']:.1f} tokens/s: "
                "the machine is unsteady; repeat more often"
            )
