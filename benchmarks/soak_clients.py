"""Clients of a soak: each sends one request after another, of many kinds, and records the outcome.

Every request that is sent is noted before, and has one outcome after: `right`, `wrong`, `refused` as it should be,
`full` (a 429 that says when to come back, which is waited for), `left` by the client on purpose, or `lost`. A request
without any is one that nobody answered.
"""

import asyncio
import json
import random
import socket
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import aiohttp
from soak_questions import Question, Refusal, bird, is_bird

if TYPE_CHECKING:
    from attacks import Attack, Victim

Choices = tuple[tuple[str, str | None], ...]
"""Text and finish reason of every choice."""
JSON = {"content-type": "application/json"}
NOTED = 20
"""Number of failures that are written down."""
LOST_SECONDS = 1.0
"""Seconds before a lost request is sent again."""
WAVE_SECONDS = 60.0
CALM_SECONDS = 20.0
"""Mean seconds between requests in the calm half of a wave; there is no pause in the other half."""
ATTACK_SECONDS = 2.0
"""Mean seconds between attacks of one attacker."""
SPECULATION: tuple[dict[str, Any] | None, ...] = (
    None,
    {"mode": "off"},
    {"mode": "auto"},
    {"mode": "auto", "details": True},
    *({"mode": "fixed", "depth": depth} for depth in (1, 3, 5)),
)


class WrongAnswerError(Exception):
    """An answer is wrong."""


