"""Ratios of paired runs of several modes: rows for JSON, a table and a plot."""

import statistics
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pairs import Interval, interval

from eyas.reports.plot import label_axes, new_figure

Json = dict[str, Any]
PLAIN, VLLM_PLAIN, AUTO, COLD = "plain", "vLLM plain", "auto", "auto, cold"
SUFFIX, BOTH = "suffix", "both"
"""Names of modes."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One run of one mode while all users were busy."""

    tokens: int
    seconds: float
    steps: int
    acceptance_length: float | None = None
    whole_speed: float
    """Tokens per second until the last answer ends."""

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


def rows_of(users: int, rounds: Sequence[dict[str, Outcome]], cold: Sequence[tuple[Outcome, Outcome]]) -> list[Json]:
    """A row for each mode: speed, and ratio to plain decoding in the same round; for both also to auto."""
    rows = []
    for mode, against in _pairs(rounds[0]):
        whole = VLLM_PLAIN in (mode, against)
        pairs = [(outcomes[mode], outcomes[against]) for outcomes in rounds]
        ratios = [a.whole_speed / b.whole_speed if whole else a.speed / b.speed for a, b in pairs]
        rows.append(_row(users, mode, against, [outcomes[mode] for outcomes in rounds], ratios))
    if cold:
        ratios = [own.speed / plain.speed for own, plain in cold]
        rows.append(_row(users, COLD, "plain, as many steps", [own for own, _ in cold], ratios))
    order = [PLAIN, "depth 0", AUTO, COLD, SUFFIX, BOTH]
    rows.sort(key=lambda row: (row["mode"].startswith("vLLM"), order.index(row["mode"]) if row["mode"] in order else 9))
    return rows


def _pairs(modes: Collection[str]) -> Iterator[tuple[str, str]]:
    """Pairs of modes to compare."""
    for mode in modes:
        yield mode, VLLM_PLAIN if mode.startswith("vLLM depth") and VLLM_PLAIN in modes else PLAIN
        if mode == BOTH and AUTO in modes:
            yield mode, AUTO


def _row(users: int, mode: str, against: str, outcomes: Sequence[Outcome], ratios: Sequence[float]) -> Json:
    return {
        "users": users,
        "mode": mode,
        "against": against,
        "tokens_per_second": statistics.median(outcome.speed for outcome in outcomes),
        "ratio": asdict(interval(ratios)),
        "ratios": list(ratios),
        "acceptance_length": outcomes[-1].acceptance_length,
        "runs": [asdict(outcome) for outcome in outcomes],
    }


def table(record: Json) -> str:
    """A line for each mode, a column for each number of users; then notes."""
    users = list(dict.fromkeys(row["users"] for row in record["rows"]))
    modes = list(dict.fromkeys((row["mode"], row["against"]) for row in record["rows"]))
    found = {(row["mode"], row["against"], row["users"]): row for row in record["rows"]}
    lines = [
        f"\n{record['arguments']['target']} with {record['arguments']['drafter']}, {record['device']}, "
        f"{record['dtype']}; ratios of tokens/s with 95 % intervals; {record['seconds']:.0f} s in all",
        f"{'users':<34}" + "".join(f"{count:>24}" for count in users),
    ]
    speeds = [found.get((PLAIN, PLAIN, count)) for count in users]
    lines.append(
        f"{'plain, tokens/s':<34}" + "".join(f"{row['tokens_per_second'] if row else 0:>24.1f}" for row in speeds)
    )
    for mode, against in modes:
        if mode == PLAIN:
            continue
        cells = [found.get((mode, against, count)) for count in users]
        shown = "".join(f"{str(Interval(**row['ratio'])) if row else '-':>24}" for row in cells)
        lines.append(f"{f'{mode} / {against}':<34}" + shown)
    return "\n".join([*lines, *(f"note: {words}" for words in record["notes"])])


def draw(record: Json, picture: Path) -> None:
    """Ratios by number of users, with their intervals."""
    users = list(dict.fromkeys(row["users"] for row in record["rows"]))
    modes = [
        pair for pair in dict.fromkeys((row["mode"], row["against"]) for row in record["rows"]) if pair[0] != PLAIN
    ]
    with new_figure(picture, (9, 5)) as figure:
        axes = figure.subplots()
        axes.axhline(1.0, color="grey", lw=1)
        for place, (mode, against) in enumerate(modes):
            rows = [row for row in record["rows"] if (row["mode"], row["against"]) == (mode, against)]
            middle = [row["ratio"]["median"] for row in rows]
            low = [m - (row["ratio"]["low"] or m) for m, row in zip(middle, rows, strict=True)]
            high = [(row["ratio"]["high"] or m) - m for m, row in zip(middle, rows, strict=True)]
            across = [users.index(row["users"]) + 0.06 * (place - len(modes) / 2) for row in rows]
            axes.errorbar(across, middle, yerr=[low, high], fmt="o-", ms=4, capsize=3, label=f"{mode} / {against}")
        axes.set_xticks(range(len(users)), [str(count) for count in users])
        title = f"{record['arguments']['target']}, {record['device']}, {record['dtype']}"
        label_axes(axes, title, "users", "tokens per second, ratio (95 % intervals)")
