"""HTML report of a bench record: one file that opens offline."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from eyas.bench.measures import row_label
from eyas.reports.charts import COLOURS, Axes, Figure, Line, line_chart
from eyas.reports.render import lead, render

Record = Mapping[str, Any]
Interval = tuple[float | None, float | None, float | None]
"""A value with the ends of its band."""
NOTHING: Interval = (None, None, None)
LEAST_REPETITIONS = 3
"""Two values have no median and no spread around it."""
FEW = f" (too few repetitions to know the spread; at least {LEAST_REPETITIONS})"


def render_report(record: Record) -> str:
    """The HTML file."""
    servers = list(dict.fromkeys(server["name"] for server in record["servers"]))
    rows = [{**row, "label": row_label(row), "ratio": _ratio(row)} for row in record["rows"]]
    files = [f"{file['path']} {file['sha256'][:12]}" for file in record["workload"]["files"]]
    compared = [row for row in rows if row["ratio"]]
    categories = sorted({name for row in rows for name in row["categories"]})
    contents = [("mind", "Before you believe it")] if record["warnings"] else []
    contents += [
        ("gain", "What drafting gains"),
        ("load", "By load"),
        ("figures", "Figures"),
        ("times", "Times"),
        ("categories", "By category"),
        ("again", "To measure it again"),
    ]
    return render(
        "bench.html.j2",
        title=" and ".join(servers),
        lead=_lead(rows, compared),
        contents=contents,
        compared=compared,
        few=FEW,
        least=LEAST_REPETITIONS,
        record=record,
        plan=record["plan"],
        workload=record["workload"],
        models=", ".join(dict.fromkeys(server["model"] for server in record["servers"])),
        kinds=", ".join(dict.fromkeys(f"{s['kind']} {s['version'] or ''}".strip() for s in record["servers"])),
        rows=rows,
        figures=list(_figures(rows, servers)),
        categories=categories,
        versions=" ".join(f"{key} {value}" for key, value in record["versions"].items() if value),
        files=", ".join(files) or "synthetic",
        servers=json.dumps(
            [{key: s[key] for key in ("name", "mode", "url", "command")} for s in record["servers"]], indent=1
        ),
        as_json=json.dumps(record["rows"], indent=1),
    )


def _lead(rows: Sequence[Record], compared: Sequence[Record]) -> Mapping[str, str]:
    """The first line of the report; a gain or loss counts if no repetition contradicts it."""
    if not rows:
        return lead("unknown", "Nothing was measured")
    if not compared:
        speeds = [row["user_tokens_per_second"]["median"] for row in rows if row["user_tokens_per_second"]]
        if not speeds:
            return lead("unknown", "No request was answered")
        return lead("note", f"A user has {_between(min(speeds), max(speeds), '.1f')} tokens/s; nothing to compare with")
    medians = [row["ratio"]["median"] for row in compared]
    told = f"{_between(min(medians), max(medians), '.2f')} times the tokens/s of a user without it"
    if min(row["repetitions"] for row in compared) < LEAST_REPETITIONS:
        return lead("unknown", f"Drafting seems to give {told}{FEW}")
    if min(row["ratio"]["low"] for row in compared) > 1:
        return lead("healthy", f"Drafting pays at every load: {told}")
    if max(row["ratio"]["high"] for row in compared) < 1:
        return lead("fault", f"Drafting costs at every load: {told}")
    paying = sum(row["ratio"]["low"] > 1 for row in compared)
    return lead("warning", f"Drafting pays in {paying} of {len(compared)} rows: {told}")


def _between(low: float, high: float, spec: str) -> str:
    one, other = format(low, spec), format(high, spec)
    return one if one == other else f"{one} to {other}"


def _ratio(row: Record) -> Record | None:
    """Tokens per second of a user relative to plain decoding."""
    against: Record | None = row["against_plain"]
    return None if against is None else against["user_tokens_per_second"]


def _figures(rows: Sequence[Record], servers: Sequence[str]) -> Iterator[Figure]:
    for key, across in (("users", "users at a time"), ("rate", "load (requests/s)")):
        own = [row for row in rows if row[key] is not None]
        if own:
            yield from _by_load(own, servers, key, across)
    lines = [line for place, server in enumerate(servers) if (line := _depths(server, rows, place % COLOURS))]
    if lines:
        names = [str(depth) for depth in range(1, max(len(line.y) for line in lines) + 1)]
        across, up = "depth (token of a draft)", "accepted drafts (%)"
        axes = Axes(across=across, up=up, y_min=0.0, y_max=1.0, percent=True, names=names)
        told = "Share of drafts whose token at this depth was accepted together with all before it, over all loads."
        yield Figure(title="Acceptance by depth", chart=line_chart(lines, axes), caption=told)


def _depths(server: str, rows: Sequence[Record], colour: int) -> Line | None:
    found = [row["acceptance"] for row in rows if row["server"] == server and row["acceptance"]["drafts"]]
    drafts = sum(one["drafts"] for one in found)
    counts = zip_longest(*(one["accepted_by_depth"] for one in found), fillvalue=0)
    shares = [sum(at) / drafts for at in counts]
    return Line(label=server, x=range(len(shares)), y=shares, colour=colour) if shares else None


def _by_load(rows: Sequence[Record], servers: Sequence[str], key: str, across: str) -> Iterator[Figure]:
    loads = sorted({row[key] for row in rows})
    modes = list(dict.fromkeys((row["server"], row["mode"]) for row in rows))
    modes.sort(key=lambda mode: servers.index(mode[0]))

    def line(server: str, mode: str, read: Callable[[Record], Interval]) -> Line:
        own = {row[key]: read(row) for row in rows if (row["server"], row["mode"]) == (server, mode)}
        value, low, high = zip(*(own.get(load, NOTHING) for load in loads), strict=True)
        return Line(
            label=f"{server}, {mode}",
            x=range(len(loads)),
            y=value,
            low=low,
            high=high,
            colour=modes.index((server, mode)) % COLOURS,
        )

    bands = "Medians over repetitions; bands reach from the lowest to the highest."
    ratios = "A user's tokens per second, by repetition. 1 is no gain."
    for title, read, up, caption in (
        ("Speed of a user", _spread("user_tokens_per_second"), "speed of a user (tokens/s)", bands),
        ("Throughput", _spread("tokens_per_second"), "speed of all users (tokens/s)", bands),
        ("Against no speculation", _spread("ratio"), "speed against plain (times)", ratios),
        ("Time to the first token", _tail("time_to_first_token_ms"), "wait (ms)", "Median; the band ends at p95."),
        (
            "Time per token",
            _tail("time_per_output_token_ms"),
            "time per token (ms)",
            "After the first. Median; band to p95.",
        ),
        ("Pause between chunks", _tail("chunk_gap_ms"), "pause (ms)", "Between arrivals of text. Median; band to p95."),
    ):
        lines = [line(server, mode, read) for server, mode in modes]
        axes = Axes(across=across, up=up, names=[f"{load:g}" for load in loads], y_min=0.0)
        yield Figure(title=title, chart=line_chart(lines, axes), caption=caption)


def _spread(key: str) -> Callable[[Record], Interval]:
    """Median, lowest and highest over repetitions."""
    return lambda row: (row[key]["median"], row[key]["low"], row[key]["high"]) if row[key] else NOTHING


def _tail(key: str) -> Callable[[Record], Interval]:
    """Median over requests, with a band to the 95th percentile."""
    return lambda row: (row[key]["p50"], row[key]["p50"], row[key]["p95"])
