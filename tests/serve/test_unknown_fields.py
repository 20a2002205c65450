"""Fields that ask nothing of the text are taken; fields that are not known are refused, or ignored and named."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from each import each
from eyas.serve.protocol.request_policy import RequestPolicy
from eyas.serve.protocol.validation import IGNORED_HEADER, MOST_NAMED, ignored_header


@pytest.fixture
def lenient(new_server: Any) -> Iterator[Any]:
    """A server that ignores what it does not know."""
    with new_server(policy=RequestPolicy(unknown_fields="report")) as client:
        yield client


@each(
    "fields",
    [
        {"store": True},
        {"metadata": {"run": "7"}},
        {"safety_identifier": "someone"},
        {"prompt_cache_key": "k", "prompt_cache_retention": "24h"},
        {"service_tier": "flex"},
        {"user": "u"},
    ],
)
def test_fields_without_effect_on_the_text_are_accepted(client: Any, fields: dict[str, Any]) -> None:
    plain = client.complete().json["choices"]
    reply = client.complete(**fields)
    assert reply.json["choices"] == plain
    assert IGNORED_HEADER not in reply.headers


@each(
    ("fields", "parts"),
    [
        ({"store": "yes"}, ["store"]),
        ({"metadata": {"a": 1}}, ["metadata"]),
        ({"metadata": {str(number): "" for number in range(17)}}, ["metadata", "16"]),
        ({"metadata": {"a": "b" * 513}}, ["metadata", "512"]),
        ({"safety_identifier": "a" * 513}, ["safety_identifier", "512"]),
        ({"service_tier": "gold"}, ["service_tier", "gold", "flex"]),
        ({"verbosity": "high"}, ["verbosity", "not supported"]),
    ],
)
def test_fields_without_effect_on_the_text_are_bounded(
    client: Any, lenient: Any, fields: dict[str, Any], parts: list[str]
) -> None:
    for one in (client, lenient):
        one.complete(**fields).assert_refused(400, *parts)


def test_unknown_fields_are_ignored_and_named(lenient: Any) -> None:
    plain = lenient.complete().json["choices"]
    for stream in (False, True):
        reply = lenient.complete(colour="red", speculative={"mode": "off", "haste": 3}, stream=stream)
        assert reply.status == 200
        assert sorted(reply.headers[IGNORED_HEADER].split(", ")) == ["colour", "speculative.haste"]
    assert lenient.complete(colour="red").json["choices"] == plain
    lenient.all_back()


def test_unknown_fields_within_messages_are_found(lenient: Any) -> None:
    parts = [{"type": "text", "text": "Hi", "cache_control": {}}]
    messages = [
        {"role": "user", "content": parts, "user": {"name": 1}, "mood": "Ada"},
        {"role": "assistant", "content": "x", "voice": 1},
        {"role": "user", "content": "y"},
    ]
    reply = lenient.chat(messages=messages)
    assert reply.status == 200, reply.text
    named = reply.headers[IGNORED_HEADER].split(", ")
    assert sorted(named) == [
        "messages.0.content.0.cache_control",
        "messages.0.mood",
        "messages.0.user",
        "messages.1.voice",
    ]


def test_other_mistakes_are_still_refused(lenient: Any) -> None:
    lenient.complete(colour="red", temperature=-1).assert_refused(400, "temperature", "-1")
    lenient.complete(best_of=2).assert_refused(400, "best_of", "not supported")
    lenient.complete(**{f"field{number}": 1 for number in range(65)}).assert_refused(400, "field", "leave it out")


def test_a_header_holds_no_more_than_plain_signs() -> None:
    evil = json.loads('"a\\r\\nset-cookie: x\\u0000é"')
    header = ignored_header([evil, "b" * 1000, *(f"c{number}" for number in range(100))])[IGNORED_HEADER]
    assert header.startswith("a??set-cookie??x??, bbb")
    assert header.endswith(f"and {102 - MOST_NAMED} more")
    assert len(header) < 1200
    assert header.isascii()
    assert header.isprintable()
