"""Bad records: skipped and counted by reason with examples; too many are an error."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from eyas.errors import UserError

MAX_BAD_SHARE = 0.05
"""Default limit for bad records, as a share of all."""
EXAMPLES = 3


class RecordError(UserError):
    """One record cannot be used."""

    def __init__(self, where: str, reason: str, message: str) -> None:
        super().__init__(f"{where}: {message}")
        self.where = where
        self.reason = reason
        """A few words without details of this record, so that equal reasons can be counted."""


@dataclass(kw_only=True)
class BadRecords:
    """Counts and examples of skipped records."""

    read: int = 0
    """All records, bad ones included."""
    by_reason: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)
    """The first messages of each reason."""

    def __len__(self) -> int:
        return self.by_reason.total()

    def __bool__(self) -> bool:
        return bool(self.by_reason)

    def __iadd__(self, other: "BadRecords") -> "BadRecords":
        self.read += other.read
        self.by_reason += other.by_reason
        for reason, examples in other.examples.items():
            self.examples[reason] = [*self.examples.get(reason, ()), *examples][:EXAMPLES]
        return self

    def add(self, error: UserError, reason: str = "refused") -> None:
        """Count a bad record; `reason` is for errors that have none."""
        if isinstance(error, RecordError):
            reason = error.reason
        self.by_reason[reason] += 1
        examples = self.examples.setdefault(reason, [])
        if len(examples) < EXAMPLES:
            examples.append(str(error))

    def too_many(self, max_share: float) -> bool:
        """Whether they exceed a share of all. A single one does not, unless the share is 0."""
        return len(self) > (max(1, max_share * self.read) if max_share else 0)

    def require_few(self, max_share: float, name: str) -> None:
        """Raise if there are too many, or only bad records; `name` is the limit's name for the user."""
        if self and len(self) == self.read:
            raise UserError(f"none of {self.read:,} records can be used: {'; '.join(self.lines())}; mend the files")
        if self.too_many(max_share):
            raise UserError(
                f"{len(self):,} of {self.read:,} records are bad, above the share of {max_share:g} that {name} allows: "
                f"{'; '.join(self.lines())}; mend the files or raise {name}"
            )

    def as_json(self) -> dict[str, Any]:
        return {"records": len(self), "read": self.read, "by_reason": dict(self.by_reason), "examples": self.examples}

    def lines(self) -> Iterator[str]:
        """One line for each reason, most frequent first: count and first example."""
        for reason, count in self.by_reason.most_common():
            yield f"{count:,} x {reason}, as {self.examples[reason][0]}"
