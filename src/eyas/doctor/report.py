"""HTML report of an examination, one file that opens offline, and the data of its charts, from the record alone."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from eyas.doctor.statistics import LEAST_PAIRS
from eyas.reports.charts import Axes, Figure, Line, line_chart
from eyas.reports.render import lead, number, render

Record = Mapping[str, Any]
FULL_COLOUR = 0.5
"""Gain or loss with the strongest colour of the matrix."""
SHADES = 3
"""Shades of the stylesheet, for losses and for gains."""
KINDS = {"ship": "healthy", "do_not_ship": "fault", "cannot_tell": "unknown"}
"""Classes of the stylesheet by decision."""
REGIONS = {
    "sink": "sink: the first 4 tokens",
    "prompt": "rest of the prompt",
    "verified": "verified answer",
    "own": "its own drafts",
}
"""Labels of the regions of attention."""


@dataclass(frozen=True, kw_only=True)
class ChartData:
    """Data of a chart."""

    title: str
    axes: Axes
    lines: Sequence[Line] = field(repr=False)
    caption: str


def render_report(record: Record) -> str:
    """Render the report."""
    drafters, decision = record["drafters"], record["decision"]
    depths = [int(depth) for case in record["cases"] for by_depth in case["cells"].values() for depth in by_depth]
    warned = decision["outcome"] == "ship" and decision["weaknesses"]
    kind = "warning" if warned else KINDS.get(decision["outcome"], "unknown")
    judged = {
        "decision": decision,
        "gates": record["gates"],
        "verdicts": {name: own["verdict"] for name, own in drafters.items()},
    }
    return render(
        "doctor.html.j2",
        title=" against ".join(drafters),
        lead=lead(kind, decision_text(record)),
        contents=list(_contents(record)),
        kinds=KINDS,
        record=record,
        dtype=record["target"]["dtype"].removeprefix("torch."),
        measured={name: own for name, own in drafters.items() if own["drift"]},
        figures=[
            Figure(title=one.title, chart=line_chart(one.lines, one.axes), caption=one.caption)
            for one in charts(record)
        ],
        deepest=max(depths, default=0),
        cases=[_case(case, list(drafters)) for case in record["cases"] if not case["left_out"]],
        left_out=[case for case in record["cases"] if case["left_out"]],
        least_pairs=LEAST_PAIRS,
        why_no_cases=_why_not(record, "robustness"),
        why_no_repairs=_why_not(record, "diagnosis"),
        versions=" ".join(f"{key} {value}" for key, value in record["versions"].items() if value),
        arguments=json.dumps(record["arguments"], indent=1),
        judged=json.dumps(judged, indent=1),
    )


def decision_text(record: Record) -> str:
    """The decision, with the drafter's name where there are two."""
    decision = record["decision"]
    text: str = decision["text"]
    return text if len(record["drafters"]) == 1 else f"{decision['drafter']}: {text}"


def _contents(record: Record) -> Iterator[tuple[str, str]]:
    """Anchors and names of the sections, in order."""
    names = list(record["drafters"])
    yield "length", "Acceptance length"
    for place, name in enumerate(names, start=1):
        yield f"verdict-{place}", f"Verdict on {name}"
    yield "required", "Required"
    yield "drift", "Drift"
    yield "fusion", "Fusion"
    yield "robustness", "Robustness"
    for place, name in enumerate(names, start=1):
        yield f"repairs-{place}", f"Repairs tried on {name}"
    yield "json", "For programs"


def _why_not(record: Record, stage: str) -> str:
    """Say why a stage has no results."""
    if record["arguments"].get(stage) is False:
        return f"It was turned off (--no-{stage}). Leave that out to measure it."
    if stage == "robustness" and record["cases"]:
        return "No condition was measured: " + "; ".join(sorted({str(case["left_out"]) for case in record["cases"]}))
    return "The examination was stopped before it came to this."


