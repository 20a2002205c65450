"""The record that `eyas adapt` writes about a new drafter (`record.json`), and the check before it may serve."""

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from eyas.drafter.checkpoint import fingerprint_drafter
from eyas.serve.learning.shelf import RECORD, read_record

TRAFFIC = "traffic"


class _Read(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)


class GateGain(_Read):
    """The gain in acceptance length on held-out answers, after / before - 1, with its interval."""

    value: float
    low: float
    high: float


class GateLength(_Read):
    """The acceptance length of one drafter."""

    acceptance_length: float


class GateChange(_Read):
    """The old and the new drafter on some conversations."""

    conversations: int
    before: GateLength
    after: GateLength
    gain: GateGain


class DrafterName(_Read):
    """A drafter, by its weights."""

    fingerprint: str


class TargetName(_Read):
    """A target, by its weights."""

    fingerprint: str | None


class AdaptationRecord(_Read):
    """The fields that the server uses."""

    form: Literal["eyas.adaptation/1"] = Field(alias="schema")
    kept: bool
    verdict: str
    start: DrafterName = Field(alias="from")
    target: TargetName
    drafter: DrafterName | None = None
    """None if the old drafter was kept."""
    changes: dict[str, GateChange]
    data: dict[str, Any] = {}

    @classmethod
    def read(cls, out: Path) -> "AdaptationRecord":
        """Read the record in a folder of `eyas adapt`; OSError or ValueError if it cannot be read."""
        return cls.model_validate(read_record(out / RECORD))

    def objection(self, made: Path, *, start: str, target: str) -> str | None:
        """The reason why the drafter must not serve, if there is one: it was made from, or for, other weights.

        `start` and `target` are the fingerprints of drafter and target in service. `kept` says whether it is better.
        """
        if self.target.fingerprint != target:
            return f"it learnt another target ({self.target.fingerprint}) than the one that is served ({target})"
        if self.start.fingerprint != start:
            return "it started from another drafter than the one in service"
        if not (TRAFFIC in self.changes and self.changes[TRAFFIC].gain.low > 0):
            return "its record says that it was kept, and not that it is better beyond the interval"
        if self.drafter is None or self.drafter.fingerprint != fingerprint_drafter(str(made)):
            return "its weights are not those of its record"
        return None
