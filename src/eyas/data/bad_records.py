"""Records that cannot be used: skipped, counted by reason, the first few named, and refused when they are too many."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from eyas.errors import UserError

MAX_BAD_SHARE = 0.05
"""Bad records that are skipped where nobody says otherwise, as a share of all that are read."""
EXAMPLES = 3
"""Records that are named for each reason."""


class RecordError(UserError):
    """One record cannot be used."""

    def __init__(self, where: str, reason: str, message: str) -> None:
        super().__init__(f"{where}: {message}")
        self.where = where
        self.reason = reason
        """In a few words and without what is peculiar to this record, so that equal ones can be counted."""


@dataclass(kw_only=True)
class BadRecords:
    """What was skipped. Whoever reads without one stops at the first bad record."""

    read: int = 0
    """Records in all, bad ones included."""
    by_reason: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)
    """The first few of each reason, with file, line and what is wrong."""

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
        """Count a record that cannot be used; `reason` is for errors that name none."""
        if isinstance(error, RecordError):
            reason = error.reason
        self.by_reason[reason] += 1
        examples = self.examples.setdefault(reason, [])
        if len(examples) < EXAMPLES:
            examples.append(str(error))

    def too_many(self, max_share: float) -> bool:
        """Whether they exceed a share of what was read. A single one does not, unless none is allowed."""
        return len(self) > (max(1, max_share * self.read) if max_share else 0)

    def require_few(self, max_share: float, name: str) -> None:
        """Refuse what holds too many, or nothing else; `name` is what the user calls the limit."""
        if self and len(self) == self.read:
            raise UserError(f"none of {self.read:,} records can be used: {'; '.join(self.lines())}; mend the files")
        if self.too_many(max_share):
            raise UserError(
                f"{len(self):,} of {self.read:,} records are bad, above the share of {max_share:g} that {name} allows: "
                f"{'; '.join(self.lines())}; mend the files or raise {name}"
            )

    def as_json(self) -> dict[str, Any]:
        """For a run's record."""
        return {"records": len(self), "read": self.read, "by_reason": dict(self.by_reason), "examples": self.examples}

    def lines(self) -> Iterator[str]:
        """One for each reason, most frequent first: how many, and the first of them."""
        for reason, count in self.by_reason.most_common():
            yield f"{count:,} x {reason}, as {self.examples[reason][0]}"
