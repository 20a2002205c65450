"""What became of an adaptation: kept or not, why, and the story that goes with the weights."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from eyas.drafter.checkpoint import Checkpoint, read_checkpoint
from eyas.train.adaptation.judge import AcceptanceChange

TRAFFIC, REPLAY = "traffic", "replay"
MAX_LOSS = 0.02
"""Share of the acceptance length on replayed conversations that may be lost."""


@dataclass(frozen=True, kw_only=True)
class AdaptationVerdict:
    """Whether the new drafter takes the old one's place."""

    kept: bool
    text: str


def decide_adaptation(changes: Mapping[str, AcceptanceChange], max_loss: float = MAX_LOSS) -> AdaptationVerdict:
    """Keep a drafter that is better on the traffic beyond the interval and loses little elsewhere."""
    gain = changes[TRAFFIC].gain
    found = f"{gain.value:+.1%} on {changes[TRAFFIC].conversations} held-out conversations ({interval_of(gain)})"
    if gain.low <= 0:
        why = "worse" if gain.high < 0 else "not better beyond the interval"
        return AdaptationVerdict(kept=False, text=f"the old drafter stays: the new one is {why}, {found}")
    if (other := changes.get(REPLAY)) is not None and other.gain.value < -max_loss:
        return AdaptationVerdict(
            kept=False,
            text=f"the old drafter stays: the new one is better, {found}, but forgets: {other.gain.value:+.1%} on "
            f"{other.conversations} replayed ones ({interval_of(other.gain)}), and a loss of {max_loss:.1%} is "
            "the limit",
        )
    elsewhere = "" if other is None else f"; {other.gain.value:+.1%} on replayed ones ({interval_of(other.gain)})"
    return AdaptationVerdict(kept=True, text=f"the new drafter is better: {found}{elsewhere}")


def interval_of(estimate: Any) -> str:
    """An estimate's interval in words."""
    return f"{estimate.low:+.1%} to {estimate.high:+.1%}"


def as_stored_like(trained: Path, start: str) -> Checkpoint:
    """The trained drafter in the precision in which the one it started from is stored."""
    checkpoint, dtype = read_checkpoint(str(trained)), read_checkpoint(start).config.dtype
    to = getattr(torch, dtype)
    tensors = {name: t.to(to) if t.is_floating_point() else t for name, t in checkpoint.tensors.items()}
    return replace(checkpoint, tensors=tensors, config=replace(checkpoint.config, dtype=dtype), folder=None)
