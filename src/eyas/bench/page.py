"""The report as one HTML file that opens anywhere, offline: made from the record and nothing else."""

import json
from collections.abc import Callable, Mapping, Sequence
from html import escape
from itertools import zip_longest
from typing import Any

from eyas.bench.caveats import words_of
from eyas.page.charts import Axes, Line, line_chart
from eyas.page.style import STYLE

Record = Mapping[str, Any]
COLOURS = 4
Figure = Callable[[Record], "tuple[float | None, float | None, float | None]"]
"""Value, low and high of a row."""


def render_page(record: Record) -> str:
    """The whole file."""
    servers = list(dict.fromkeys(server["name"] for server in record["servers"]))
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width, initial-scale=1'>",
        f"<title>eyas bench: {escape(' and '.join(servers))}</title><style>{STYLE}</style></head><body><main>",
        _head(record, servers),
        _cards(record["rows"]),
        _warnings(record["warnings"]),
        _charts(record["rows"], servers),
        _table(record["rows"]),
        _latencies(record["rows"]),
        _categories(record["rows"]),
        _definitions(),
        _foot(record),
        "</main></body></html>",
    ]
    return "".join(parts)


def _head(record: Record, servers: Sequence[str]) -> str:
    workload, plan = record["workload"], record["plan"]
    early = "" if record["whole"] else f" <b class='warning'>Not whole: {escape(str(record['stopped']))}.</b>"
    models = ", ".join(dict.fromkeys(server["model"] for server in record["servers"]))
    kinds = ", ".join(dict.fromkeys(f"{s['kind']} {s['version'] or ''}".strip() for s in record["servers"]))
    return (
        f"<h1>{escape(' and '.join(servers))}</h1><p class='soft'>{escape(models)} by {escape(kinds)}, "
        f"{workload['conversations']} conversations of {len(workload['categories'])} categories, up to "
        f"{plan['max_tokens']} tokens each at temperature {plan['temperature']:g}, {plan['repetitions']} repetitions, "
        f"modes in turn. {escape(record['started'])}, {escape(record['host']['cpu'])}, "
        f"{record['host']['cores']} cores.{early}</p>"
    )


def _cards(rows: Sequence[Record]) -> str:
    cards = []
    for row in rows:
        against = row["against_plain"]
        found = against and against["user_tokens_per_second"]
        if not found:
            continue
        length = row["acceptance"]["length"]
        yields = f" Acceptance length {length:.2f}." if length else ""
        same = row["same_as_plain"]
        cards.append(
            f"<div class='card'><h3>{escape(words_of(row))}</h3><div class='big'>{found['median']:.2f}x "
            f"<small>the tokens per second of a user without speculation</small></div><p class='soft'>"
            f"{found['low']:.2f} to {found['high']:.2f} over repetitions.{yields} The same text in {same['same']} of "
            f"{same['of']}.</p></div>"
        )
    return f"<div class='grid-of'>{''.join(cards)}</div>"


def _warnings(words: Sequence[str]) -> str:
    if not words:
        return ""
    items = "".join(f"<li><b class='level warning'>mind</b>{escape(word)}</li>" for word in words)
    return f"<h2>Before you believe it</h2><ul class='verdict'>{items}</ul>"


def _charts(rows: Sequence[Record], servers: Sequence[str]) -> str:
    figures = []
    for closed, across in ((True, "users"), (False, "requests per second")):
        own = [row for row in rows if (row["users"] is not None) == closed]
        if own:
            figures += _by_load(own, servers, "users" if closed else "rate", across)
    lines = [line for place, server in enumerate(servers) if (line := _depths(server, rows, place % COLOURS))]
    if lines:
        deepest = max(len(line.y) for line in lines)
        names = [str(depth) for depth in range(1, deepest + 1)]
        axes = Axes(across="depth", up="accepted", y_min=0.0, y_max=1.0, percent=True, names=names)
        figures.append(
            _figure(
                "Acceptance by depth",
                line_chart(lines, axes),
                "Share of drafts whose token at this depth was accepted together with all before it, over all loads.",
            )
        )
    return f"<h2>By load</h2><div class='grid-of'>{''.join(figures)}</div>"


