"""Workload of a bench: conversations from files, or random token ids, in an order that a seed fixes.

Spec-Bench, SPEED-Bench and EAGLE's question files have `turns` and `category`; messages and bare prompts work as well.
Records that cannot be read are skipped and reported, so that a file cut off by a download is still of use.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

from eyas.data.conversations import Conversation, parse_conversation
from eyas.data.files import read_conversations
from eyas.errors import UserError

WITHHELD = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"
"""Placeholder in SPEED-Bench for texts that its own script fetches."""
FIRST_ID = 256
"""First id of synthetic prompts: most vocabularies begin with special tokens."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A conversation: messages before the first question, and the user's turns."""

    key: str
    category: str
    context: tuple[Mapping[str, Any], ...] = ()
    turns: tuple[str, ...] = ()
    ids: tuple[int, ...] = ()
    """Synthetic prompt, instead of turns."""

    @property
    def requests(self) -> int:
        return max(1, len(self.turns))


@dataclass(frozen=True, kw_only=True)
class Source:
    """A file and how many of its records were used."""

    path: str
    sha256: str
    read: int
    left_out: tuple[str, ...]
    """Errors of the others, each with its line."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Tasks in the order they are asked."""

    tasks: tuple[Task, ...]
    sources: tuple[Source, ...] = ()

    @property
    def sha256(self) -> str:
        """Digest of the tasks in their order, their keys aside."""
        told = json.dumps([asdict(task) | {"key": None} for task in self.tasks], sort_keys=True)
        return hashlib.sha256(told.encode()).hexdigest()

    @property
    def categories(self) -> dict[str, int]:
        names = [task.category for task in self.tasks]
        return dict(sorted(((name, names.count(name)) for name in set(names)), key=lambda pair: (-pair[1], pair[0])))


def read_workload(files: Sequence[Path], *, limit: int | None, turns: int | None, seed: int) -> Workload:
    """Read files and sample tasks evenly over categories."""
    tasks: list[Task] = []
    sources = []
    for file in files:
        own, source = _read_file(file, turns)
        if not own:
            raise UserError(
                f"{file}: none of its {len(source.left_out)} records can be asked, the first: {source.left_out[0]}"
            )
        tasks += own
        sources.append(source)
    return Workload(tasks=sample_tasks(tasks, limit=limit, seed=seed), sources=tuple(sources))


def synthetic_workload(prompt_tokens: int, *, tasks: int, vocabulary: int, seed: int) -> Workload:
    """Prompts of random ids, for load only: no drafter can predict such text."""
    if vocabulary < 4:
        raise UserError(f"a vocabulary of {vocabulary} has no room for prompts; give --vocab 4 or more")
    draw, first = Random(seed), min(FIRST_ID, vocabulary // 2)
    made = (tuple(draw.randrange(first, vocabulary) for _ in range(prompt_tokens)) for _ in range(tasks))
    name = f"synthetic {prompt_tokens}"
    return Workload(tasks=tuple(Task(key=f"{name}:{i}", category=name, ids=ids) for i, ids in enumerate(made, 1)))


def sample_tasks(tasks: Sequence[Task], *, limit: int | None, seed: int) -> tuple[Task, ...]:
    """Take up to `limit` tasks from the categories in turn, and shuffle them."""
    draw = Random(seed)
    piles: dict[str, list[Task]] = {}
    for task in tasks:
        piles.setdefault(task.category, []).append(task)
    for pile in piles.values():
        draw.shuffle(pile)
    wanted = len(tasks) if limit is None else min(limit, len(tasks))
    chosen: list[Task] = []
    while len(chosen) < wanted:
        chosen += [pile.pop() for pile in piles.values() if pile]
    del chosen[wanted:]
    draw.shuffle(chosen)
    return tuple(chosen)


def _read_file(path: Path, turns: int | None) -> tuple[list[Task], Source]:
    tasks: list[Task] = []
    left_out: list[str] = []
    for found in _records(path):
        try:
            if isinstance(found, UserError):
                raise found
            tasks.append(_task(found, path, turns))
        except UserError as error:
            left_out.append(str(error))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if not tasks and not left_out:
        raise UserError(f"{path} is empty; give prompts or conversations, one JSON object per line")
    return tasks, Source(path=str(path), sha256=digest, read=len(tasks), left_out=tuple(left_out))


def _records(path: Path) -> Iterator[Conversation | UserError]:
    """The conversations of a file, or their errors."""
    if path.suffix == ".parquet":
        yield from read_conversations(path)
        return
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; check the path") from error
    for number, line in enumerate(lines, start=1):
        if line.strip():
            where = f"{path.name}:{number}"
            try:
                yield parse_conversation(json.loads(line), where)
            except UserError as error:
                yield error
            except ValueError as error:  # neither JSON nor UTF-8
                yield UserError(f"{where} is not JSON ({error})")


def _task(conversation: Conversation, path: Path, turns: int | None) -> Task:
    where, messages = conversation.where, conversation.messages
    if any(WITHHELD in str(message["content"]) for message in messages):
        raise UserError(f"{where} holds a placeholder for text; fetch the text with SPEED-Bench's own script")
    users = [place for place, message in enumerate(messages) if message["role"] == "user"]
    if not users:
        raise UserError(f"{where} has no user's message to answer")
    # With answers in the record, only its last question is asked; without, the server answers turn by turn.
    first = users[-1] if conversation.answered else users[0]
    asked = tuple(str(messages[place]["content"]) for place in users if place >= first)
    return Task(
        key=f"{path.name}:{where.rpartition(':')[2]}",
        category=conversation.category or path.stem,
        context=tuple(messages[:first]),
        turns=asked[:turns],
    )