def charts(record: Record) -> Iterator[ChartData]:
    """Yield the data of all charts, where anything was measured."""
    drifts = {name: own["drift"] for name, own in record["drafters"].items() if own["drift"]}
    if not drifts:
        return

    def lines(read: Callable[[Record], Record]) -> list[Line]:
        return [_line(name, read(drift), colour) for colour, (name, drift) in enumerate(drifts.items())]

    def by_depth(up: str, **limits: Any) -> Axes:
        return Axes(across="depth (tokens)", up=up, y_min=0.0, **limits)

    first = ", ".join(f"{name} {drift['rms']['value'][0]:.3g}" for name, drift in drifts.items())
    yield ChartData(
        title="Size of the fed-back state",
        axes=by_depth("RMS / RMS at depth 1 (times)"),
        lines=lines(lambda drift: _relative(drift["rms"])),
        caption=f"RMS of the state that a depth feeds to the next, relative to depth 1 ({first}). Flat is healthy at "
        "any level; growth is drift.",
    )
    yield ChartData(
        title="Conditional acceptance",
        axes=by_depth("accepted (% of rounds so far)", y_max=1.0, percent=True),
        lines=lines(lambda drift: drift["conditional"]),
        caption="Drafts accepted where all drafts before them were. Few rounds reach the last depths, so the "
        "band is wide.",
    )
    yield ChartData(
        title="Acceptance length",
        axes=Axes(across="depth served with (tokens)", up="tokens per check by the target", y_min=0.0),
        lines=lines(lambda drift: {key: [one[key] for one in drift["length"]] for key in ("value", "low", "high")}),
        caption="1 + accepted / rounds, with the rounds that serving with that depth would start.",
    )
    yield ChartData(
        title="Joint acceptance",
        axes=by_depth("accepted (% of all rounds)", percent=True),
        lines=lines(lambda drift: drift["joint"]),
        caption="Drafts accepted together with all drafts before them, over all rounds.",
    )
    for name, drift in drifts.items():
        yield ChartData(
            title=f"Where {name} looks",
            axes=by_depth("attention (% of its weight)", percent=True),
            lines=[
                _line(label, drift["mass"][region], colour) for colour, (region, label) in enumerate(REGIONS.items())
            ],
            caption="Attention on the first tokens of the text (sink), the rest of the prompt, the verified part of "
            "the answer, and the drafts of the round itself. Where it looks matters less than whether that "
            "changes with depth.",
        )
    yield ChartData(
        title="Spread of attention",
        axes=by_depth("entropy / ln(slots) (0 to 1)", y_max=1.0),
        lines=lines(lambda drift: drift["spread"]),
        caption="Entropy relative to the largest possible: 1 is uniform attention.",
    )
    errors = [f"{name}: mean gap (ECE) {number(drift['calibration']['ece'], '.3f')}" for name, drift in drifts.items()]
    yield ChartData(
        title="Confidence and truth",
        axes=Axes(across="confidence (probability)", up="accepted (share)", y_min=0.0, y_max=1.0, diagonal=True),
        lines=[_reliability(name, drift["calibration"], colour) for colour, (name, drift) in enumerate(drifts.items())],
        caption="How often a draft is accepted, by the drafter's probability of it; on the dotted line both are equal. "
        + "; ".join(errors),
    )


def _line(label: str, curve: Record, colour: int) -> Line:
    """Draw a curve by depth with its interval."""
    depths = range(1, len(curve["value"]) + 1)
    return Line(label=label, x=depths, y=curve["value"], low=curve["low"], high=curve["high"], colour=colour)


def _relative(curve: Record) -> Record:
    """Divide a curve by its first value."""
    return {key: [x / curve["value"][0] for x in curve[key]] for key in ("value", "low", "high")}


def _reliability(label: str, calibration: Record, colour: int) -> Line:
    """Draw accuracy by confidence, for the bins that hold a draft."""
    pairs = [(c, a) for c, a in zip(calibration["confidence"], calibration["accuracy"], strict=True) if c is not None]
    return Line(label=label, x=[c for c, _ in pairs] or [0.0], y=[a for _, a in pairs] or [None], colour=colour)


def _case(case: Record, drafters: Sequence[str]) -> Record:
    """A row of the matrix: the deepest cell of every drafter, with its colour."""
    return {**case, "cells": [_cell(deepest_cell(case, name)) for name in drafters]}


def deepest_cell(case: Record, drafter: str) -> Record:
    """A drafter's cell at the deepest depth of a case."""
    cell: Record = list(case["cells"][drafter].values())[-1]
    return cell


def _cell(cell: Record) -> Record:
    kept = cell["kept"]["value"]
    if kept is None:
        return cell
    strength = round(SHADES * min(1.0, abs(kept - 1.0) / FULL_COLOUR))
    return {**cell, "shade": f"{'high' if kept >= 1 else 'low'}{strength}" if strength else ""}
