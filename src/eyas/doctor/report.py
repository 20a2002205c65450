"""An examination as one HTML file that opens anywhere, offline: made from the record and nothing else."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from eyas.doctor import meanings
from eyas.doctor.sample_size import LEAST_PAIRS
from eyas.reports.charts import Axes, Figure, Line, line_chart
from eyas.reports.render import lead, number, render

Record = Mapping[str, Any]
FULL_COLOUR = 0.5
"""A gain or loss of this share has the strongest colour of the matrix."""
SHADES = 3
"""Of the stylesheet, for losses and for gains."""
KINDS = {"ship": "healthy", "do_not_ship": "fault", "cannot_tell": "unknown"}
"""Of a decision, as the stylesheet calls them."""


def render_report(record: Record) -> str:
    """The whole file."""
    drafters, decision = record["drafters"], record["decision"]
    measured = {name: own for name, own in drafters.items() if own["drift"]}
    depths = [int(depth) for case in record["cases"] for by_depth in case["cells"].values() for depth in by_depth]
    warned = decision["outcome"] == "ship" and decision["weaknesses"]
    told = decision["text"] if len(drafters) == 1 else f"{decision['drafter']}: {decision['text']}"
    return render(
        "doctor.html.j2",
        title=" against ".join(drafters),
        lead=lead("warning" if warned else KINDS.get(decision["outcome"], "unknown"), told),
        contents=list(_contents(record)),
        kinds=KINDS,
        record=record,
        dtype=record["target"]["dtype"].removeprefix("torch."),
        measured=measured,
        figures=list(_figures({name: own["drift"] for name, own in measured.items()})),
        meanings=meanings.STATEMENTS,
        explained={
            "drift": meanings.DRIFT,
            "fusion": meanings.FUSION,
            "robustness": meanings.ROBUSTNESS,
            "repairs": meanings.REPAIRS,
        },
        deepest=max(depths, default=0),
        cases=[_case(case, list(drafters)) for case in record["cases"] if not case["left_out"]],
        left_out=[case for case in record["cases"] if case["left_out"]],
        least_pairs=LEAST_PAIRS,
        why_no_cases=_why_not(record, "robustness"),
        why_no_repairs=_why_not(record, "diagnosis"),
        versions=" ".join(f"{key} {value}" for key, value in record["versions"].items() if value),
        arguments=json.dumps(record["arguments"], indent=1),
        judged=json.dumps(
            {
                "decision": decision,
                "gates": record["gates"],
                "verdicts": {name: own["verdict"] for name, own in drafters.items()},
            },
            indent=1,
        ),
    )


def _contents(record: Record) -> Iterator[tuple[str, str]]:
    """Anchors of the page and their names, in its order."""
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
    """Why a stage of the examination has nothing to show."""
    if record["arguments"].get(stage) is False:
        return f"It was turned off (--no-{stage}). Leave that out to measure it."
    if stage == "robustness" and record["cases"]:
        return "No condition was measured: " + "; ".join(sorted({str(case["left_out"]) for case in record["cases"]}))
    return "The examination was stopped before it came to this."


def _figures(drifts: Mapping[str, Record]) -> Iterator[Figure]:
    if not drifts:
        return

    def chart(read: Callable[[str, Record, int], Line], axes: Axes) -> Markup:
        return line_chart([read(name, drift, colour) for colour, (name, drift) in enumerate(drifts.items())], axes)

    def curves(key: str, axes: Axes) -> Markup:
        return chart(lambda name, drift, colour: _line(name, drift[key], colour), axes)

    first = ", ".join(f"{name} {drift['rms']['value'][0]:.3g}" for name, drift in drifts.items())
    yield Figure(
        title="Size of the fed-back state",
        chart=chart(
            lambda name, drift, colour: _line(name, relative(drift["rms"]), colour),
            Axes(across="depth (tokens)", up="RMS / RMS at depth 1 (times)", y_min=0.0),
        ),
        caption=f"RMS of what a depth hands to the next, in parts of depth 1 ({first}). Flat is healthy, at any level; "
        "growth is drift.",
    )
    yield Figure(
        title="Conditional acceptance",
        chart=curves(
            "conditional",
            Axes(across="depth (tokens)", up="accepted (% of rounds so far)", y_min=0.0, y_max=1.0, percent=True),
        ),
        caption="Drafts accepted where all before them were. Rounds that come this far are few at the end: mind the "
        "band.",
    )
    yield Figure(
        title="Acceptance length",
        chart=chart(
            lambda name, drift, colour: _line(name, _by_key(drift["length"]), colour),
            Axes(across="depth served with (tokens)", up="tokens per check by the target", y_min=0.0),
        ),
        caption="1 + accepted / rounds, with the rounds that serving with that depth would start.",
    )
    yield Figure(
        title="Joint acceptance",
        chart=curves("joint", Axes(across="depth (tokens)", up="accepted (% of all rounds)", y_min=0.0, percent=True)),
        caption="Drafts accepted together with all before them, of all rounds.",
    )
    for name, drift in drifts.items():
        lines = [
            _line(told, drift["mass"][region], colour) for colour, (region, told) in enumerate(meanings.REGIONS.items())
        ]
        yield Figure(
            title=f"Where {name} looks",
            chart=line_chart(
                lines, Axes(across="depth (tokens)", up="attention (% of its weight)", y_min=0.0, percent=True)
            ),
            caption="Attention on the first tokens of the text (sink), the rest of the prompt, the verified part of "
            "the answer, and the drafts of the round itself. What it looks at matters less than whether that changes.",
        )
    yield Figure(
        title="Spread of attention",
        chart=curves("spread", Axes(across="depth (tokens)", up="entropy / ln(slots) (0 to 1)", y_min=0.0, y_max=1.0)),
        caption="Entropy in parts of the largest possible: 1 looks everywhere alike.",
    )
    yield Figure(
        title="Confidence and truth",
        chart=chart(
            lambda name, drift, colour: _reliability_line(name, drift["calibration"], colour),
            Axes(across="confidence (probability)", up="accepted (share)", y_min=0.0, y_max=1.0, diagonal=True),
        ),
        caption="How often a draft is accepted, by the probability that the drafter gave it; on the dotted line both "
        "are equal. "
        + "; ".join(
            f"{name}: mean gap (ECE) {number(drift['calibration']['ece'], '.3f')}" for name, drift in drifts.items()
        ),
    )


def _line(label: str, curve: Record, colour: int) -> Line:
    """A curve by depth, with its band."""
    depths = range(1, len(curve["value"]) + 1)
    return Line(label=label, x=depths, y=curve["value"], low=curve["low"], high=curve["high"], colour=colour)


def relative(curve: Record) -> Record:
    """The same in parts of its first value."""
    return {key: [x / curve["value"][0] for x in curve[key]] for key in ("value", "low", "high")}


def _by_key(estimates: Sequence[Record]) -> Record:
    """Estimates of all depths as one curve."""
    return {key: [one[key] for one in estimates] for key in ("value", "low", "high")}


def reliability(calibration: Record) -> list[tuple[float, float]]:
    """Confidence and accuracy of the bins that hold a draft."""
    return [(c, a) for c, a in zip(calibration["confidence"], calibration["accuracy"], strict=True) if c is not None]


def _reliability_line(label: str, calibration: Record, colour: int) -> Line:
    pairs = reliability(calibration)
    return Line(label=label, x=[c for c, _ in pairs] or [0.0], y=[a for _, a in pairs] or [None], colour=colour)


def _case(case: Record, drafters: Sequence[str]) -> Record:
    """A row of the matrix: the deepest cell of every drafter, with its colour."""
    return {**case, "cells": [_cell(list(case["cells"][name].values())[-1]) for name in drafters]}


def _cell(cell: Record) -> Record:
    kept = cell["kept"]["value"]
    if kept is None:
        return cell
    strength = round(SHADES * min(1.0, abs(kept - 1.0) / FULL_COLOUR))
    return {**cell, "shade": f"{'high' if kept >= 1 else 'low'}{strength}" if strength else ""}
