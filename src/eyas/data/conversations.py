"""A conversation, and what of it stands in one record of any of the usual formats.

Invariant: a `Conversation` that exists has known roles and text in every turn. What is wrong with a record is said with
its line (or row), because files have millions of them. `files.py` reads records from files.
"""

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from eyas.data.bad_records import RecordError

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
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}

# Names of the same thing, in the order in which they are looked for.
TURN_LISTS = ("messages", "conversations", "conversation")
ROLE_KEYS, TEXT_KEYS = ("role", "from"), ("content", "value")
PROMPTS = ("prompt", "instruction", "question", "query")
CONTEXTS = ("input", "context")
"""What an Alpaca or Dolly instruction is about."""
ANSWERS = ("response", "completion", "output", "answer")
SYSTEMS = ("system", "system_prompt")
RECORD_KEYS = frozenset((*TURN_LISTS, "turns", *PROMPTS))
"""One of these is in every record that can be read."""

_SHOWN = 80
"""Characters of a wrong value in an error message."""


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


def parse_conversation(row: object, where: str) -> Conversation:
    """One record of any of the formats."""
    if not isinstance(row, dict):
        raise RecordError(
            where,
            "no object",
            f"a record is a {type(row).__name__}; it must be an object with messages or a prompt",
        )
    messages = _messages(row, where)
    category = row.get("category") or row.get("source")
    finished = True if row.get("finished") is None else row["finished"]
    if not isinstance(finished, bool):
        raise RecordError(
            where,
            "wrong finished",
            f"finished is {_short(finished)}; give true, or false when a length ended the last answer",
        )
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


def _messages(row: Mapping[str, Any], where: str) -> list[Message]:
    """The turns of a record, whatever it calls them."""
    if (key := _first(row, TURN_LISTS)) is not None:
        said = _from_the_first_question([_message(turn, where) for turn in _turns(row[key], where)])
    elif row.get("turns") is not None:
        said = [
            _message(turn, where) if isinstance(turn, dict) else _prompt(turn, where)
            for turn in _turns(row["turns"], where)
        ]
    elif (key := _first(row, PROMPTS)) is not None:
        said = _prompt_and_answer(row, key, where)
    else:
        raise RecordError(
            where,
            "none of the known formats",
            f"a record with keys {_short(sorted(row))} is none of the known kinds; "
            "give messages (OpenAI), conversations (ShareGPT), turns, instruction (Alpaca) or prompt",
        )
    system = _first(row, SYSTEMS)
    if system is None or said[0]["role"] == "system":
        return said
    return [{"role": "system", "content": _text(row[system], system, where)}, *said]


def _from_the_first_question(said: list[Message]) -> list[Message]:
    """Without what an assistant says before anybody asks: files that split long conversations begin so (ShareGPT).

    Nobody can generate an answer to nothing, and many templates refuse it.
    """
    first = next((i for i, message in enumerate(said) if message["role"] == "user"), 0)
    return [message for i, message in enumerate(said) if i >= first or message["role"] == "system"]


def _prompt_and_answer(row: Mapping[str, Any], key: str, where: str) -> list[Message]:
    """A question with its answer, if it has one, in fields of their own; earlier ones may stand in `history`."""
    said: list[Message] = []
    for pair in row.get("history") or ():
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise RecordError(
                where, "wrong history", f"history holds {_short(pair)}; give pairs of question and answer"
            )
        said += [_prompt(pair[0], where), {"role": "assistant", "content": _text(pair[1], "history", where)}]
    if _are_turns(row[key]):
        said += [_message(turn, where) for turn in row[key]]
    else:
        asked = _prompt(row[key], where)
        about = next((row[name] for name in CONTEXTS if row.get(name)), None)
        if about is not None and key != "prompt":
            asked = _prompt(f"{asked['content']}\n\n{_text(about, 'input', where)}", where)
        said.append(asked)
    answer = next((row[name] for name in ANSWERS if row.get(name)), None)
    if isinstance(answer, list) and _are_turns(answer):
        said += [_message(turn, where) for turn in answer]
    elif answer is not None:
        said.append({"role": "assistant", "content": _text(answer, "the answer", where)})
    return said