def _depths(server: str, rows: Sequence[Record], colour: int) -> Line | None:
    found = [row["acceptance"] for row in rows if row["server"] == server and row["acceptance"]["drafts"]]
    drafts = sum(one["drafts"] for one in found)
    counts = zip_longest(*(one["accepted_by_depth"] for one in found), fillvalue=0)
    shares = [sum(at) / drafts for at in counts]
    return Line(label=server, x=range(len(shares)), y=shares, colour=colour) if shares else None


def _by_load(rows: Sequence[Record], servers: Sequence[str], key: str, across: str) -> list[str]:
    loads = sorted({row[key] for row in rows})
    names = [f"{load:g}" for load in loads]

    def lines(figure: Figure) -> list[Line]:
        drawn = []
        for server in servers:
            for mode in dict.fromkeys(row["mode"] for row in rows if row["server"] == server):
                own = {row[key]: figure(row) for row in rows if (row["server"], row["mode"]) == (server, mode)}
                at = [own.get(load, (None, None, None)) for load in loads]
                drawn.append(
                    Line(
                        label=f"{server}, {mode}",
                        x=range(len(loads)),
                        y=[value for value, _, _ in at],
                        low=[low for _, low, _ in at],
                        high=[high for _, _, high in at],
                        colour=servers.index(server) % COLOURS,
                        dashed=mode == "plain",
                    )
                )
        return drawn

    def figure(title: str, figure: Figure, up: str, caption: str) -> str:
        return _figure(title, line_chart(lines(figure), Axes(across=across, up=up, names=names, y_min=0.0)), caption)

    bands = "Medians over repetitions; bands reach from the lowest to the highest."
    return [
        figure("Speed of a user", _spread("user_tokens_per_second"), "tokens/s of a user", bands),
        figure("Throughput", _spread("tokens_per_second"), "tokens/s of all", bands),
        figure(
            "Against no speculation",
            _ratio,
            "times as fast",
            "A user's tokens per second, by repetition. 1 is no gain.",
        ),
        figure("Time to the first token", _middle("time_to_first_token_ms"), "ms", "Median; the band ends at p95."),
        figure("Time per token", _middle("time_per_output_token_ms"), "ms", "After the first. Median; band to p95."),
        figure("Pause between chunks", _middle("chunk_gap_ms"), "ms", "What an eye sees. Median; band to p95."),
    ]


def _spread(key: str) -> Figure:
    def read(row: Record) -> tuple[float | None, float | None, float | None]:
        found = row[key]
        return (found["median"], found["low"], found["high"]) if found else (None, None, None)

    return read


def _ratio(row: Record) -> tuple[float | None, float | None, float | None]:
    found = row["against_plain"] and row["against_plain"]["user_tokens_per_second"]
    return (found["median"], found["low"], found["high"]) if found else (None, None, None)


def _middle(key: str) -> Figure:
    return lambda row: (row[key]["p50"], row[key]["p50"], row[key]["p95"])


