"""Parses a record of any common format into a `Conversation`, which has known roles and text in every turn.

Errors name the record's line or row. `files.py` reads records from files.
"""

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from eyas.data.bad_records import RecordError

Message = Mapping[str, Any]

ROLES = {
    name: role
    for role, names in {
        "system": ("system", "developer"),
        "user": ("user", "human"),
        "assistant": ("assistant", "gpt", "chatgpt", "bing", "bard", "model"),
        "tool": ("tool", "function", "observation"),
    }.items()
    for name in names
}

# Alternative names of fields, in order of precedence.
TURN_LISTS = ("messages", "conversations", "conversation")
ROLE_KEYS, TEXT_KEYS = ("role", "from"), ("content", "value")
PROMPTS = ("prompt", "instruction", "question", "query")
CONTEXTS = ("input", "context")
"""Input of an Alpaca or Dolly instruction."""
ANSWERS = ("response", "completion", "output", "answer")
SYSTEMS = ("system", "system_prompt")
RECORD_KEYS = frozenset((*TURN_LISTS, "turns", *PROMPTS))
"""Every readable record has one of these."""

_SHOWN = 80


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One answer as token ids, with its prompt."""

    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    """With the stop token, unless a length limit ended it."""


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Messages of a conversation, with the other fields of its record."""

    messages: tuple[Message, ...]
    where: str
    """File and line, for error messages."""
    category: str | None = None
    finished: bool = True
    """False if a length limit ended the last answer: then no stop token was generated."""
    tools: tuple[Mapping[str, Any], ...] = ()
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Template arguments such as `enable_thinking`."""
    samples: tuple[Sample, ...] = ()
    """The answers as token ids, if the record has them; else they are made from `messages`."""
    author: str | None = None
    """The model that generated the answers, if the record names it."""
    author_fingerprint: str | None = None
    """Fingerprint of its weights (`target/parts.py`)."""

    @property
    def answered(self) -> bool:
        """Whether it has an answer; bare prompts are for the target to answer."""
        return any(message["role"] == "assistant" for message in self.messages)


class _BadRecordError(Exception):
    """Reason and message of a `RecordError`."""


def parse_conversation(row: object, where: str) -> Conversation:
    """Parse a record of any known format."""
    try:
        return _parse(row, where)
    except _BadRecordError as error:
        raise RecordError(where, *error.args) from error


def _parse(row: object, where: str) -> Conversation:
    if not isinstance(row, dict):
        message = f"a record is a {type(row).__name__}; it must be an object with messages or a prompt"
        raise _BadRecordError("no object", message)
    messages = _messages(row)
    category = row.get("category") or row.get("source")
    finished = True if row.get("finished") is None else row["finished"]
    if not isinstance(finished, bool):
        message = f"finished is {_short(finished)}; give true, or false when a length ended the last answer"
        raise _BadRecordError("wrong finished", message)
    return Conversation(
        messages=tuple(messages),
        where=where,
        category=None if category is None else str(category),
        finished=finished,
        tools=tuple(_objects(row, "tools")),
        chat_template_kwargs=_keywords(row),
        samples=tuple(_sample(sample) for sample in _objects(row, "samples")),
        author=None if row.get("target") is None else str(row["target"]),
        author_fingerprint=None if row.get("target_fingerprint") is None else str(row["target_fingerprint"]),
    )


def _messages(row: Mapping[str, Any]) -> list[Message]:
    if (key := _first(row, TURN_LISTS)) is not None:
        said = _from_the_first_question([_message(turn) for turn in _turns(row[key])])
    elif row.get("turns") is not None:
        said = [_message(turn) if isinstance(turn, dict) else _prompt(turn) for turn in _turns(row["turns"])]
    elif (key := _first(row, PROMPTS)) is not None:
        said = _prompt_and_answer(row, key)
    else:
        raise _BadRecordError(
            "none of the known formats",
            f"a record with keys {_short(sorted(row))} is none of the known kinds; "
            "give messages (OpenAI), conversations (ShareGPT), turns, instruction (Alpaca) or prompt",
        )
    system = _first(row, SYSTEMS)
    if system is None or said[0]["role"] == "system":
        return said
    return [{"role": "system", "content": _text(row[system], system)}, *said]


def _from_the_first_question(said: list[Message]) -> list[Message]:
    """Drop assistant turns before the first user turn, which split ShareGPT files have and many templates refuse."""
    first = next((i for i, message in enumerate(said) if message["role"] == "user"), 0)
    return [message for i, message in enumerate(said) if i >= first or message["role"] == "system"]


def _prompt_and_answer(row: Mapping[str, Any], key: str) -> list[Message]:
    """Question and answer from separate fields, with earlier ones from `history`."""
    said: list[Message] = []
    for pair in row.get("history") or ():
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            message = f"history holds {_short(pair)}; give pairs of question and answer"
            raise _BadRecordError("wrong history", message)
        said += [_prompt(pair[0]), {"role": "assistant", "content": _text(pair[1], "history")}]
    if _are_turns(row[key]):
        said += [_message(turn) for turn in row[key]]
    else:
        asked = _prompt(row[key])
        about = next((row[name] for name in CONTEXTS if row.get(name)), None)
        if about is not None and key != "prompt":
            asked = _prompt(f"{asked['content']}\n\n{_text(about, 'input')}")
        said.append(asked)
    answer = next((row[name] for name in ANSWERS if row.get(name)), None)
    if isinstance(answer, list) and _are_turns(answer):
        said += [_message(turn) for turn in answer]
    elif answer is not None:
        said.append({"role": "assistant", "content": _text(answer, "the answer")})
    return said


def _are_turns(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(_role_key(turn) is not None for turn in value)


def _role_key(turn: object) -> str | None:
    return _first(turn, ROLE_KEYS) if isinstance(turn, dict) else None


def _first(row: Mapping[str, Any], keys: Sequence[str]) -> str | None:
    return next((key for key in keys if row.get(key) is not None), None)


def _from_json(given: object, key: str) -> Any:
    """Parse JSON text, which tables without nested columns use for lists."""
    if not isinstance(given, str) or not given.strip():
        return given
    try:
        return json.loads(given)
    except ValueError as error:
        message = f"{key} is text that is not JSON ({error}); give a list of objects"
        raise _BadRecordError(f"wrong {key}", message) from error


def _objects(row: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    given = _from_json(row.get(key), key)
    if not given:
        return []
    if not isinstance(given, list) or not all(isinstance(item, dict) for item in given):
        raise _BadRecordError(f"wrong {key}", f"{key} is {_short(given)}; give a list of objects")
    return given


def _keywords(row: Mapping[str, Any]) -> dict[str, Any]:
    given = _from_json(row.get("chat_template_kwargs"), "chat_template_kwargs")
    if given is None or given == "":
        return {}
    if not isinstance(given, dict):
        message = f"chat_template_kwargs is {_short(given)}; give an object, such as {{'enable_thinking': true}}"
        raise _BadRecordError("wrong chat_template_kwargs", message)
    return given


def _sample(sample: Mapping[str, Any]) -> Sample:
    """Parse a sample, whose fields have vLLM's names."""
    parts = []
    for key in ("prompt_token_ids", "token_ids"):
        ids = sample.get(key)
        if not isinstance(ids, list) or not ids or not all(type(i) is int and i >= 0 for i in ids):
            message = f"a sample has {key} {_short(ids)}; give a list of token ids, at least one"
            raise _BadRecordError("wrong samples", message)
        parts.append(tuple(ids))
    return Sample(prompt_ids=parts[0], answer_ids=parts[1])


