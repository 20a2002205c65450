"""HTML report of a plan, one file that opens offline, made from the record alone."""

import json
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from eyas.plan.memory import size
from eyas.reports.charts import COLOURS, SHAPES, Axes, Figure, Line, line_chart
from eyas.reports.render import lead, render

Record = Mapping[str, Any]
PARTS = {
    "weights": "weights of the target",
    "drafter": "weights of the drafter",
    "working": "activations of a pass",
    "recorded": "buffers of steps",
    "runtime": "runtime: context, kernels, workspaces",
    "left_for_kv_blocks": "left for KV blocks: the users' contexts",
}
"""Labels of the parts of memory, in the order of the bar."""


def render_report(record: Record) -> str:
    """Render the report."""
    drafter = record["drafter"]
    memory, marks = _memory(record["memory"])
    return render(
        "plan.html.j2",
        title=f"{record['target']['source']} on {record['card']['name']}",
        lead=lead("healthy" if record["fits"] else "fault", _lead(record)),
        contents=[
            ("room", "Room and gain"),
            ("start", "To start it"),
            ("memory", "Memory"),
            ("speed", "Speed"),
            ("measured", "Against what was measured"),
            ("json", "The plan as JSON"),
        ],
        record=record,
        drafter="no drafter" if drafter is None else f"{drafter['name']} ({drafter['family']})",
        drafting=_drafting(record),
        usable=size(record["memory"]["usable"]),
        memory=memory,
        marks=marks,
        figures=_speed(record["expected"]),
        calibration=record.get("calibration"),
        as_json=json.dumps(record, indent=1),
    )


def _lead(record: Record) -> str:
    verdict = str(record["verdict"])
    text = verdict[:1].upper() + verdict[1:]
    if record["drafter"] is None or not record["fits"]:
        return text
    depth = record["recommended_depth"]
    return f"{text}; " + (f"draft at depth {depth}, {record['recommended_speedup']:.2f}x" if depth else "do not draft")


def _drafting(record: Record) -> str:
    depth, users = record["recommended_depth"], record["asked"]["users"]
    how = f"at depth {depth} for {users} users" if depth else f"since drafts would not pay for {users} users"
    return f"{how}; {record['auto_speedup']:.2f}x on auto"


def _memory(memory: Record) -> tuple[list[dict[str, object]], list[tuple[float, str]]]:
    """Parts of the memory bar, everything beside KV blocks and then these, and its marks; places are shares of it.

    The bar is as long as the card's memory, or as what is taken where that is more.
    """
    taken = {name: max(0, memory[name]) for name in PARTS if memory[name]}
    whole = max(int(memory["usable"]), sum(taken.values()))
    starts = accumulate(taken.values(), initial=0)
    parts: list[dict[str, object]] = [
        {
            "name": PARTS[name],
            "size": size(part),
            "share": part / memory["usable"],
            "colour": place % COLOURS,
            "start": start / whole,
            "width": part / whole,
        }
        for place, ((name, part), start) in enumerate(zip(taken.items(), starts, strict=False))
    ]
    return parts, [(quarter / 4, f"{whole * quarter / 4 / 2**30:.3g}") for quarter in range(5)]


def _speed(expected: Sequence[Record]) -> list[Figure]:
    users = list(dict.fromkeys(one["users"] for one in expected))
    rows = {number: [one for one in expected if one["users"] == number] for number in users}
    speedups = [
        Line(
            label=f"{number:,} user{'s' if number > 1 else ''}",
            x=[one["depth"] for one in rows[number]],
            y=[one["speedup"] for one in rows[number]],
            colour=place % COLOURS,
            dashes=place % len(SHAPES),
        )
        for place, number in enumerate(users)
    ]
    plain = [next((one["tokens_per_second"] for one in rows[number] if one["depth"] == 0), None) for number in users]
    best = [max(one["tokens_per_second"] for one in rows[number]) for number in users]
    across = range(len(users))
    totals = [
        Line(label="at the best depth", x=across, y=best, colour=0),
        Line(label="plain", x=across, y=plain, colour=1),
    ]
    names = [f"{number:,}" for number in users]
    return [
        Figure(
            title="What depth pays",
            chart=line_chart(
                speedups, Axes(across="depth (tokens drafted)", up="speedup over plain decoding (times)", y_min=0.0)
            ),
            caption="Below 1 drafting costs more than it gives.",
        ),
        Figure(
            title="What users get together",
            chart=line_chart(
                totals, Axes(across="users at a time", up="speed of all users (tokens/s)", y_min=0.0, names=names)
            ),
            caption="Of all users together: plain, and at the depth that is best for so many.",
        ),
    ]
