"""The report as one HTML file that opens anywhere, offline: made from the record and nothing else."""

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from eyas.drafter.looks import REGIONS
from eyas.page.charts import Axes, Line, line_chart
from eyas.page.style import STYLE

Record = Mapping[str, Any]


def render_page(record: Record) -> str:
    """The whole file."""
    drafters = record["drafters"]
    measured = {name: own for name, own in drafters.items() if own["drift"]}
    title = " against ".join(drafters)
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width, initial-scale=1'>",
        f"<title>eyas doctor: {escape(title)}</title><style>{STYLE}</style></head><body><main>",
        _head(record, title),
        _summaries(measured),
        *(_verdict(name, own) for name, own in drafters.items()),
        _gates(record["gates"]),
    ]
    if measured:
        parts += [_drift(measured), _fusion(measured)]
    if record["cases"]:
        parts.append(_matrix(record))
    parts += [*(_trials(name, own) for name, own in drafters.items()), _foot(record), "</main></body></html>"]
    return "".join(parts)


def _head(record: Record, title: str) -> str:
    target, plan = record["target"], record["plan"]
    early = "" if record["whole"] else " <b class='warning'>Stopped early: this is what was measured until then.</b>"
    return (
        f"<h1>{escape(title)}</h1><p class='soft'>Examined on {escape(target['source'])} "
        f"({escape(target['dtype'].removeprefix('torch.'))} on {escape(target['device'])}) with {plan['prompts']} "
        f"prompts, {plan['max_new_tokens']} tokens each, in {record['seconds']['total']:.0f} s.{early}</p>"
    )


def _summaries(measured: Record) -> str:
    cards = []
    for name, own in measured.items():
        drift, verdict = own["drift"], own["verdict"]
        lengths = ", ".join(
            f"{drift['length'][k - 1]['value']:.2f} at {k}" for k in (3, 5, 7, 16) if k <= drift["depth"]
        )
        growth = drift["growth"]
        cards.append(
            f"<div class='card'><h3>{escape(name)} <span class='soft'>{escape(own['family'])}</span></h3>"
            f"<div class='big'>{drift['length'][min(3, drift['depth']) - 1]['value']:.2f} <small>tokens per "
            f"verification at depth {min(3, drift['depth'])}</small></div><p class='soft'>{lengths}. Fed-back state "
            f"{growth['value']:+.1%} per depth. Recommended depth {verdict['recommended_depth']}.</p></div>"
        )
    return f"<div class='grid-of'>{''.join(cards)}</div>"


def _verdict(name: str, own: Record) -> str:
    items = []
    for one in own["verdict"]["statements"]:
        cause = f" Likely cause: {escape(one['cause'])}." if one["cause"] and one["cause"] != one["text"] else ""
        advice = f"<br>What to do: {escape(one['advice'])}." if one["advice"] else ""
        evidence = f"<span class='soft'>{escape('; '.join(one['evidence']))}</span>" if one["evidence"] else ""
        level = f"<b class='level {one['level']}'>{one['level']}</b>"
        items.append(f"<li>{level}{escape(one['text'])}.{cause}{advice}{evidence}</li>")
    items += [f"<li><b class='level note'>remark</b>{escape(remark)}</li>" for remark in own["remarks"]]
    return f"<h2>Verdict on {escape(name)}</h2><ul class='verdict'>{''.join(items)}</ul>"


def _gates(gates: Sequence[Record]) -> str:
    if not gates:
        return ""
    items = "".join(
        f"<li><b class='level {'healthy' if gate['passed'] else 'fault'}'>{'holds' if gate['passed'] else 'fails'}</b>"
        f"<code>{escape(gate['gate'])}</code><span class='soft'>{escape(gate['reason'])}</span></li>"
        for gate in gates
    )
    return f"<h2>Required</h2><ul class='verdict'>{items}</ul>"


