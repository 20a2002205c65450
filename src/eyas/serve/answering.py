"""One request from its first byte to its last: read, take on, answer, and tell how it went.

However it ends (an answer, a refusal, a failing engine, a client that left, a deadline) its places are given back, its
requests leave the engine, and one line in the log and one count in the metrics say so.
"""

import asyncio
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.types import Receive, Scope, Send

from eyas.engine.grammar.base import Grammar
from eyas.engine.output import OutputDelta, SpecDecodeStats
from eyas.engine.request import FinishReason
from eyas.serve import replies
from eyas.serve.asking import Asked
from eyas.serve.connection import ClientGoneError, Outlet, while_connected
from eyas.serve.failure import ApiError, failure_of
from eyas.serve.forms import Compiler, Form
from eyas.serve.gate import Gate
from eyas.serve.host import Host
from eyas.serve.log import LOGGER, log
from eyas.serve.metrics import Meters
from eyas.serve.protocol import Common
from eyas.serve.reading import parse, read_body
from eyas.serve.replies import Heard, Kind, Letterhead
from eyas.serve.served import Limits, Served
from eyas.serve.words import Words


@dataclass(frozen=True, kw_only=True, eq=False)
class Desk:
    """What all requests share: everything at the desk where they are answered."""

    host: Host
    served: Served
    limits: Limits
    gate: Gate
    meters: Meters
    words: Words
    form_of: Callable[[Common], Form | None]
    compiler: Compiler
    encoding: Executor = field(default_factory=lambda: ThreadPoolExecutor(1, "eyas-encode"))
    """One thread, so that long prompts do not hold up the loop: tokenizers are not made for several at once."""


@dataclass(kw_only=True)
class Account:
    """How one request went, for log and metrics."""

    request_id: str
    started: float
    body: Common | None = None
    asked: Asked | None = None
    heard: list[Heard] = field(default_factory=list)
    first_token: float | None = None
    latest: dict[int, float] = field(default_factory=dict)
    """When the newest piece of each choice came."""
    outcome: str = "error"


class Endpoint:
    """An ASGI application for one path."""

    def __init__(self, kind: Kind, body: type[Common], ask: Callable[[Any, Grammar | None], Asked], desk: Desk) -> None:
        self._kind, self._body, self._ask, self._desk = kind, body, ask, desk

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        account = Account(request_id=uuid.uuid4().hex, started=time.monotonic())
        outlet = Outlet(send, account.request_id)
        try:
            async with asyncio.timeout(self._desk.limits.request_seconds):
                await self._answer(HttpRequest(scope, receive), receive, outlet, account)
        except ClientGoneError:
            account.outcome = "disconnected"
        except asyncio.CancelledError:
            account.outcome = "cancelled"
            raise
        except Exception as error:
            failure = self._explain(error)
            account.outcome = failure.code or str(failure.status)
            await outlet.fail(failure)
        finally:
            self._settle(scope, account, outlet)

    async def _answer(self, http: HttpRequest, receive: Receive, outlet: Outlet, account: Account) -> None:
        desk = self._desk
        desk.gate.require_room()  # before the work of reading, not only after it
        raw = await read_body(http, most_bytes=desk.limits.body_bytes, seconds=desk.limits.body_seconds)
        account.body = body = parse(self._body, raw)
        if body.model is not None and body.model != desk.served.name:
            raise ApiError(
                404, f"model {body.model!r} is not served here; use {desk.served.name!r}", code="model_not_found"
            )
        form = desk.form_of(body)
        grammar = None if form is None else await desk.compiler.grammar(form)
        loop = asyncio.get_running_loop()
        account.asked = asked = await loop.run_in_executor(desk.encoding, self._ask, body, grammar)
        head = Letterhead(
            kind=self._kind,
            request_id=account.request_id,
            model=desk.served.name,
            created=int(time.time()),
            prompt_tokens=asked.prompt_tokens,
            details=body.speculative is not None and body.speculative.details,
        )
        account.heard = [Heard(reader=asked.reader and asked.reader()) for _ in asked.requests]
        with desk.gate.enter(len(asked.requests)):
            desk.meters.prompt_tokens.inc(asked.prompt_tokens)
            await while_connected(receive, self._say(head, body, asked, outlet, account))

    async def _say(self, head: Letterhead, body: Common, asked: Asked, outlet: Outlet, account: Account) -> None:
        words = self._desk.words

        async def hear(index: int, piece: OutputDelta, tally: SpecDecodeStats) -> None:
            heard = account.heard[index]
            heard.tally = tally
            heard.take(piece, words)
            self._time(account, index, piece)
            if piece.finished is FinishReason.ERROR:
                message = "the form became too complex to follow on the way; simplify it"
                raise ApiError(400, message, code="grammar_too_complex")
            if not body.stream:
                return
            opening = replies.opening(head, index) if len(heard.pieces) == 1 else None
            for event in (opening, replies.chunk(head, index, heard, words)):
                if event is not None:
                    await outlet.event(event)

        await self._desk.host.answer(asked.requests, hear)
        ends = {heard.pieces[-1].finished for heard in account.heard}
        account.outcome = "+".join(sorted(end.value for end in ends if end is not None))
        if not body.stream:
            await outlet.json(replies.whole(head, account.heard, words))
            return
        if body.stream_options is not None and body.stream_options.include_usage:
            await outlet.event(replies.closing(head, account.heard))
        await outlet.end()

    def _time(self, account: Account, index: int, piece: OutputDelta) -> None:
        """Note when tokens came."""
        now, meters = time.monotonic(), self._desk.meters
        if account.first_token is None:
            account.first_token = now - account.started
            meters.first_token.observe(account.first_token)
        before = account.latest.get(index)
        if before is not None and piece.tokens:
            for _ in piece.tokens:
                meters.between_tokens.observe((now - before) / len(piece.tokens))
        account.latest[index] = now

    def _explain(self, error: Exception) -> ApiError:
        failure = failure_of(error)
        if failure.status == 500 and self._desk.gate.draining:
            return ApiError(503, "the server was shut down before the answer was complete", code="shutting_down")
        if failure.status == 500 and self._desk.host.failure is not None:
            return ApiError(503, "the engine has failed and could not be replaced; see /health", code="engine_down")
        if failure.code == "internal_error":
            LOGGER.error("bug", exc_info=error)
        return failure

    def _settle(self, scope: Scope, account: Account, outlet: Outlet) -> None:
        seconds = time.monotonic() - account.started
        meters = self._desk.meters
        meters.requests.labels(scope["path"], account.outcome).inc()
        meters.whole.observe(seconds)
        figures = replies.figures([heard.tally for heard in account.heard])
        client = scope.get("client")
        log(
            "request",
            request_id=account.request_id,
            path=scope["path"],
            client=client[0] if client else None,
            user=account.body.user if account.body else None,
            status=outlet.status,
            outcome=account.outcome,
            stream=account.body.stream if account.body else None,
            answers=len(account.heard),
            prompt_tokens=account.asked.prompt_tokens if account.asked else None,
            completion_tokens=sum(heard.tokens for heard in account.heard),
            seconds=round(seconds, 4),
            first_token_seconds=None if account.first_token is None else round(account.first_token, 4),
            drafts=figures["drafts"],
            acceptance_length=figures["acceptance_length"],
        )
