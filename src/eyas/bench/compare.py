"""Comparison of two bench records: changes, and whether they exceed the spread of repetitions."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from eyas.errors import UserError

Record = Mapping[str, Any]
Json = dict[str, Any]
MUST_AGREE = (
    ("workload", "sha256", "the prompts"),
    ("plan", "max_tokens", "the length of answers"),
    ("plan", "temperature", "the temperature"),
    ("plan", "ignore_eos", "whether answers may end by themselves"),
    ("plan", "prefill", "whether prefix caches were filled beforehand"),
    ("host", "cpu", "the client's CPU"),
)


def compare(before: Record, after: Record) -> Json:
    """Changes in the rows that both records have, and differences in how they were measured."""
    pairs = list(_pairs(before["rows"], after["rows"]))
    if not pairs:
        raise UserError(
            f"nothing in common: one has {_named(before['rows'])}, the other {_named(after['rows'])}; "
            "measure both with the same users or rates"
        )
    return {
        "differences": list(_differences(before, after)),
        "rows": [_compared(a, b) for a, b in pairs],
        "same_texts": _same_texts(before, after),
    }


def _pairs(before: Sequence[Record], after: Sequence[Record]) -> Iterator[tuple[Record, Record]]:
    """Rows of equal server, mode and load; if each record has only one server, names may differ."""
    alone = _alone(before, after)

    def place(row: Record) -> tuple[Any, ...]:
        return (None if alone else row["server"], row["mode"], row["users"], row["rate"])

    later = {place(row): row for row in after}
    for row in before:
        if place(row) in later:
            yield row, later[place(row)]


def _compared(before: Record, after: Record) -> Json:
    own = {name: before[name] for name in ("mode", "users", "rate")}
    return own | {
        "server": before["server"]
        if before["server"] == after["server"]
        else f"{before['server']} → {after['server']}",
        "tokens_per_second": _change(before["tokens_per_second"], after["tokens_per_second"]),
        "user_tokens_per_second": _change(before["user_tokens_per_second"], after["user_tokens_per_second"]),
        "time_to_first_token_ms": _pair(before, after, "time_to_first_token_ms", "p50"),
        "time_per_output_token_ms": _pair(before, after, "time_per_output_token_ms", "p50"),
        "acceptance_length": _pair(before, after, "acceptance", "length"),
    }


def _change(before: Record | None, after: Record | None) -> Json | None:
    if before is None or after is None or not before["median"]:
        return None
    apart = before["high"] < after["low"] or after["high"] < before["low"]
    many = min(len(before["all"]), len(after["all"])) > 1
    return {
        "before": before["median"],
        "after": after["median"],
        "ratio": round(after["median"] / before["median"], 4),
        "beyond_spread": apart if many else None,
    }


def _pair(before: Record, after: Record, key: str, figure: str) -> Json:
    a, b = before[key][figure], after[key][figure]
    return {"before": a, "after": b, "ratio": round(b / a, 4) if a and b else None}


def _differences(before: Record, after: Record) -> Iterator[str]:
    for room, key, words in MUST_AGREE:
        a, b = before[room][key], after[room][key]
        if a != b:
            shown = "" if key == "sha256" else f" ({a} and {b})"
            yield f"{words} differ{'s' if not words.endswith('s') else ''}{shown}"
    models = [{server["model"] for server in record["servers"]} for record in (before, after)]
    if models[0] != models[1]:
        yield f"the models differ ({', '.join(sorted(models[0]))} and {', '.join(sorted(models[1]))})"
    for name, record in (("the first", before), ("the second", after)):
        if not record["whole"]:
            yield f"{name} is not whole: {record['stopped']}"


def _same_texts(before: Record, after: Record) -> Json:
    """How many answers to the same requests, in the same mode and load, are equal in both."""
    alone = _alone(before["rows"], after["rows"])
    texts = [_texts(record, alone) for record in (before, after)]
    shared = texts[0].keys() & texts[1].keys()
    return {"same": sum(texts[0][place] == texts[1][place] for place in shared), "of": len(shared)}


def _alone(before: Sequence[Record], after: Sequence[Record]) -> bool:
    return len({row["server"] for row in before}) == 1 == len({row["server"] for row in after})


def _texts(record: Record, alone: bool) -> dict[tuple[Any, ...], str]:
    return {
        (
            None if alone else run["server"],
            run["mode"],
            run["users"],
            run["rate"],
            request["key"],
            request["turn"],
        ): request["text_sha256"]
        for run in record["runs"]
        if run["repetition"] == 1
        for request in run["requests"]
        if "text_sha256" in request
    }


def _named(rows: Sequence[Record]) -> str:
    return ", ".join(f"{row['mode']} at {row['users'] or row['rate']}" for row in rows) or "no rows"