def _are_turns(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(_role_key(turn) is not None for turn in value)


def _role_key(turn: object) -> str | None:
    return _first(turn, ROLE_KEYS) if isinstance(turn, dict) else None


def _first(row: Mapping[str, Any], keys: Sequence[str]) -> str | None:
    """The first of `keys` that `row` has something under."""
    return next((key for key in keys if row.get(key) is not None), None)


def _from_json(given: object, key: str, where: str) -> Any:
    """Tables without nested columns hold lists as JSON text."""
    if not isinstance(given, str) or not given.strip():
        return given
    try:
        return json.loads(given)
    except ValueError as error:
        raise RecordError(
            where, f"wrong {key}", f"{key} is text that is not JSON ({error}); give a list of objects"
        ) from error


def _objects(row: Mapping[str, Any], key: str, where: str) -> list[dict[str, Any]]:
    """A list of objects; empty where the record has none."""
    given = _from_json(row.get(key), key, where)
    if not given:
        return []
    if not isinstance(given, list) or not all(isinstance(item, dict) for item in given):
        raise RecordError(where, f"wrong {key}", f"{key} is {_short(given)}; give a list of objects")
    return given


def _keywords(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    given = _from_json(row.get("chat_template_kwargs"), "chat_template_kwargs", where)
    if given is None or given == "":
        return {}
    if not isinstance(given, dict):
        raise RecordError(
            where,
            "wrong chat_template_kwargs",
            f"chat_template_kwargs is {_short(given)}; give an object, such as {{'enable_thinking': true}}",
        )
    return given


def _sample(sample: Mapping[str, Any], where: str) -> Sample:
    """Tokens under the names that vLLM gives them."""
    parts = []
    for key in ("prompt_token_ids", "token_ids"):
        ids = sample.get(key)
        if not isinstance(ids, list) or not ids or not all(type(i) is int and i >= 0 for i in ids):
            raise RecordError(
                where, "wrong samples", f"a sample has {key} {_short(ids)}; give a list of token ids, at least one"
            )
        parts.append(tuple(ids))
    return Sample(prompt_ids=parts[0], answer_ids=parts[1])


def _turns(turns: object, where: str) -> list[Any]:
    turns = _from_json(turns, "turns", where)
    if isinstance(turns, dict) and turns and all(isinstance(column, list) for column in turns.values()):
        # A sequence of objects in a `datasets` table is stored as an object of columns.
        turns = [dict(zip(turns, values, strict=False)) for values in zip(*turns.values(), strict=False)]
    if not isinstance(turns, list) or not turns:
        raise RecordError(where, "no turns", f"turns are {_short(turns)}; give a list of at least one")
    return turns


def _message(turn: object, where: str) -> Message:
    key = _role_key(turn)
    if key is None or not isinstance(turn, dict):
        raise RecordError(
            where,
            "a turn without role",
            f"a turn is {_short(turn)}; give an object with 'role' and 'content', or 'from' and 'value'",
        )
    named = turn[key]
    role = ROLES.get(named.strip().lower()) if isinstance(named, str) else None
    if role is None:
        near = difflib.get_close_matches(str(named), ROLES, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(ROLES)}"
        raise RecordError(where, f"unknown role {_short(named)}", f"unknown role {_short(named)}; {hint}")
    text = next((name for name in TEXT_KEYS if name in turn), TEXT_KEYS[ROLE_KEYS.index(key)])
    # Whatever else a turn carries (thinking, tool calls) is the template's business.
    kept = {name: value for name, value in turn.items() if name not in (key, text) and value is not None}
    for name, value in kept.items():
        if isinstance(value, str):
            _require_unicode(value, name, where)
    content = turn.get(text)
    if content is None and kept:
        content = ""
    return {**kept, "role": role, "content": _text(content, f"{text} of the {named} turn", where)}


def _prompt(text: object, where: str) -> Message:
    if not isinstance(text, str) or not text:
        raise RecordError(where, "a prompt that is no text", f"a prompt is {_short(text)}; give text")
    return {"role": "user", "content": _text(text, "the prompt", where)}


def _text(content: object, name: str, where: str) -> str:
    """Text as it is, or the text of content parts."""
    if isinstance(content, list):
        return "".join(_part(part, name, where) for part in content)
    if not isinstance(content, str):
        raise RecordError(where, "content that is no text", f"{name} is {_short(content)}; give text")
    _require_unicode(content, name, where)
    return content


def _part(part: object, name: str, where: str) -> str:
    if isinstance(part, dict) and part.get("type", "text") in ("text", "input_text", "output_text"):
        part = part.get("text")
    elif isinstance(part, dict):
        kind = part.get("type")
        raise RecordError(
            where,
            f"a content part of type {_short(kind)}",
            f"{name} holds a part of type {_short(kind)}; only text can be trained on",
        )
    if not isinstance(part, str):
        raise RecordError(where, "content that is no text", f"{name} holds {_short(part)}; give text")
    _require_unicode(part, name, where)
    return part


def _require_unicode(text: str, name: str, where: str) -> None:
    """JSON can write halves of a character (lone surrogates), which no tokenizer reads."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = ascii(text[error.start])
        raise RecordError(
            where, "half a character", f"{name} holds half a character, {half}; write the file as UTF-8 anew"
        ) from error


def _short(value: object) -> str:
    written = repr(value)
    return written if len(written) <= _SHOWN else f"{written[:_SHOWN]}..."
