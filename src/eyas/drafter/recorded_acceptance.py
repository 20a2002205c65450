"""acceptance.json in a drafter's folder: how often its drafts were accepted, by depth. Imports no torch.

An engine starts from it; vLLM does not read the file. Training writes an estimate on held-out text, which measurements
while serving soon outweigh.

    {"version": 1, "source": "estimated on held-out text", "rounds": 5120, "accepted_at": [3738, 2654, 1805]}

`accepted_at` counts the rounds that accepted the tokens at depths 1, 2, ... and all before them.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from eyas.errors import UserError

FILE = "acceptance.json"
VERSION = 1


@dataclass(frozen=True, kw_only=True)
class RecordedAcceptance:
    """Number of rounds, and how many accepted each depth."""

    rounds: int
    accepted_at: tuple[int, ...]
    source: str

    def by_depth(self) -> list[float]:
        """Return the chance of acceptance at each depth, given that all before it were accepted."""
        tries = (self.rounds, *self.accepted_at)
        return [hits / of for of, hits in zip(tries, self.accepted_at, strict=False) if of]

    def to_json(self) -> str:
        content = {"version": VERSION, "source": self.source, "rounds": self.rounds, "accepted_at": self.accepted_at}
        return json.dumps(content) + "\n"


def read_acceptance(folder: Path) -> RecordedAcceptance | None:
    """Read the record in a drafter's folder; None if there is none."""
    path = folder / FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}); delete it or write it again") from error
    fault = _fault(content)
    if fault:
        raise UserError(f"{path}: {fault}; delete it or write it again")
    return RecordedAcceptance(
        rounds=content["rounds"], accepted_at=tuple(content["accepted_at"]), source=content["source"]
    )


def _fault(content: object) -> str:
    if not isinstance(content, dict):
        return f"holds a {type(content).__name__} instead of an object"
    if content.get("version") != VERSION:
        return f"version is {content.get('version')!r}, and this eyas reads {VERSION}"
    if not isinstance(content.get("source"), str):
        return f"source is {content.get('source')!r} instead of a text"
    rounds, accepted = content.get("rounds"), content.get("accepted_at")
    if type(rounds) is not int or rounds < 1:
        return f"rounds is {rounds!r}, and there must be 1 at least"
    if not isinstance(accepted, list) or not accepted or any(type(count) is not int for count in accepted):
        return f"accepted_at is {accepted!r} instead of counts by depth"
    if [rounds, *accepted] != sorted([rounds, *accepted], reverse=True) or accepted[-1] < 0:
        return f"accepted_at {accepted} must fall from at most {rounds} rounds to no less than 0"
    return ""