def _turns(turns: object) -> list[Any]:
    turns = _from_json(turns, "turns")
    if isinstance(turns, dict) and turns and all(isinstance(column, list) for column in turns.values()):
        # `datasets` tables store a sequence of objects as an object of columns.
        turns = [dict(zip(turns, values, strict=False)) for values in zip(*turns.values(), strict=False)]
    if not isinstance(turns, list) or not turns:
        raise _BadRecordError("no turns", f"turns are {_short(turns)}; give a list of at least one")
    return turns


def _message(turn: object) -> Message:
    key = _role_key(turn)
    if key is None or not isinstance(turn, dict):
        message = f"a turn is {_short(turn)}; give an object with 'role' and 'content', or 'from' and 'value'"
        raise _BadRecordError("a turn without role", message)
    named = turn[key]
    role = ROLES.get(named.strip().lower()) if isinstance(named, str) else None
    if role is None:
        near = difflib.get_close_matches(str(named), ROLES, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(ROLES)}"
        raise _BadRecordError(f"unknown role {_short(named)}", f"unknown role {_short(named)}; {hint}")
    text = next((name for name in TEXT_KEYS if name in turn), TEXT_KEYS[ROLE_KEYS.index(key)])
    # Other fields (thinking, tool calls) are for the template.
    kept = {name: value for name, value in turn.items() if name not in (key, text) and value is not None}
    for name, value in kept.items():
        if isinstance(value, str):
            _require_unicode(value, name)
    content = turn.get(text)
    if content is None and kept:
        content = ""
    return {**kept, "role": role, "content": _text(content, f"{text} of the {named} turn")}


def _prompt(text: object) -> Message:
    if not isinstance(text, str) or not text:
        raise _BadRecordError("a prompt that is no text", f"a prompt is {_short(text)}; give text")
    return {"role": "user", "content": _text(text, "the prompt")}


def _text(content: object, name: str) -> str:
    if isinstance(content, list):
        return "".join(_part(part, name) for part in content)
    if not isinstance(content, str):
        raise _BadRecordError("content that is no text", f"{name} is {_short(content)}; give text")
    _require_unicode(content, name)
    return content


def _part(part: object, name: str) -> str:
    if isinstance(part, dict) and part.get("type", "text") in ("text", "input_text", "output_text"):
        part = part.get("text")
    elif isinstance(part, dict):
        kind = f"part of type {_short(part.get('type'))}"
        raise _BadRecordError(f"a content {kind}", f"{name} holds a {kind}; only text can be trained on")
    if not isinstance(part, str):
        raise _BadRecordError("content that is no text", f"{name} holds {_short(part)}; give text")
    _require_unicode(part, name)
    return part


def _require_unicode(text: str, name: str) -> None:
    """Refuse lone surrogates, which JSON can hold and no tokenizer reads."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = ascii(text[error.start])
        message = f"{name} holds half a character, {half}; write the file as UTF-8 anew"
        raise _BadRecordError("half a character", message) from error


def _short(value: object) -> str:
    written = repr(value)
    return written if len(written) <= _SHOWN else f"{written[:_SHOWN]}..."
