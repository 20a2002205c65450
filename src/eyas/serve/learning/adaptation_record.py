"""What `eyas adapt` says of a drafter that it made (`record.json`), and whether that is enough to serve with it."""

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from eyas.drafter.checkpoint import fingerprint_drafter
from eyas.serve.learning.shelf import RECORD, read_record

TRAFFIC = "traffic"


class _Read(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)


class GateGain(_Read):
    """after / before - 1 of the acceptance lengths on held-out answers, and where it may lie."""

    value: float
    low: float
    high: float


class GateLength(_Read):
    """What one drafter came to there."""

    acceptance_length: float


class GateChange(_Read):
    """Old and new drafter on some conversations."""

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
    """The fields that the server goes by."""

    form: Literal["eyas.adaptation/1"] = Field(alias="schema")
    kept: bool
    verdict: str
    start: DrafterName = Field(alias="from")
    target: TargetName
    drafter: DrafterName | None = None
    """None if it was not kept."""
    changes: dict[str, GateChange]
    data: dict[str, Any] = {}

    @classmethod
    def read(cls, out: Path) -> "AdaptationRecord":
        """That of a folder of `eyas adapt`; OSError or ValueError if it cannot be had."""
        return cls.model_validate(read_record(out / RECORD))

    def objection(self, made: Path, *, start: str, target: str) -> str | None:
        """Why the drafter must not serve, if so; `start` and `target` are the fingerprints of those that do.

        What is not better beyond the interval has been told by `kept` already; here it is about being the right one.
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