def _table(rows: Sequence[Record]) -> str:
    head = (
        "<tr><th>server, mode, load</th><th>tokens/s</th><th>of a user</th><th>against plain</th><th>acceptance length"
        "</th><th>by depth</th><th>same text</th><th>requests</th><th>failed</th><th>client CPU</th></tr>"
    )
    body = []
    for row in rows:
        ratio, same, found = _ratio(row), row["same_as_plain"], row["acceptance"]
        cells = [
            escape(words_of(row)),
            _range(row["tokens_per_second"]),
            _range(row["user_tokens_per_second"]),
            "-" if ratio[0] is None else f"{ratio[0]:.2f}x",
            _number(found["length"]) + (" (metrics)" if found["source"] == "metrics" and found["length"] else ""),
            " ".join(f"{share:.2f}" for share in found["by_depth"]) or "-",
            f"{same['same']} of {same['of']}" if same else "-",
            str(row["requests"]),
            str(row["failed"]),
            f"{row['client']['cpu_share']:.0%}",
        ]
        body.append(f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    return f"<h2>Figures</h2><div class='card scroll'><table>{head}{''.join(body)}</table></div>"


def _latencies(rows: Sequence[Record]) -> str:
    named = {
        "first token": "time_to_first_token_ms",
        "per token": "time_per_output_token_ms",
        "between events": "inter_token_latency_ms",
        "between chunks": "chunk_gap_ms",
        "whole answer": "latency_ms",
    }
    body = []
    for row in rows:
        body.append(f"<tr class='group'><td colspan='7'>{escape(words_of(row))}</td></tr>")
        for name, key in named.items():
            found = row[key]
            cells = "".join(f"<td>{_number(found[column])}</td>" for column in ("mean", "p50", "p90", "p95", "p99"))
            body.append(f"<tr><td>{name}</td>{cells}<td>{found['count']}</td></tr>")
    head = "<tr><th>ms</th><th>mean</th><th>p50</th><th>p90</th><th>p95</th><th>p99</th><th>count</th></tr>"
    return (
        "<h2>Times</h2><details class='card'><summary>percentiles, with counts</summary><div class='scroll'><table>"
        f"{head}{''.join(body)}</table></div></details>"
    )


def _categories(rows: Sequence[Record]) -> str:
    names = sorted({name for row in rows for name in row["categories"]})
    if len(names) < 2:
        return ""
    head = "".join(f"<th>{escape(words_of(row))}</th>" for row in rows)
    body = []
    for name in names:
        cells = "".join(_category(row["categories"].get(name)) for row in rows)
        body.append(f"<tr><td>{escape(name)}</td>{cells}</tr>")
    return (
        "<h2>By category</h2><p class='soft'>Tokens per second of a user, and the acceptance length where answers tell "
        f"it.</p><div class='card scroll'><table><tr><th>category</th>{head}</tr>{''.join(body)}</table></div>"
    )


def _category(found: Record | None) -> str:
    if found is None:
        return "<td>-</td>"
    length = found["acceptance_length"]
    yields = f" <span class='soft'>{length:.2f}</span>" if length else ""
    return f"<td title='{found['requests']} requests'>{_number(found['user_tokens_per_second'])}{yields}</td>"


def _definitions() -> str:
    return (
        "<h2>What the figures mean</h2><ul class='verdict'>"
        "<li><b class='level note'>tokens/s</b>Output tokens of all answers / seconds from the first request to the"
        " last token.</li>"
        "<li><b class='level note'>of a user</b>Output tokens / the seconds that answers were waited for, all together:"
        " what one user has, the wait for the first token included.</li>"
        "<li><b class='level note'>per token</b>(last - first token) / (tokens - 1), a figure per request.</li>"
        "<li><b class='level note'>events</b>Gaps between events of a stream, as vllm bench serve counts inter-token"
        " latency; with speculation an event has several tokens.</li>"
        "<li><b class='level note'>chunks</b>Gaps between arrivals of new text, however many events came at once.</li>"
        "<li><b class='level note'>accepted</b>Acceptance length is 1 + accepted / drafts, pooled over requests.</li>"
        "</ul>"
    )


def _foot(record: Record) -> str:
    words = " ".join(f"{key} {value}" for key, value in record["versions"].items() if value)
    files = ", ".join(f"{file['path']} {file['sha256'][:12]}" for file in record["workload"]["files"]) or "synthetic"
    cards = escape(json.dumps([{key: s[key] for key in ("name", "mode", "url", "command")} for s in record["servers"]]))
    return (
        f"<footer>{escape(record['schema'])}; {escape(words)}; {escape(record['host']['platform'])}. Workload "
        f"{escape(files)}, asked {record['workload']['sha256'][:12]}. Servers: <code>{cards}</code> Command: "
        f"<code>{escape(record['command'])}</code></footer>"
    )


def _figure(title: str, chart: str, caption: str) -> str:
    return f"<figure><h3>{escape(title)}</h3>{chart}<figcaption>{escape(caption)}</figcaption></figure>"


def _range(found: Record | None) -> str:
    if not found:
        return "-"
    return f"{found['median']:.1f} <span class='soft'>{found['low']:.1f} to {found['high']:.1f}</span>"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
