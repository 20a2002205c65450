"""Requests of a soak: questions with known answers, objects of a schema, and bodies to be refused.

Every question has one right answer, greedy or by its seed, so that whatever stands beside it in the engine can be seen
not to matter. The objects are asked for with a seed of their own each time, and checked against the schema by hand.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@dataclass(frozen=True, kw_only=True)
class Question:
    """A request; `kind` groups it in the report."""

    kind: str
    path: str
    body: Mapping[str, Any]


def _chat(words: str, max_tokens: int, *, kind: str = "greedy chat", **fields: Any) -> Question:
    body = {"messages": [{"role": "user", "content": words}], "max_tokens": max_tokens, "temperature": 0} | fields
    return Question(kind=kind, path=CHAT, body=body)


def _text(prompt: str | list[str], max_tokens: int, **fields: Any) -> Question:
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0} | fields
    return Question(kind="completion", path=TEXT, body=body)


def _drawn(words: str, max_tokens: int, seed: int, **fields: Any) -> Question:
    kind = "two answers" if "n" in fields else "sampled chat"
    return _chat(words, max_tokens, kind=kind, temperature=0.9, top_p=0.95, seed=seed, **fields)


BIRD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "flies": {"type": "boolean"},
        "size": {"enum": ["small", "large"]},
    },
    "required": ["name", "flies", "size"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "bird", "schema": BIRD}}
FORMED = "in a form"
LEDGER = "The ledger of the harbour lists what came in that week: salt, rope, tar, oil, grain and slate. " * 16
"""A prompt that makes KV blocks scarce if several requests have it."""

QUESTIONS = (
    _chat("Name a bird.", 8),
    _text("Once upon a time", 24),
    _drawn("Tell me a joke.", 24, seed=7),
    _chat("Is an owl a bird?", 8, kind=FORMED, structured_outputs={"choice": ["yes", "no"]}),
    _drawn("Name a colour.", 12, seed=11, n=2),
    _chat("Why is the sky blue?", 96),
    _chat("Count from one to twenty.", 64),
    _chat("Write a short poem about rain.", 80),
    _chat("What is 17 plus 25?", 16),
    _chat("List five fruits, one per line.", 48),
    _chat("Translate 'good morning' into French.", 24),
    _chat("Say 'la' ten times.", 40, presence_penalty=0.5),
    _chat("Explain what a lever does.", 72),
    _chat("Who wrote Hamlet?", 32, stop=["."]),
    _chat("Describe a falcon.", 64, kind=FORMED, response_format=FORM),
    _chat("Give me a date.", 16, kind=FORMED, structured_outputs={"regex": "[0-9]{4}-[01][0-9]-[0-3][0-9]"}),
    _chat("Add some numbers.", 24, kind=FORMED, structured_outputs={"grammar": 'start: N ("+" N)*\nN: /[0-9]{1,3}/'}),
    _text("def fibonacci(n):\n", 64),
    _text(["The sea", "The sky"], 20),
    _text("1, 2, 3, 4, 5,", 48),
    _drawn("Invent a name for a boat.", 16, seed=13),
    _drawn("Write two sentences about the moon.", 56, seed=17, n=2),
    _chat(f"{LEDGER}\nWhat is this about?", 32),
    _text(LEDGER, 40),
)
FAREWELL = _chat("Tell a long story about a lighthouse.", 256, kind="farewell", ignore_eos=True)
"""A request that is still running when the server is stopped."""


def bird(seed: int) -> Question:
    """A request for an object of the schema, distinct by seed."""
    words = "Describe some bird as JSON."
    return _chat(words, 128, kind="JSON", temperature=1.0, seed=seed, response_format=FORM)


def is_bird(text: str) -> bool:
    """Whether a text is such an object."""
    try:
        told = json.loads(text)
    except ValueError:
        return False
    return (
        isinstance(told, dict)
        and set(told) == {"name", "flies", "size"}
        and isinstance(told["name"], str)
        and len(told["name"]) <= 12
        and isinstance(told["flies"], bool)
        and told["size"] in ("small", "large")
    )


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A body to be refused, with its status."""

    kind: str
    payload: bytes
    code: str


def refusals(max_model_len: int) -> tuple[Refusal, ...]:
    """Bodies for a server with this context length; a word is at least one token."""
    plain = _chat("Hello", 8).body
    long = _chat("word " * max_model_len, 8).body
    return (
        Refusal(kind="broken JSON", payload=json.dumps(plain).encode()[:-7], code="invalid_json"),
        Refusal(
            kind="unknown field", payload=json.dumps({**plain, "beak": "hooked"}).encode(), code="unknown_parameter"
        ),
        Refusal(kind="too long", payload=json.dumps(long).encode(), code="context_length_exceeded"),
    )