def _drift(measured: Record) -> str:
    figures = [
        _figure(
            "Size of the fed-back state",
            line_chart(
                [_relative(name, own["drift"]["rms"], i) for i, (name, own) in enumerate(measured.items())],
                Axes(across="depth", up="RMS in parts of depth 1", y_min=0.0),
            ),
            "RMS of what a depth hands to the next, in parts of depth 1 ("
            + ", ".join(f"{name} {own['drift']['rms']['value'][0]:.3g}" for name, own in measured.items())
            + "). Flat is healthy, at any level; growth is drift.",
        ),
        _figure(
            "Conditional acceptance",
            _curves(measured, "conditional", Axes(across="depth", up="accepted", y_min=0.0, y_max=1.0, percent=True)),
            "Drafts accepted where all before them were. Rounds that come this far are few at the end: mind the band.",
        ),
        _figure(
            "Acceptance length",
            line_chart(
                [_estimates(name, own["drift"]["length"], i) for i, (name, own) in enumerate(measured.items())],
                Axes(across="tokens drafted per round", up="tokens per verification"),
            ),
            "1 + accepted / rounds, with the rounds that serving with that depth would start.",
        ),
        _figure(
            "Joint acceptance",
            _curves(measured, "joint", Axes(across="depth", up="accepted", y_min=0.0, percent=True)),
            "Drafts accepted together with all before them, of all rounds.",
        ),
    ]
    for name, own in measured.items():
        curves = own["drift"]["mass"]
        lines = [_line(region, curves[region], i) for i, region in enumerate(REGIONS)]
        figures.append(
            _figure(
                f"Where {name} looks",
                line_chart(lines, Axes(across="depth", up="attention", y_min=0.0, percent=True)),
                "Attention mass on the first tokens, the rest of the prompt, verified output and its own guesses.",
            )
        )
    figures += [
        _figure(
            "Spread of attention",
            _curves(measured, "spread", Axes(across="depth", up="entropy / ln(slots)", y_min=0.0, y_max=1.0)),
            "Entropy in parts of the largest possible: 1 looks everywhere alike.",
        ),
        _figure(
            "Confidence and truth",
            line_chart(
                [_reliability(name, own["drift"]["calibration"], i) for i, (name, own) in enumerate(measured.items())],
                Axes(across="confidence", up="accepted", y_min=0.0, y_max=1.0, diagonal=True),
            ),
            "; ".join(f"{name}: ECE {own['drift']['calibration']['ece']:.3f}" for name, own in measured.items()),
        ),
    ]
    return (
        "<h2>Drift</h2><p class='soft'>By draft depth, on the rounds that serving would start; bands are 95 % "
        f"intervals over prompts.</p><div class='grid-of'>{''.join(figures)}</div>"
    )


def _fusion(measured: Record) -> str:
    rows = []
    for name, own in measured.items():
        drift = own["drift"]
        for i, layer in enumerate(own["layer_ids"]):
            cells = [_number(drift[key][i]["value"]) for key in ("state_rms", "read_rms")]
            share = f"{drift['share'][i]['value']:.0%}"
            rows.append(
                f"<tr><td>{escape(name)}, after layer {layer}</td><td>{cells[0]}</td><td>{cells[1]}</td>"
                f"<td>{share}</td></tr>"
            )
    return (
        "<h2>Fusion</h2><p class='soft'>Size of each auxiliary state, as the target gives it and as fc reads it, "
        "and its share of the fused input.</p><div class='card scroll'><table><tr><th>state</th><th>RMS given</th>"
        f"<th>RMS read</th><th>share</th></tr>{''.join(rows)}</table></div>"
    )


def _matrix(record: Record) -> str:
    names = list(record["drafters"])
    head = "".join(f"<th>{escape(name)}</th><th>kept</th>" for name in names)
    rows, group = [], None
    for case in record["cases"]:
        if case["group"] != group:
            group = case["group"]
            rows.append(f"<tr class='group'><td colspan='{2 + 2 * len(names)}'>{escape(group)}</td></tr>")
        told = f"<td title='{escape(case['about'], quote=True)}'>{escape(case['name'])}</td>"
        if case["left_out"]:
            why = escape(case["left_out"])
            rows.append(f"<tr>{told}<td class='left-out' colspan='{1 + 2 * len(names)}'>{why}</td></tr>")
            continue
        cells = "".join(_heat(list(case["cells"][name].values())[-1]) for name in names)
        rows.append(f"<tr>{told}{cells}<td>{case['prompts']}</td></tr>")
    depth = max((int(k) for case in record["cases"] for by in case["cells"].values() for k in by), default=0)
    return (
        f"<h2>Robustness</h2><p class='soft'>Acceptance length at depth {depth} and what is kept of the unperturbed "
        "run on the same prompts. Few prompts each: differences of some per cent are noise.</p>"
        f"<div class='card scroll'><table><tr><th>condition</th>{head}<th>prompts</th></tr>"
        f"{''.join(rows)}</table></div>"
    )