class FullError(Exception):
    """The server is full and says when to come back."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"come back in {seconds:g} s")
        self.seconds = seconds


class Books:
    """All requests sent, with their outcomes."""

    def __init__(self) -> None:
        self.sent: Counter[str] = Counter()
        self.outcomes: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.ids: Counter[str] = Counter()
        """Number of answers with each id."""
        self.amiss: list[str] = []

    async def note(self, kind: str, asking: Awaitable[str]) -> float:
        """Follow a request to its outcome; return the seconds to wait before a retry, if any."""
        self.sent[kind] += 1
        wait = 0.0
        try:
            outcome = await asking
        except FullError as full:
            outcome, wait = "full", full.seconds
        except WrongAnswerError as error:
            outcome = "wrong"
            self._tell(f"{kind}: {error}")
        except (aiohttp.ClientError, OSError, ValueError, LookupError) as error:
            outcome, wait = "lost", LOST_SECONDS
            self._tell(f"{kind}: {type(error).__name__} {error}")
        self.outcomes[kind][outcome] += 1
        return wait

    def total(self, outcome: str) -> int:
        """Over all kinds."""
        return sum(outcomes[outcome] for outcomes in self.outcomes.values())

    @property
    def unanswered(self) -> int:
        """Requests without an outcome."""
        return self.sent.total() - sum(outcomes.total() for outcomes in self.outcomes.values())

    def _tell(self, what: str) -> None:
        if len(self.amiss) < NOTED:
            self.amiss.append(what[:600])


class Clients:
    """Clients of one server; a context manager that opens their connections."""

    def __init__(self, url: str, books: Books) -> None:
        self.url, self.books = url, books

    async def __aenter__(self) -> "Clients":
        forever = aiohttp.ClientTimeout(total=None, sock_connect=None, sock_read=None)
        self.session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=forever)
        # Little room on the way, so that what a slow reader does not read stays with the server.
        narrow = aiohttp.TCPConnector(limit=0, force_close=True, socket_factory=_narrow_socket)
        self.slow_session = aiohttp.ClientSession(connector=narrow, timeout=forever, read_bufsize=512)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.session.close()
        await self.slow_session.close()

    async def whole(self, question: Question, **fields: Any) -> Choices:
        """A non-streamed answer."""
        async with self.session.post(
            self.url + question.path, json={**question.body, **fields}, headers=JSON
        ) as response:
            await self._require_answer(response)
            body = json.loads(await response.read())
        choices = sorted(body["choices"], key=lambda choice: choice["index"])
        return tuple((_text_of(choice, "message"), choice["finish_reason"]) for choice in choices)

    async def streamed(
        self, question: Question, *, pause: float = 0, leave_after: int | None = None, **fields: Any
    ) -> Choices | None:
        """A streamed answer; None if the client left after some events. With a pause it reads slowly."""
        session = self.slow_session if pause else self.session
        body = {**question.body, "stream": True, **fields}
        async with session.post(self.url + question.path, json=body, headers=JSON) as response:
            await self._require_answer(response)
            events = []
            async for event in _events(response):
                events.append(event)
                if leave_after is not None and len(events) > leave_after:
                    response.close()  # hangs up: what was not read cannot be waited for
                    return None
                if pause:
                    await asyncio.sleep(pause)
        return understood(events)

    async def ask(self, question: Question, expected: Choices, *, stream: bool, **manner: Any) -> str:
        """Ask a question with a known answer."""
        said = await (self.streamed if stream else self.whole)(question, **manner)
        if said is None:
            return "left"
        if said != expected:
            raise WrongAnswerError(f"{question.body} got {said}, not {expected}")
        return "right"

    async def ask_for_bird(self, seed: int, *, stream: bool, speculative: Any) -> str:
        """Ask for an object that is in no cache."""
        question = bird(seed)
        said = await (self.streamed if stream else self.whole)(question, speculative=speculative)
        if said is None or len(said) != 1 or said[0][1] != "stop" or not is_bird(said[0][0]):
            raise WrongAnswerError(f"seed {seed} got {said}, which is no bird")
        return "right"

    async def ask_in_vain(self, refusal: Refusal) -> str:
        """Send a request that must be refused."""
        async with self.session.post(self.url + "/v1/chat/completions", data=refusal.payload, headers=JSON) as response:
            self._note_id(response)
            told = json.loads(await response.read())
            _require_room(response)
            if (response.status, told["error"]["code"]) != (400, refusal.code):
                raise WrongAnswerError(f"{response.status} {told}, not 400 {refusal.code}")
        return "refused"

    async def vanish(self, question: Question, seconds: float, **fields: Any) -> str:
        """Send a whole request and disconnect, mostly before the answer begins."""
        place = urlsplit(self.url)
        payload = json.dumps({**question.body, **fields}).encode()
        lines = [f"POST {question.path} HTTP/1.1", f"host: {place.netloc}", "content-type: application/json"]
        _, writer = await asyncio.open_connection(place.hostname, place.port)
        try:
            writer.write("\r\n".join([*lines, f"content-length: {len(payload)}", "", ""]).encode() + payload)
            await writer.drain()
            await asyncio.sleep(seconds)
        finally:
            writer.close()
        return "left"

    async def _require_answer(self, response: aiohttp.ClientResponse) -> None:
        self._note_id(response)
        _require_room(response)
        if response.status != 200:
            raise WrongAnswerError(f"{response.status} {(await response.read())[:300]!r}")

    def _note_id(self, response: aiohttp.ClientResponse) -> None:
        self.books.ids[response.headers.get("x-request-id", "none")] += 1


async def live(
    clients: Clients,
    known: Sequence[tuple[Question, Choices]],
    refusals: Sequence[Refusal],
    *,
    rng: random.Random,
    stop: asyncio.Event,
) -> None:
    """One client: sends requests until stopped, and finishes the last one."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    while not stop.is_set():
        kind, ask = _choose(clients, known, refusals, rng)
        while not stop.is_set() and (wait := await clients.books.note(kind, ask())):
            await _sleep(wait, stop)
        if (loop.time() - began) % WAVE_SECONDS > WAVE_SECONDS / 2:
            await _sleep(rng.expovariate(1 / CALM_SECONDS), stop)


