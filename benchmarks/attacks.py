"""Attacks on a server: expensive bodies, and bytes that are not proper HTTP.

Each attack says which statuses are a good answer. 503 always is one, with a Retry-After: a busy server may say so. An
answer that does not come in time, a connection that is dropped without a word where a word is due, a 500: none of them
is ever good.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from soak_clients import WrongAnswerError
from soak_questions import CHAT, TEXT

CLOSED = 0
"""Pseudo status: the server closed the connection without an answer."""
ANSWER_SECONDS = 60.0
BODY_BYTES = 4 * 2**20
"""The largest body that the server takes."""


class HurtError(WrongAnswerError):
    """The server's answer to an attack is wrong."""


@dataclass(frozen=True, kw_only=True)
class Attack:
    """An attack; `send` returns the status of the answer, or `CLOSED`."""

    name: str
    good: frozenset[int]
    send: Callable[["Victim"], Awaitable[int]]
    seconds: float = ANSWER_SECONDS
    """Seconds until the answer must arrive."""
    path: str | None = None
    """The completion route that counts it as a request; None if it does not get that far."""

    async def run(self, victim: "Victim") -> int:
        """Return the status; raises if it is wrong or late."""
        try:
            async with asyncio.timeout(self.seconds):
                status = await self.send(victim)
        except TimeoutError:
            raise HurtError(f"no answer within {self.seconds:g} s") from None
        if status not in self.good:
            raise HurtError(f"status {status}, not {sorted(self.good)}")
        return status


