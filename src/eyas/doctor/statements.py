"""What a verdict consists of, and what the matrix of conditions adds to it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from eyas.doctor.robustness import Case, Cell
from eyas.doctor.sample_size import LEAST_PAIRS, too_few
from eyas.drafter.config import DrafterConfig

Level = Literal["fault", "warning", "unknown", "note", "healthy"]
"""The gravest first. `unknown`: measured, and on too little to judge."""

KEPT, KEPT_CONTEXT = 0.85, 0.9
"""Parts of the acceptance length below which a condition counts as a loss."""
LEAST_LENGTH = 1.2


@dataclass(frozen=True, kw_only=True)
class Statement:
    """One finding."""

    level: Level
    name: str
    """Stable, for programs."""
    text: str
    evidence: tuple[str, ...] = ()
    cause: str | None = None
    advice: str | None = None
    conditions: tuple[str, ...] = ()
    """Cases of the matrix that this is about, the worst first."""


def judge_conditions(config: DrafterConfig, name: str, cases: Sequence[Case]) -> Iterator[Statement]:
    """One statement for every kind of condition that was tried."""
    for group, (label, least, cause, advice) in _GROUPS.items():
        own = [(case, list(case.cells[name].values())[-1]) for case in cases if case.group == group and case.cells]
        # Where next to nothing is accepted there is nothing to lose.
        own = [(case, cell) for case, cell in own if cell.reference >= LEAST_LENGTH]
        if not own:
            continue
        own.sort(key=lambda pair: pair[1].kept.value)
        enough = [(case, cell) for case, cell in own if case.prompts >= LEAST_PAIRS]
        low = [(case, cell) for case, cell in own if cell.kept.value < least]
        sure = [(case, cell) for case, cell in low if cell.kept.high < 1.0 and case.prompts >= LEAST_PAIRS]
        wide = [(case, cell) for case, cell in enough if cell.kept.low < least]
        if sure:
            yield Statement(
                # Drawn answers are harder for everyone: worth knowing, no weakness.
                level="note" if group == "sampling" else "warning",
                name=f"sensitive_{group}",
                text=f"loses acceptance under other {label}",
                evidence=_told(sure),
                cause=_context_cause(config, cases) if group == "context" else cause,
                advice=advice,
                conditions=_names(sure),
            )
        elif not enough:
            yield Statement(
                level="unknown",
                name=f"unsure_{group}",
                text=f"other {label}: {too_few(max(case.prompts for case, _ in own), LEAST_PAIRS)}",
                evidence=_told(own),
                advice=f"give more prompts ({_MORE.get(group, '--case-prompts')})",
                conditions=_names(low),
            )
        elif low:
            yield Statement(
                level="unknown",
                name=f"unsure_{group}",
                text=f"may lose acceptance under other {label}; too few prompts to tell",
                evidence=_told(low),
                advice=f"give more prompts ({_MORE.get(group, '--case-prompts')})",
                conditions=_names(low),
            )
        elif wide:
            text = f"no loss seen under other {label}, within wide intervals"
            yield Statement(level="note", name=f"unseen_{group}", text=text, evidence=_told(wide))
        else:
            text = f"holds under other {label}"
            yield Statement(level="healthy", name=f"robust_{group}", text=text, evidence=_told(enough)[:2])


def _told(pairs: Sequence[tuple[Case, Cell]]) -> tuple[str, ...]:
    """The worst of them with their intervals."""
    return tuple(
        f"{case.name}: {cell.kept.value:.0%} kept ({cell.kept.low:.0%} to {cell.kept.high:.0%}; {cell.length:.2f} of "
        f"{cell.reference:.2f}, {case.prompts} prompt{'' if case.prompts == 1 else 's'})"
        for case, cell in pairs[:4]
    )


def _names(pairs: Sequence[tuple[Case, Cell]]) -> tuple[str, ...]:
    return tuple(case.name for case, _ in pairs)


_MORE = {"context": "--context-prompts"}
"""The option that gives a kind of condition more prompts, where it has one of its own."""

_GROUPS = {
    "template": (
        "templates and system prompts",
        KEPT,
        "template mismatch: trained with one rendering only",
        "retrain with [data.augment]",
    ),
    "text": (
        "languages, code and tool traffic",
        KEPT,
        "other text than it was trained on",
        "add such text to the prompts it is trained on",
    ),
    "sampling": (
        "temperatures",
        KEPT,
        "drawn answers are harder to guess",
        "draft less deep at high temperature",
    ),
    "weights": (
        "precisions of the target",
        KEPT,
        "trained on the unquantised target",
        "train on the target as it will be served",
    ),
    "context": (
        "lengths of context",
        KEPT_CONTEXT,
        "trained on shorter text",
        "serve it with a window and sinks, or retrain with data.join_share",
    ),
}


CONDITION_GROUPS = {group: label for group, (label, *_) in _GROUPS.items()}
"""Kinds of conditions that are judged, and what they are called; a statement's name ends with its group."""


def _context_cause(config: DrafterConfig, cases: Sequence[Case]) -> str:
    lengths = [int(case.name.split()[0]) for case in cases if case.group == "context" and case.cells]
    if lengths and max(lengths) > config.max_position_embeddings:
        return f"rope too short: max_position_embeddings is {config.max_position_embeddings}"
    return "trained on shorter text"
