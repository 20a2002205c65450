"""A plan as one HTML file that opens anywhere, offline: made from the record and nothing else."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from eyas.page.charts import Axes, Line, line_chart
from eyas.page.style import STYLE
from eyas.plan.memory import size

Record = Mapping[str, Any]
COLOURS = 4
BAR_WIDTH, BAR_HEIGHT = 1000, 34


def render_page(record: Record) -> str:
    """The whole file."""
    title = f"{record['target']['source']} on {record['card']['name']}"
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width, initial-scale=1'>",
        f"<title>eyas plan: {escape(title)}</title><style>{STYLE}</style></head><body><main>",
        _head(record, title),
        _memory(record),
        _speed(record["expected"]),
        _calibration(record.get("calibration")),
        _commands(record),
        "</main></body></html>",
    ]
    return "".join(parts)


def _head(record: Record, title: str) -> str:
    drafter = record["drafter"]
    by = "no drafter" if drafter is None else f"{drafter['name']} ({drafter['family']})"
    best = ""
    if drafter is not None:
        depth, users = record["recommended_depth"], record["asked"]["users"]
        how = f"at depth {depth} for {users} users" if depth else f"since drafts would not pay for {users} users"
        best = (
            f"<div class='card'><h3>Drafting</h3><div class='big'>{record['recommended_speedup']:.2f}x <small>{how}; "
            f"{record['auto_speedup']:.2f}x on auto</small></div>"
            f"<p class='soft'>Acceptance: {escape(record['acceptance']['source'])}.</p></div>"
        )
    fits = (
        f"<div class='card'><h3>Room</h3><div class='big'>{record['users_fit']:,} <small>users of "
        f"{record['asked']['context']:,} tokens fit</small></div><p class='soft'>{escape(record['verdict'])}.</p></div>"
    )
    return (
        f"<h1>{escape(title)}</h1><p class='soft'>{record['quantisation']['name']}, drafted by {escape(by)}. Nothing "
        "was loaded: sizes are from configurations, times from the card's figures.</p>"
        f"<div class='grid-of'>{fits}{best}</div>"
    )


def _memory(record: Record) -> str:
    """One bar: what is taken beside pages, and what pages may have."""
    memory, usable = record["memory"], record["memory"]["usable"]
    names = ("weights", "drafter", "working", "recorded", "runtime", "left_for_pages")
    parts = [(name.replace("_", " "), max(0, memory[name])) for name in names if memory[name]]
    whole, x, drawn, rows = max(usable, sum(taken for _, taken in parts)), 0.0, [], []
    for place, (name, taken) in enumerate(parts):
        width = BAR_WIDTH * taken / whole
        drawn.append(
            f"<rect class='point c{place % COLOURS}' x='{x:.1f}' y='0' width='{max(0.0, width - 2):.1f}' "
            f"height='{BAR_HEIGHT}'><title>{escape(name)}: {size(taken)}</title></rect>"
        )
        rows.append(f"<tr><th scope='row'>{escape(name)}</th><td>{size(taken)}</td><td>{taken / usable:.1%}</td></tr>")
        x += width
    return (
        f"<h2>Memory</h2><p class='soft'>{size(usable)} of the card are planned with. A token of context takes "
        f"{memory['kv_per_token'] / 2**10:.1f} KiB, and of the drafter {memory['drafter_kv_per_token'] / 2**10:.1f}."
        "</p><figure>"
        f"<svg viewBox='0 0 {BAR_WIDTH} {BAR_HEIGHT}' role='img' aria-label='memory by use'>{''.join(drawn)}</svg>"
        f"<table><thead><tr><th>what</th><th>bytes</th><th>share</th></tr></thead><tbody>{''.join(rows)}</tbody></table>"
        "</figure>"
    )


def _speed(expected: Sequence[Record]) -> str:
    users = list(dict.fromkeys(one["users"] for one in expected))
    rows = {number: [one for one in expected if one["users"] == number] for number in users}
    speedups = [
        Line(
            label=f"{number:,} user{'s' if number > 1 else ''}",
            x=[one["depth"] for one in rows[number]],
            y=[one["speedup"] for one in rows[number]],
            colour=place % COLOURS,
            dashed=place >= COLOURS,
        )
        for place, number in enumerate(users)
    ]
    plain = [next((one["tokens_per_second"] for one in rows[number] if one["depth"] == 0), None) for number in users]
    best = [max(one["tokens_per_second"] for one in rows[number]) for number in users]
    across = list(range(len(users)))
    totals = [
        Line(label="at the best depth", x=across, y=best, colour=0),
        Line(label="plain", x=across, y=plain, colour=1, dashed=True),
    ]
    by_depth = line_chart(speedups, Axes(across="depth of drafts", up="speedup over plain decoding", y_min=0.0))
    by_users = line_chart(
        totals, Axes(across="users", up="tokens per second together", y_min=0.0, names=[f"{n:,}" for n in users])
    )
    return (
        "<h2>Speed</h2><div class='grid-of'>"
        f"<figure><h3>What depth pays</h3>{by_depth}<figcaption>Below 1 drafting costs more than it gives."
        f"</figcaption></figure><figure><h3>What users get together</h3>{by_users}</figure></div>"
    )


def _calibration(calibration: Record | None) -> str:
    if calibration is None:
        return ""
    told = [one for one in calibration["steps"] if one["speedup"] is not None and one["predicted_speedup"] is not None]
    worst = calibration["worst_speedup_error"]
    words = "" if worst is None else f" Speedups are {worst:.1%} off at worst."
    rows = "".join(
        f"<tr><th scope='row'>{one['users']}</th><td>{one['depth']:.3g}</td><td>{one['speedup']:.2f}x</td>"
        f"<td>{one['predicted_speedup']:.2f}x</td></tr>"
        for one in told
    )
    table = f"<table><thead><tr><th>users</th><th>depth</th><th>measured</th><th>told</th></tr></thead><tbody>{rows}"
    return (
        f"<h2>Against what was measured</h2><p class='soft'>{escape(calibration['source'])}: each step told from all "
        f"others, {calibration['worst_error']:.1%} off at worst.{words}</p><figure>{table}</tbody></table></figure>"
    )


def _commands(record: Record) -> str:
    changes = "".join(f"<li>{escape(change)}</li>" for change in record["changes"])
    notes = "".join(f"<li>{escape(note)}</li>" for note in record["notes"])
    commands = "".join(f"<pre style='white-space: pre-wrap'>{escape(command)}</pre>" for command in record["commands"])
    changed = f"<p>To make it fit:</p><ul>{changes}</ul>" if changes else ""
    return f"<h2>To start it</h2>{changed}{commands}<ul class='soft'>{notes}</ul>"
