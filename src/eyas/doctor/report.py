"""An examination as one HTML file that opens anywhere, offline: made from the record and nothing else."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from eyas.drafter.attention_mass import REGIONS
from eyas.reports.charts import Axes, Figure, Line, line_chart
from eyas.reports.render import number, render

Record = Mapping[str, Any]
FULL_COLOUR = 0.5
"""A gain or loss of this share has the strongest colour of the matrix."""


def render_report(record: Record) -> str:
    """The whole file."""
    drafters = record["drafters"]
    measured = {name: own for name, own in drafters.items() if own["drift"]}
    depths = [int(depth) for case in record["cases"] for by_depth in case["cells"].values() for depth in by_depth]
    return render(
        "doctor.html.j2",
        title=" against ".join(drafters),
        record=record,
        dtype=record["target"]["dtype"].removeprefix("torch."),
        measured=measured,
        figures=list(_figures({name: own["drift"] for name, own in measured.items()})),
        deepest=max(depths, default=0),
        cases=[_case(case, list(drafters)) for case in record["cases"]],
        versions=" ".join(f"{key} {value}" for key, value in record["versions"].items() if value),
        arguments=json.dumps(record["arguments"]),
    )


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
            Axes(across="depth", up="RMS in parts of depth 1", y_min=0.0),
        ),
        caption=f"RMS of what a depth hands to the next, in parts of depth 1 ({first}). Flat is healthy, at any level; "
        "growth is drift.",
    )
    yield Figure(
        title="Conditional acceptance",
        chart=curves("conditional", Axes(across="depth", up="accepted", y_min=0.0, y_max=1.0, percent=True)),
        caption="Drafts accepted where all before them were. Rounds that come this far are few at the end: mind the "
        "band.",
    )
    yield Figure(
        title="Acceptance length",
        chart=chart(
            lambda name, drift, colour: _line(name, _by_key(drift["length"]), colour),
            Axes(across="tokens drafted per round", up="tokens per verification"),
        ),
        caption="1 + accepted / rounds, with the rounds that serving with that depth would start.",
    )
    yield Figure(
        title="Joint acceptance",
        chart=curves("joint", Axes(across="depth", up="accepted", y_min=0.0, percent=True)),
        caption="Drafts accepted together with all before them, of all rounds.",
    )
    for name, drift in drifts.items():
        lines = [_line(region, drift["mass"][region], colour) for colour, region in enumerate(REGIONS)]
        yield Figure(
            title=f"Where {name} looks",
            chart=line_chart(lines, Axes(across="depth", up="attention", y_min=0.0, percent=True)),
            caption="Attention mass on the first tokens, the rest of the prompt, verified output and its own guesses.",
        )
    yield Figure(
        title="Spread of attention",
        chart=curves("spread", Axes(across="depth", up="entropy / ln(slots)", y_min=0.0, y_max=1.0)),
        caption="Entropy in parts of the largest possible: 1 looks everywhere alike.",
    )
    yield Figure(
        title="Confidence and truth",
        chart=chart(
            lambda name, drift, colour: _reliability_line(name, drift["calibration"], colour),
            Axes(across="confidence", up="accepted", y_min=0.0, y_max=1.0, diagonal=True),
        ),
        caption="; ".join(
            f"{name}: ECE {number(drift['calibration']['ece'], '.3f')}" for name, drift in drifts.items()
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
    cells = [] if case["left_out"] else [_cell(list(case["cells"][name].values())[-1]) for name in drafters]
    return {**case, "cells": cells}


def _cell(cell: Record) -> Record:
    kept = cell["kept"]["value"]
    if kept is None:
        return cell
    share = min(1.0, abs(kept - 1.0) / FULL_COLOUR)
    return {**cell, "colour": "high" if kept >= 1 else "low", "strength": round(70 * share)}
