"""What a verdict consists of, and what the matrix of conditions adds to it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from eyas.doctor.robustness import Case
from eyas.drafter.config import DrafterConfig

Level = Literal["fault", "warning", "note", "healthy"]

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


def judge_conditions(config: DrafterConfig, name: str, cases: Sequence[Case]) -> Iterator[Statement]:
    """One statement for every kind of condition that was tried."""
    for group, (label, least, cause, advice) in _GROUPS.items():
        own = [(case, list(case.cells[name].values())[-1]) for case in cases if case.group == group and case.cells]
        # Where next to nothing is accepted there is nothing to lose, and one prompt is an anecdote.
        own = [(case, cell) for case, cell in own if cell.reference >= LEAST_LENGTH and case.prompts > 1]
        low = [(case, cell) for case, cell in own if cell.kept.value < least]
        sure = [(case, cell) for case, cell in low if cell.kept.high < 1.0]
        told = tuple(
            f"{case.name}: {cell.kept.value:.0%} kept ({cell.length:.2f} of {cell.reference:.2f}, "
            f"{case.prompts} prompts)"
            for case, cell in sorted(sure or low or own, key=lambda pair: pair[1].kept.value)[:4]
        )
        if sure:
            yield Statement(
                # Drawn answers are harder for everyone: worth knowing, no weakness.
                level="note" if group == "sampling" else "warning",
                name=f"sensitive_{group}",
                text=f"loses acceptance under other {label}",
                evidence=told,
                cause=_context_cause(config, cases) if group == "context" else cause,
                advice=advice,
            )
        elif low:
            text = f"may lose acceptance under other {label}; too few prompts to tell"
            yield Statement(level="note", name=f"unsure_{group}", text=text, evidence=told, advice="give more prompts")
        elif own:
            text = f"holds under other {label}"
            yield Statement(level="healthy", name=f"robust_{group}", text=text, evidence=told[:2])


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


def _context_cause(config: DrafterConfig, cases: Sequence[Case]) -> str:
    lengths = [int(case.name.split()[0]) for case in cases if case.group == "context" and case.cells]
    if lengths and max(lengths) > config.max_position_embeddings:
        return f"rope too short: max_position_embeddings is {config.max_position_embeddings}"
    return "trained on shorter text"
