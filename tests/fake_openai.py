"""Fake OpenAI servers with scripted behaviour: correct, slow, wrong, or dying."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

VLLM_METRICS = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{{engine="0",model_name="m"}} {drafts}.0
# HELP vllm:spec_decode_num_draft_tokens_total Number of draft tokens.
# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total{{engine="0",model_name="m"}} {drafted}.0
# HELP vllm:spec_decode_num_accepted_tokens_total Number of accepted tokens.
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total{{engine="0",model_name="m"}} {accepted}.0
# HELP vllm:spec_decode_num_accepted_tokens_per_pos_total Accepted tokens per draft position.
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="m",position="0"}} {at[0]}.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="m",position="1"}} {at[1]}.0
# HELP vllm:spec_decode_num_drafts_created Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_created gauge
vllm:spec_decode_num_drafts_created{{engine="0",model_name="m"}} 1.763e+09
"""
GENERATED = """\
# HELP vllm:generation_tokens_total Number of generation tokens processed.
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{{engine="0",model_name="m"}} {tokens}.0
"""


@dataclass
class Behaviour:
    """Behaviour of a server."""

    kind: str = "other"
    model: str = "m"
    pieces: int = 4
    """Events of text in an answer, each of two tokens."""
    pause: float = 0.0
    """Seconds before each of them."""
    together: int = 0
    """The first requests are answered once this many have arrived."""
    usage: bool = True
    dies_after: int | None = None
    """Number of answers before the server dies."""
    refuse: Callable[[dict[str, Any]], str | None] = lambda body: None
    """Returns a message to answer 400 with, or None."""
    raw: bytes | None = None
    """Body in place of an answer."""
    drafts: bool = False
    others: int = 0
    """Tokens of other clients, counted with every answer."""
    text: Callable[[dict[str, Any]], str] = lambda body: json.dumps(body.get("messages") or body.get("prompt"))


@dataclass
class Fake:
    """A server in a thread of this process."""

    behaviour: Behaviour = field(default_factory=Behaviour)
    port: int = 0
    bodies: list[dict[str, Any]] = field(default_factory=list)
    most_at_once: int = 0

    def __post_init__(self) -> None:
        self.url = ""
        self._at_once = self._answers = self._drafts = 0
        self._loop = asyncio.new_event_loop()
        ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(ready,), daemon=True)
        self._thread.start()
        assert ready.wait(10)

    def __enter__(self) -> Fake:
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    def _run(self, ready: threading.Event) -> None:
        self._loop.run_until_complete(self._serve(ready))

    async def _serve(self, ready: threading.Event) -> None:
        self._stop, self._complete = asyncio.Event(), asyncio.Event()
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/health", self._health)
        app.router.add_post("/v1/chat/completions", self._answer)
        app.router.add_post("/v1/completions", self._answer)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        ready.set()
        await self._stop.wait()
        await self._runner.cleanup()

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, _: web.Request) -> web.Response:
        own = self.behaviour
        card: dict[str, Any] = {"id": own.model, "object": "model", "owned_by": own.kind}
        if own.kind == "eyas":
            card["speculative"] = {"drafter": "d" if own.drafts else None}
        return web.json_response({"object": "list", "data": [card]})

    async def _metrics(self, _: web.Request) -> web.Response:
        if self.behaviour.kind != "vllm":
            return web.Response(status=404)
        d = self._drafts
        text = GENERATED.format(tokens=self._answers * (2 * self.behaviour.pieces + self.behaviour.others))
        if self.behaviour.drafts:  # of ten drafts seven are accepted once and five twice
            text += VLLM_METRICS.format(drafts=d * 10, drafted=d * 20, accepted=d * 12, at=(d * 7, d * 5))
        return web.Response(text=text)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        own, body = self.behaviour, await request.json()
        self.bodies.append(body)
        if own.dies_after is not None and self._answers >= own.dies_after:
            self._stop.set()
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        if body.get("model") != own.model:
            return web.json_response({"error": {"message": f"no model {body.get('model')!r}"}}, status=404)
        if (reason := own.refuse(body)) is not None:
            return web.json_response({"error": {"message": reason}}, status=400)
        if own.raw is not None:
            return web.Response(body=own.raw)
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        if self._at_once >= own.together:
            self._complete.set()
        try:
            await asyncio.wait_for(self._complete.wait(), 30)
            return await self._stream(request, body)
        finally:
            self._at_once -= 1
            self._answers += 1

    async def _stream(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        own = self.behaviour
        reply = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await reply.prepare(request)
        chat = "messages" in body
        text = own.text(body)
        step = max(1, -(-len(text) // own.pieces))
        parts = [text[i : i + step] for i in range(0, len(text), step)]
        if chat:
            await reply.write(_event({"choices": [{"delta": {"role": "assistant", "content": ""}}]}))
        for place, part in enumerate(parts):
            await asyncio.sleep(own.pause)
            choice: dict[str, Any] = {"delta": {"content": part}} if chat else {"text": part}
            choice["finish_reason"] = "length" if place == len(parts) - 1 else None
            await reply.write(_event({"choices": [choice]}))
        off = body.get("speculative") == {"mode": "off"}
        if own.drafts and not off:
            self._drafts += 1
        if own.usage:
            usage: dict[str, Any] = {"prompt_tokens": 3, "completion_tokens": 2 * own.pieces}
            if own.kind == "eyas":
                counts = {"drafts": 10, "drafted_tokens": 20, "accepted_tokens": 12, "accepted_by_depth": [7, 5]}
                none = {"drafts": 0, "drafted_tokens": 0, "accepted_tokens": 0, "accepted_by_depth": []}
                usage["speculative"] = none if off or not own.drafts else counts
            await reply.write(_event({"choices": [], "usage": usage}))
        await reply.write(b"data: [DONE]\n\n")
        return reply


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


if __name__ == "__main__":  # as a program, for a bench that starts its server: --port N
    Fake(Behaviour(pause=float(os.environ.get("PAUSE", "0"))), port=int(sys.argv[sys.argv.index("--port") + 1]))
    threading.Event().wait()