async def harass(
    victim: "Victim", books: Books, attacks: Sequence["Attack"], *, rng: random.Random, stop: asyncio.Event
) -> None:
    """One attacker: sends requests that must be refused."""

    async def send(attack: "Attack") -> str:
        await attack.run(victim)
        return "refused"

    while not stop.is_set():
        attack = rng.choice(attacks)
        await books.note(attack.name, send(attack))
        await _sleep(rng.expovariate(1 / ATTACK_SECONDS), stop)


def _choose(
    clients: Clients, known: Sequence[tuple[Question, Choices]], refusals: Sequence[Refusal], rng: random.Random
) -> tuple[str, Callable[[], Awaitable[str]]]:
    """The next request, as a function that can be retried."""
    question, expected = rng.choice(known)
    stream, drafting = rng.random() < 0.5, {"speculative": rng.choice(SPECULATION)}
    manner = rng.choices(
        ("known", "slow reader", "JSON", "hangs up in a stream", "hangs up at once", "to refuse"),
        weights=(10, 2, 2, 2, 2, 2),
    )[0]
    if manner == "known":
        kind = f"{question.kind}, {'streamed' if stream else 'whole'}"
        return kind, lambda: clients.ask(question, expected, stream=stream, **drafting)
    if manner == "JSON":
        seed = rng.randrange(2**32)
        return manner, lambda: clients.ask_for_bird(seed, stream=stream, **drafting)
    if manner == "slow reader":
        pause = rng.uniform(0.02, 0.3)
        return manner, lambda: clients.ask(question, expected, stream=True, pause=pause, **drafting)
    if manner == "hangs up in a stream":
        events = rng.randint(0, 8)
        return manner, lambda: clients.ask(question, expected, stream=True, leave_after=events, **drafting)
    if manner == "hangs up at once":
        seconds = rng.choice((0, 0.01, 0.1, 0.5))
        return manner, lambda: clients.vanish(question, seconds, stream=stream, **drafting)
    refusal = rng.choice(refusals)
    return refusal.kind, lambda: clients.ask_in_vain(refusal)


def understood(events: Sequence[bytes]) -> Choices:
    """Parse a stream: every choice ends once, nothing follows it, and one [DONE] is last."""
    if events.count(b"[DONE]") != 1 or events[-1] != b"[DONE]":
        raise WrongAnswerError(f"a stream of {len(events)} events ends with {b' '.join(events[-2:])[:300]!r}")
    texts: defaultdict[int, str] = defaultdict(str)
    ends: dict[int, str] = {}
    for event in map(json.loads, events[:-1]):
        for choice in event["choices"]:
            index = choice["index"]
            if index in ends:
                raise WrongAnswerError(f"choice {index} goes on after its end: {event}")
            texts[index] += _text_of(choice, "delta")
            if choice["finish_reason"] is not None:
                ends[index] = choice["finish_reason"]
    if set(texts) != set(ends):
        raise WrongAnswerError(f"choices {sorted(set(texts) - set(ends))} have no end")
    return tuple((texts[index], ends[index]) for index in sorted(texts))


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    rest = b""
    async for data in response.content.iter_any():
        *whole, rest = (rest + data).split(b"\n\n")
        for event in whole:
            yield event.removeprefix(b"data: ")
    if rest:
        raise WrongAnswerError(f"a stream ends within an event: {rest[:100]!r}")


def _text_of(choice: Mapping[str, Any], part: str) -> str:
    text = choice["text"] if "text" in choice else choice[part].get("content", "")
    return str(text)


def _require_room(response: aiohttp.ClientResponse) -> None:
    if response.status == 429:
        wait = response.headers.get("retry-after", "")
        if not wait.isdigit() or int(wait) < 1:
            raise WrongAnswerError(f"a 429 says to come back after {wait!r}")
        raise FullError(int(wait))


async def _sleep(seconds: float, stop: asyncio.Event) -> None:
    try:
        async with asyncio.timeout(seconds):
            await stop.wait()
    except TimeoutError:
        pass


def _narrow_socket(address: Any) -> socket.socket:
    family, kind, protocol, *_ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    return made
