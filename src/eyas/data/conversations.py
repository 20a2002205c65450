"""Conversations on disk: OpenAI messages, ShareGPT turns or bare prompts, as JSON lines or Parquet.

Invariant: a `Conversation` that exists has known roles and text in every turn. What is wrong with a file is said with
its line (or row), because these files have millions of them.
"""

import difflib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eyas.errors import UserError

Message = Mapping[str, Any]

# What the formats call the four parties.
ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One answer as tokens: what its author read, and what it said."""

    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    """With the stop token, where the author ended it and not a length."""


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Messages in the order they were said."""

    messages: tuple[Message, ...]
    where: str
    """File and line, for error messages."""
    category: str | None = None
    finished: bool = True
    """Whether the last answer was ended by its author. Where a length ended it, nobody generated the closing token."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """What the assistant may call, as the template takes it."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments for the template, such as `enable_thinking`."""
    samples: tuple[Sample, ...] = ()
    """The answers as tokens, in order, where a record keeps them; empty: they are made from `messages`."""
    author: str | None = None
    """The target that gave the answers, where a record says so."""
    author_fingerprint: str | None = None
    """The same by its weights (`target/fingerprint.py`)."""

    @property
    def answered(self) -> bool:
        """Whether there is anything of an assistant's in it; bare prompts are for the target to answer."""
        return any(message["role"] == "assistant" for message in self.messages)


def read_conversations(path: Path) -> Iterator[Conversation]:
    """Read a file lazily, in order."""
    rows = _parquet_rows(path) if path.suffix == ".parquet" else _json_rows(path)
    empty = True
    for where, row in rows:
        empty = False
        yield parse_conversation(row, where)
    if empty:
        raise UserError(f"{path} holds no conversations; give a file with at least one line")


def parse_conversation(row: object, where: str) -> Conversation:
    """One record of any of the formats."""
    if not isinstance(row, dict):
        raise UserError(f"{where}: a record is a {type(row).__name__}; it must be an object with messages or a prompt")
    messages: list[Message]
    if row.get("messages") is not None:
        messages = [_message(turn, where, role="role", text="content") for turn in _turns(row["messages"], where)]
    elif row.get("conversations") is not None:
        messages = [_message(turn, where, role="from", text="value") for turn in _turns(row["conversations"], where)]
    elif row.get("turns") is not None:
        messages = [_prompt(turn, where) for turn in _turns(row["turns"], where)]
    elif row.get("prompt") is not None:
        messages = [_prompt(row["prompt"], where)]
    else:
        raise UserError(
            f"{where}: a record with keys {sorted(row)} is none of the known kinds; "
            "give messages (OpenAI), conversations (ShareGPT), turns or prompt"
        )
    category = row.get("category") or row.get("source")
    finished = True if row.get("finished") is None else row["finished"]
    if not isinstance(finished, bool):
        raise UserError(f"{where}: finished is {finished!r}; give true, or false when a length ended the last answer")
    return Conversation(
        messages=tuple(messages),
        where=where,
        category=None if category is None else str(category),
        finished=finished,
        tools=tuple(_objects(row, "tools", where)),
        chat_template_kwargs=_keywords(row, where),
        samples=tuple(_sample(sample, where) for sample in _objects(row, "samples", where)),
        author=None if row.get("target") is None else str(row["target"]),
        author_fingerprint=None if row.get("target_fingerprint") is None else str(row["target_fingerprint"]),
    )


def _objects(row: Mapping[str, Any], key: str, where: str) -> list[dict[str, Any]]:
    """A list of objects; tables without nested columns hold it as JSON text. Empty where the record has none."""
    given = row.get(key)
    if isinstance(given, str) and given.strip():
        try:
            given = json.loads(given)
        except ValueError as error:
            raise UserError(f"{where}: {key} is text that is not JSON ({error}); give a list of objects") from error
    if not given:
        return []
    if not isinstance(given, list) or not all(isinstance(item, dict) for item in given):
        raise UserError(f"{where}: {key} is {given!r}; give a list of objects")
    return given


def _keywords(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    given = row.get("chat_template_kwargs")
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise UserError(
            f"{where}: chat_template_kwargs is {given!r}; give an object, such as {{'enable_thinking': true}}"
        )
    return given


def _sample(sample: Mapping[str, Any], where: str) -> Sample:
    """Tokens under the names that vLLM gives them."""
    parts = []
    for key in ("prompt_token_ids", "token_ids"):
        ids = sample.get(key)
        if not isinstance(ids, list) or not ids or not all(type(i) is int and i >= 0 for i in ids):
            raise UserError(f"{where}: a sample has {key} {ids!r}; give a list of token ids, at least one")
        parts.append(tuple(ids))
    return Sample(prompt_ids=parts[0], answer_ids=parts[1])


def _turns(turns: object, where: str) -> list[Any]:
    if not isinstance(turns, list) or not turns:
        raise UserError(f"{where}: turns are {turns!r}; give a list of at least one")
    return turns


def _message(turn: object, where: str, *, role: str, text: str) -> Message:
    if not isinstance(turn, dict) or role not in turn:
        raise UserError(f"{where}: a turn is {turn!r}; give an object with {role!r} and {text!r}")
    named = turn[role]
    if not isinstance(named, str) or named not in ROLES:
        near = difflib.get_close_matches(str(named), ROLES, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(ROLES)}"
        raise UserError(f"{where}: unknown role {named!r}; {hint}")
    # Whatever else a turn carries (thinking, tool calls) is the template's business.
    kept = {key: value for key, value in turn.items() if key not in (role, text) and value is not None}
    content = turn.get(text)
    if not isinstance(content, str) and not (content is None and kept):
        raise UserError(f"{where}: the {named} turn has {text} {content!r}; give text")
    return {**kept, "role": ROLES[named], "content": content or ""}


def _prompt(text: object, where: str) -> Message:
    if not isinstance(text, str) or not text:
        raise UserError(f"{where}: a prompt is {text!r}; give text")
    return {"role": "user", "content": text}


def _json_rows(path: Path) -> Iterator[tuple[str, object]]:
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    where = f"{path}:{number}"
                    try:
                        yield where, json.loads(line)
                    except ValueError as error:
                        raise UserError(f"{where} is not JSON ({error}); mend or remove the line") from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; check the path") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text ({error.reason}); give JSON lines or a .parquet file") from error


def _parquet_rows(path: Path) -> Iterator[tuple[str, object]]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise UserError(f"reading {path} needs pyarrow; install it with `pip install eyas[parquet]`") from error
    try:
        with parquet.ParquetFile(path) as table:
            number = 0
            for batch in table.iter_batches():
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}:{number}", row
    except (OSError, ArrowException) as error:
        raise UserError(f"cannot read {path} as Parquet ({error}); check the file") from error