def _heat(cell: Record) -> str:
    kept = cell["kept"]["value"]
    if kept is None:
        return "<td>-</td><td>-</td>"
    # From the colour of loss over the page's middle to the colour of gain, at half and at once and a half.
    share = min(1.0, abs(kept - 1.0) / 0.5)
    colour = "high" if kept >= 1 else "low"
    style = f"background: color-mix(in srgb, var(--{colour}) {round(70 * share)}%, transparent)"
    low, high = cell["kept"]["low"], cell["kept"]["high"]
    return (
        f"<td>{_number(cell['length'])}</td><td style='{style}' title='{low:.0%} to {high:.0%}, reference "
        f"{_number(cell['reference'])}'>{kept:.0%}</td>"
    )


def _trials(name: str, own: Record) -> str:
    diagnosis = own["diagnosis"]
    if diagnosis is None:
        return ""
    rows = ""
    for trial in sorted(diagnosis["trials"], key=lambda trial: -trial["ratio"]["value"]):
        ratio, helps = trial["ratio"], "<b class='fault'>helps</b>" if trial["convinces"] else ""
        rows += f"<tr><td>{escape(trial['about'])}</td><td>{ratio['value']:.2f}</td>"
        rows += f"<td>{ratio['low']:.2f} to {ratio['high']:.2f}</td><td>{trial['surprise']['value']:+.2f}</td>"
        rows += f"<td>{helps}</td></tr>"
    return (
        f"<h2>Repairs tried on {escape(name)}</h2><p class='soft'>Accepted drafts with a repair in parts of those "
        "without, and how much more the target's tokens surprise it. A repair that helps names a fault.</p>"
        "<details class='card'><summary>all trials</summary><div class='scroll'><table><tr><th>if</th><th>ratio</th>"
        f"<th>interval</th><th>surprise, nats</th><th></th></tr>{rows}</table></div></details>"
    )


def _foot(record: Record) -> str:
    words = " ".join(f"{key} {value}" for key, value in record["versions"].items() if value)
    arguments = escape(json.dumps(record["arguments"]))
    return f"<footer>{escape(record['schema'])}; {escape(words)}. Arguments: <code>{arguments}</code></footer>"


def _figure(title: str, chart: str, caption: str) -> str:
    return f"<figure><h3>{escape(title)}</h3>{chart}<figcaption>{escape(caption)}</figcaption></figure>"


def _curves(measured: Record, key: str, axes: Axes) -> str:
    return line_chart([_line(name, own["drift"][key], i) for i, (name, own) in enumerate(measured.items())], axes)


def _line(label: str, curve: Record, colour: int) -> Line:
    depths = range(1, len(curve["value"]) + 1)
    return Line(label=label, x=depths, y=curve["value"], low=curve["low"], high=curve["high"], colour=colour)


def _relative(label: str, curve: Record, colour: int) -> Line:
    first = curve["value"][0]
    value, low, high = ([x / first for x in curve[key]] for key in ("value", "low", "high"))
    return Line(label=label, x=range(1, len(value) + 1), y=value, low=low, high=high, colour=colour)


def _estimates(label: str, found: Sequence[Record], colour: int) -> Line:
    value, low, high = ([one[key] for one in found] for key in ("value", "low", "high"))
    return Line(label=label, x=range(1, len(found) + 1), y=value, low=low, high=high, colour=colour)


def _reliability(label: str, calibration: Record, colour: int) -> Line:
    pairs = [(c, a) for c, a in zip(calibration["confidence"], calibration["accuracy"], strict=True) if c is not None]
    return Line(label=label, x=[c for c, _ in pairs] or [0.0], y=[a for _, a in pairs] or [None], colour=colour)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