class Victim:
    """Address of the server, for raw bytes."""

    def __init__(self, url: str) -> None:
        place = urlsplit(url)
        self.address, self.port = place.hostname, place.port

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection."""
        return await asyncio.open_connection(self.address, self.port)

    async def exchange(self, *pieces: bytes) -> int:
        """Send bytes piece by piece; return the status of the answer."""
        reader, writer = await self.open()
        try:
            with suppress(ConnectionError):  # an answer may come, and the connection close, before all was sent
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
            return await status_of(reader)
        finally:
            writer.close()

    async def post(self, path: str, payload: bytes, *headers: str) -> int:
        """Send a proper request."""
        return await self.exchange(self.head("POST", path, *headers, f"content-length: {len(payload)}"), payload)

    def head(self, method: str, path: str, *headers: str, host: str | None = None) -> bytes:
        """The head of a request."""
        lines = [f"{method} {path} HTTP/1.1", f"host: {host or f'{self.address}:{self.port}'}", "connection: close"]
        return "\r\n".join([*lines, "content-type: application/json", *headers, "", ""]).encode("latin-1")


async def status_of(reader: asyncio.StreamReader) -> int:
    """Read an answer to its end; return its status, or `CLOSED`."""
    try:
        line = await reader.readline()
        while line.startswith(b"HTTP/1.1 100"):
            await reader.readline()
            line = await reader.readline()
        headers = {}
        while (header := (await reader.readline()).strip()) != b"":
            name, _, value = header.partition(b":")
            headers[name.lower()] = value.strip()
        while await reader.read(2**16):
            pass
    except ConnectionError:
        return CLOSED
    if not line:
        return CLOSED
    status = int(line.split()[1])
    if status in (429, 503) and not headers.get(b"retry-after", b"").isdigit():
        raise HurtError(f"a {status} does not say when to come back")
    return status


def _body(name: str, path: str, body: Any, good: Sequence[int], **options: Any) -> Attack:
    payload = body if isinstance(body, bytes) else json.dumps(body).encode()

    async def send(victim: Victim) -> int:
        return await victim.post(path, payload)

    # A full server may refuse anything before it looks at it, and any server what is too large.
    return Attack(name=name, good=frozenset(good) | {413, 429, 503}, send=send, path=path, **options)


def _raw(name: str, make: Callable[[Victim], Sequence[bytes]], good: Sequence[int], **options: Any) -> Attack:
    async def send(victim: Victim) -> int:
        return await victim.exchange(*make(victim))

    # What gets as far as a route may find the server full.
    busy = {429, 503} if "path" in options else set()
    return Attack(name=name, good=frozenset(good) | busy, send=send, **options)


def _chat(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4} | fields


def _schema(name: str, schema: Any, good: Sequence[int] = (200, 400)) -> Attack:
    form = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}
    return _body(f"schema: {name}", CHAT, _chat(response_format=form), good)


def _outputs(name: str, outputs: dict[str, Any], good: Sequence[int] = (200, 400)) -> Attack:
    return _body(name, CHAT, _chat(structured_outputs=outputs), good)


def _nested_arrays(levels: int, items: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema, "minItems": items, "maxItems": items}
    return schema


def _doubling(levels: int) -> dict[str, Any]:
    """A schema whose definitions each use the previous one twice: 2 ** levels when expanded."""
    defs: dict[str, Any] = {"d0": {"type": "integer"}}
    for level in range(1, levels):
        use = {"$ref": f"#/$defs/d{level - 1}"}
        both = {"type": "object", "properties": {"a": use, "b": use}, "required": ["a", "b"]}
        defs[f"d{level}"] = both | {"additionalProperties": False}
    return {"$defs": defs, "$ref": f"#/$defs/d{levels - 1}"}


def _tool(parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


INTEGERS = {"type": "array", "items": {"type": "integer"}}


def grammar_attacks() -> Iterator[Attack]:
    """Small schemas, expressions and grammars that are expensive to compile or follow."""
    yield _schema("a thousand million items at least", INTEGERS | {"minItems": 10**9}, [400])
    yield _schema("two million items at most", INTEGERS | {"maxItems": 2_000_000}, [400])
    yield _schema("one more", INTEGERS | {"maxItems": 2_000_001}, [400])
    yield _schema("the same in $defs", {"$defs": {"x": INTEGERS | {"minItems": 10**9}}, "$ref": "#/$defs/x"}, [400])
    yield _schema("items of items of items", _nested_arrays(3, 1000))
    yield _schema("small items, eight deep", _nested_arrays(8, 8))
    yield _schema("a text of a thousand million letters", {"type": "string", "minLength": 10**9}, [400])
    yield _schema("a pattern that repeats a repetition", {"type": "string", "pattern": "^((a{999}){999}){999}$"}, [400])
    yield _schema("a doubling of definitions", _doubling(40))
    yield _schema("a reference to itself", {"$defs": {"x": {"$ref": "#/$defs/x"}}, "$ref": "#/$defs/x"})
    yield _schema("a reference to another server", {"$ref": "http://127.0.0.1:1/schema.json"}, [400])
    properties = {f"p{number}": {"type": "string"} for number in range(3000)}
    yield _schema("three thousand optional properties", {"type": "object", "properties": properties})
    words = ["".join(f"{number:09d}" for number in range(start, start + 3)) for start in range(20_000)]
    yield _schema("twenty thousand choices", {"enum": words})
    kinds = [{"type": "object", "properties": {f"k{one}": {"const": one}}} for one in range(400)]
    yield _schema("any of four hundred, twice", {"allOf": [{"anyOf": kinds}, {"anyOf": kinds}]})
    yield _schema("a number between huge ones", {"type": "number", "minimum": -1e300, "maximum": 1e300})
    yield _schema("a multiple of very little", {"type": "number", "multipleOf": 1e-300})
    deep: Any = {"type": "integer"}
    for _ in range(400):
        deep = {"type": "array", "items": deep}
    yield _schema("four hundred levels", deep)
    yield _body("schema: a hundred thousand levels", CHAT, b'{"a":' * 100_000 + b"1" + b"}" * 100_000, [400])

    yield _outputs("expression: a repetition of repetitions", {"regex": "((a{1000}){1000}){1000}"}, [400])
    yield _outputs("expression: a large automaton", {"regex": "(a|b)*c(a|b){40}[ab]*"})
    yield _outputs("expression: many at once", {"regex": "|".join(f"(.*{n}.*a{{{n % 50}}})" for n in range(2000))})
    yield _outputs("expression: two megabytes", {"regex": "ab?" * 700_000}, [400])
    yield _outputs("grammar: a repetition in Lark", {"grammar": "start: X{1000000000}\nX: /a/"}, [400])
    lark = f"start: %json {json.dumps(INTEGERS | {'minItems': 10**9})}"
    yield _outputs("grammar: a schema within Lark", {"grammar": lark}, [400])
    yield _outputs("grammar: GBNF that repeats", {"grammar": 'root ::= ("a"{1000000}){1000000}'}, [400])
    ambiguous = 'start: e\ne: e e | e e e | "a" | "b" | "aa" | "ab"'
    yield _outputs("grammar: ambiguous everywhere", {"grammar": ambiguous})
    yield _outputs("choice: fifty thousand", {"choice": [f"{n:040d}" for n in range(50_000)]})
    tools = [_tool({"type": "object", "properties": {"x": INTEGERS | {"minItems": 10**9}}, "required": ["x"]})]
    yield _body("tools: a thousand million items", CHAT, _chat(tools=tools, tool_choice="required"), [400])


def body_attacks() -> Iterator[Attack]:
    """Bodies within the size limit that are expensive to count, parse or tokenise."""
    many = BODY_BYTES // 5
    yield _body("400,000 prompts of a letter", TEXT, {"prompt": ["a"] * 400_000, "max_tokens": 1}, [400])
    yield _body("400,000 prompts of a token", TEXT, {"prompt": [[5]] * 400_000, "max_tokens": 1}, [400])
    yield _body("a prompt of a million tokens", TEXT, {"prompt": [7] * many, "max_tokens": 1}, [400])
    for name, letter in (("letter", "a"), ("blank", " "), ("line", "\n"), ("accent", "é"), ("bird", "🦅")):
        text = letter * ((BODY_BYTES - 1000) // len(letter.encode()))
        body = json.dumps({"prompt": text, "max_tokens": 1}, ensure_ascii=False).encode()
        yield _body(f"four megabytes of one {name}", TEXT, body, [400])
    yield _body("four megabytes of words", TEXT, {"prompt": "word " * 800_000, "max_tokens": 1}, [400, 413])
    yield _body(
        "a message of four megabytes", CHAT, _chat(messages=[{"role": "user", "content": "x" * 4_000_000}]), [400]
    )
    messages = [{"role": ("user", "assistant")[n % 2], "content": ""} for n in range(80_000)]
    yield _body("80,000 empty messages", CHAT, _chat(messages=messages), [400])
    parts = [{"type": "text", "text": ""}] * 100_000
    yield _body("a message of 100,000 parts", CHAT, _chat(messages=[{"role": "user", "content": parts}]), [200, 400])
    yield _body("128 answers to 100 prompts", TEXT, {"prompt": ["a"] * 100, "n": 128, "max_tokens": 1}, [400])
    yield _body("half a million stop strings", TEXT, {"prompt": "a", "stop": ["ab"] * 500_000, "max_tokens": 1}, [400])
    bias = {str(n): 1 for n in range(300_000)}
    yield _body("300,000 biases", TEXT, {"prompt": "a", "logit_bias": bias, "max_tokens": 1}, [400])
    yield _body(
        "a megabyte of stop tokens", TEXT, {"prompt": "a", "stop_token_ids": [1] * 500_000, "max_tokens": 1}, [200, 400]
    )
    yield _body("a deep list", TEXT, b'{"prompt": ' + b"[" * 1_000_000 + b"]" * 1_000_000 + b"}", [400])
    yield _body("a long number", TEXT, b'{"prompt": "a", "seed": ' + b"9" * 1_000_000 + b"}", [400])
    yield _body("100,000 unknown fields", TEXT, {f"field{n}": n for n in range(100_000)}, [400])
    yield _body("a name of a megabyte", TEXT, {"model": "m" * 2**20, "prompt": "a"}, [400, 404])
    yield _body("lone surrogates", TEXT, b'{"prompt": "\\ud800\\udfff\\ud800", "max_tokens": 1}', [200, 400])
    yield _body("no UTF-8", TEXT, b'{"prompt": "\xff\xfe"}', [400])


def protocol_attacks() -> Iterator[Attack]:
    """Malformed or oversized HTTP."""
    refused = [400, CLOSED]
    yield _raw(
        "both lengths",
        lambda v: [v.head("POST", TEXT, "content-length: 2", "transfer-encoding: chunked"), b"0\r\n\r\n"],
        [400],
    )
    yield _raw("two lengths", lambda v: [v.head("POST", TEXT, "content-length: 2", "content-length: 3"), b"{}"], [400])
    yield _raw(
        "a length beyond the limit", lambda v: [v.head("POST", TEXT, f"content-length: {10**12}")], [413], seconds=5
    )
    yield _raw("no number as length", lambda v: [v.head("POST", TEXT, "content-length: -1")], [400])
    yield _raw(
        "no number as chunk",
        lambda v: [v.head("POST", TEXT, "transfer-encoding: chunked"), b"zz\r\n{}\r\n0\r\n\r\n"],
        refused,
        path=TEXT,
    )
    yield _raw(
        "chunks without end",
        lambda v: [v.head("POST", TEXT, "transfer-encoding: chunked"), *[b"100000\r\n" + b" " * 2**20 + b"\r\n"] * 8],
        [413, CLOSED],
        path=TEXT,
    )
    yield _raw(
        "chunks of a byte",
        lambda v: [v.head("POST", TEXT, "transfer-encoding: chunked"), b"1\r\n \r\n" * 500_000],
        [400, 413, CLOSED],
        path=TEXT,
    )
    yield _raw("a header of a megabyte", lambda v: [v.head("GET", "/health", "x: " + "y" * 2**20)], [400, 431, CLOSED])
    yield _raw("many headers", lambda v: [v.head("GET", "/health", *["x: y"] * 50_000)], [400, 431, CLOSED])
    yield _raw("a folded header", lambda v: [v.head("GET", "/health", "x: y", " z")], [200, 400])
    yield _raw("a null in the path", lambda v: [v.head("GET", "/hea\0lth")], refused)
    yield _raw("a path of a megabyte", lambda v: [v.head("GET", "/" + "p" * 2**20)], [400, 404, 414, 431, CLOSED])
    yield _raw("HTTP/0.9", lambda v: [b"GET /health\r\n\r\n"], refused)
    yield _raw("HTTP/2 without asking", lambda v: [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"], [400, 505])
    yield _raw("TLS", lambda v: [bytes.fromhex("16030100f4010000f00303") + bytes(64)], refused)
    yield _raw("noise", lambda v: [bytes(range(256)) * 64], refused)
    yield _raw(
        "a websocket",
        lambda v: [
            v.head("GET", "/health", "upgrade: websocket", "sec-websocket-version: 13", "sec-websocket-key: eA==")
        ],
        [200, 400],
    )
    yield _raw("an unknown method", lambda v: [v.head("BREW", "/health")], [405])
    yield _raw("a path that climbs", lambda v: [v.head("GET", "/../../../../etc/passwd")], [400, 404])
    yield _raw(
        "a path that climbs, escaped", lambda v: [v.head("GET", "/page/%2e%2e%2f%2e%2e%2fetc%2fpasswd")], [400, 404]
    )
    yield _raw("another host", lambda v: [v.head("GET", "/v1/models", host="rebind.example")], [400, 403, 421])
    drafter = json.dumps({"model": "/etc/passwd"}).encode()
    yield _raw(
        "a drafter from anywhere",
        lambda v: [v.head("POST", "/v1/drafter", f"content-length: {len(drafter)}"), drafter],
        [400, 401, 403, 404],
    )
    yield _raw(
        "a drafter for a page elsewhere",
        lambda v: [
            v.head("POST", "/v1/drafter", "origin: http://rebind.example", f"content-length: {len(drafter)}"),
            drafter,
        ],
        [400, 401, 403, 404],
    )
    yield Attack(name="a body that never comes whole", good=frozenset({CLOSED}), send=_leave_in_body, path=TEXT)
    yield Attack(name="an answer that nobody reads", good=frozenset({CLOSED}), send=_never_read, path=TEXT)


async def _leave_in_body(victim: Victim) -> int:
    """Announce a body, send a part of it and disconnect."""
    _, writer = await victim.open()
    writer.write(victim.head("POST", TEXT, "content-length: 1000") + b'{"prompt": "abc')
    await writer.drain()
    await asyncio.sleep(0.2)
    writer.close()
    return CLOSED


async def _never_read(victim: Victim) -> int:
    """Ask for a stream and disconnect without reading."""
    body = json.dumps({"prompt": "a", "max_tokens": 64, "stream": True}).encode()
    _, writer = await victim.open()
    writer.write(victim.head("POST", TEXT, f"content-length: {len(body)}") + body)
    await writer.drain()
    await asyncio.sleep(2)
    writer.transport.abort()
    return CLOSED


def all_attacks() -> list[Attack]:
    """All attacks that send at once; those that hold connections are in `attack.py`."""
    return [*protocol_attacks(), *body_attacks(), *grammar_attacks()]
