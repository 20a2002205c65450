"""The paths of the server and what stands behind each."""

import time
from collections.abc import Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from eyas.serve.answering import Desk, Endpoint
from eyas.serve.asking import Translator
from eyas.serve.failure import ApiError, failure_of
from eyas.serve.forms import Compiler
from eyas.serve.gate import Gate
from eyas.serve.host import Host
from eyas.serve.keys import KeyGuard
from eyas.serve.metrics import CONTENT_TYPE, Meters
from eyas.serve.openapi import describe
from eyas.serve.page_files import page_routes
from eyas.serve.protocol import ChatRequest, CompletionRequest
from eyas.serve.served import Limits, Served
from eyas.serve.status import state_of, status_of
from eyas.serve.swapping import Slot, Swapper
from eyas.serve.words import Words


class Application:
    """A served model behind HTTP. `asgi` is what a server runs; `gate` is where it is told to stop."""

    def __init__(
        self,
        host: Host,
        served: Served,
        *,
        limits: Limits | None = None,
        keys: Sequence[str] = (),
        page: bool = True,
        slot: Slot | None = None,
    ) -> None:
        self.host, self.served, self.limits = host, served, limits or Limits()
        self.gate = Gate(max_num_seqs=served.max_num_seqs, queue=self.limits.queue)
        self.started = time.monotonic()
        self.meters = Meters(served.name)
        self.meters.in_flight.set_function(lambda: self.gate.taken)
        translator = Translator(host.target, served)
        self.toolbox, self.compiler = translator.toolbox, Compiler(host.target)
        desk = Desk(
            host=host,
            served=served,
            limits=self.limits,
            gate=self.gate,
            meters=self.meters,
            words=Words(host.target.tokenizer, {token: mark for mark, token in translator.toolbox.marks.items()}),
            form_of=translator.form,
            compiler=self.compiler,
        )
        chat = Endpoint("chat", ChatRequest, translator.chat, desk)
        self._swapper = Swapper(host, served, self.limits, self.meters, slot)
        completion = Endpoint("text", CompletionRequest, translator.completion, desk)
        self.asgi = Starlette(
            routes=[
                Route("/v1/chat/completions", chat, methods=["POST"]),
                Route("/v1/completions", completion, methods=["POST"]),
                Route("/v1/models", self._models, methods=["GET"]),
                Route("/v1/models/{name:path}", self._model, methods=["GET"]),
                Route("/v1/drafter", self._swapper.answer, methods=["GET", "POST"]),
                Route("/health", self._health, methods=["GET"]),
                Route("/metrics", self._metrics, methods=["GET"]),
                Route("/status", self._status, methods=["GET"]),
                Route("/openapi.json", self._openapi, methods=["GET"]),
                *(page_routes() if page else ()),
            ],
            middleware=[Middleware(KeyGuard, keys=tuple(keys))],
            exception_handlers={HTTPException: _refuse, ApiError: _refuse, Exception: _refuse},
        )

    async def _models(self, _: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def _model(self, http: HttpRequest) -> Response:
        name = http.path_params["name"]
        if name != self.served.name:
            raise ApiError(404, f"model {name!r} is not served here; use {self.served.name!r}", code="model_not_found")
        return JSONResponse(self._card())

    async def _health(self, _: HttpRequest) -> Response:
        state = state_of(self.host, self.gate)
        told = {"status": state} | ({"reason": type(self.host.failure).__name__} if state == "failed" else {})
        return JSONResponse(told, status_code=200 if state == "ok" else 503)

    async def _metrics(self, _: HttpRequest) -> Response:
        mender = self.host.mender
        seen = await self.host.look()
        text = self.meters.text(seen, failed_steps=mender.failed_steps, replaced=mender.replaced)
        return Response(text, media_type=CONTENT_TYPE)

    async def _status(self, _: HttpRequest) -> Response:
        told = await status_of(self.host, self.served, self.gate, started=self.started)
        return JSONResponse(told, headers={"cache-control": "no-store"})

    async def _openapi(self, _: HttpRequest) -> Response:
        return JSONResponse(describe())

    def _card(self) -> dict[str, Any]:
        served = self.served
        return {
            "id": served.name,
            "object": "model",
            "created": served.created,
            "owned_by": "eyas",
            "root": served.target,
            "max_model_len": served.max_model_len,
            "speculative": self._swapper.card(),
        }


async def _refuse(_: HttpRequest, error: Exception) -> Response:
    """Every error in the one format, those of the router too."""
    failure, headers = failure_of(error), dict[str, str]()
    if isinstance(error, HTTPException):
        failure = ApiError(error.status_code, f"{error.detail}; see /openapi.json for what there is")
        headers |= error.headers or {}
    return JSONResponse(failure.body, status_code=failure.status, headers=headers | failure.headers)
