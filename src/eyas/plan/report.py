"""A plan as one HTML file that opens anywhere, offline: made from the record and nothing else."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from eyas.plan.memory import size
from eyas.reports.charts import COLOURS, Axes, Figure, Line, line_chart
from eyas.reports.render import render

Record = Mapping[str, Any]
PARTS = ("weights", "drafter", "working", "recorded", "runtime", "left_for_kv_blocks")
"""Of the memory, in the order in which the bar shows them."""


def render_report(record: Record) -> str:
    """The whole file."""
    drafter = record["drafter"]
    return render(
        "plan.html.j2",
        title=f"{record['target']['source']} on {record['card']['name']}",
        record=record,
        drafter="no drafter" if drafter is None else f"{drafter['name']} ({drafter['family']})",
        drafting=_drafting(record),
        usable=size(record["memory"]["usable"]),
        memory=_memory(record["memory"]),
        figures=_speed(record["expected"]),
        calibration=record.get("calibration"),
    )


def _drafting(record: Record) -> str:
    depth, users = record["recommended_depth"], record["asked"]["users"]
    how = f"at depth {depth} for {users} users" if depth else f"since drafts would not pay for {users} users"
    return f"{how}; {record['auto_speedup']:.2f}x on auto"


def _memory(memory: Record) -> list[dict[str, object]]:
    """One bar: what is taken beside KV blocks, and what these may have. Start and width are parts of the bar."""
    taken = {name: max(0, memory[name]) for name in PARTS if memory[name]}
    whole = max(memory["usable"], sum(taken.values()))
    starts = accumulate(taken.values(), initial=0)
    return [
        {
            "name": name.replace("_", " "),
            "size": size(part),
            "share": part / memory["usable"],
            "colour": place % COLOURS,
            "start": start / whole,
            "width": part / whole,
        }
        for place, ((name, part), start) in enumerate(zip(taken.items(), starts, strict=False))
    ]


def _speed(expected: Sequence[Record]) -> list[Figure]:
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
    across = range(len(users))
    totals = [
        Line(label="at the best depth", x=across, y=best, colour=0),
        Line(label="plain", x=across, y=plain, colour=1, dashed=True),
    ]
    names = [f"{number:,}" for number in users]
    return [
        Figure(
            title="What depth pays",
            chart=line_chart(speedups, Axes(across="depth of drafts", up="speedup over plain decoding", y_min=0.0)),
            caption="Below 1 drafting costs more than it gives.",
        ),
        Figure(
            title="What users get together",
            chart=line_chart(totals, Axes(across="users", up="tokens per second together", y_min=0.0, names=names)),
        ),
    ]
