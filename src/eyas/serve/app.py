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

from eyas.serve.admission import AdmissionController
from eyas.serve.api_error import ApiError, to_api_error
from eyas.serve.auth import ApiKeyMiddleware
from eyas.serve.drafter_swap import DrafterSlot, DrafterSwapEndpoint
from eyas.serve.endpoint import Endpoint, ServerContext
from eyas.serve.engine_client import EngineClient
from eyas.serve.metrics import CONTENT_TYPE, ServerMetrics
from eyas.serve.model_info import ModelInfo, ServerLimits
from eyas.serve.openapi import openapi_document
from eyas.serve.page_files import page_routes
from eyas.serve.protocol import ChatCompletionRequest, CompletionRequest
from eyas.serve.request_builder import RequestBuilder
from eyas.serve.status import state_of, status_of
from eyas.serve.structured_outputs import GrammarCompiler
from eyas.serve.token_text import TokenText


class Application:
    """A served model behind HTTP. `asgi` is what a server runs; `admission` is where it is told to stop."""

    def __init__(
        self,
        engine_client: EngineClient,
        model_info: ModelInfo,
        *,
        limits: ServerLimits | None = None,
        keys: Sequence[str] = (),
        page: bool = True,
        slot: DrafterSlot | None = None,
    ) -> None:
        self.engine_client, self.model_info, self.limits = engine_client, model_info, limits or ServerLimits()
        self.admission = AdmissionController(max_num_seqs=model_info.max_num_seqs, queue=self.limits.queue)
        self.started = time.monotonic()
        self.metrics = ServerMetrics(model_info.name)
        self.metrics.in_flight.set_function(lambda: self.admission.in_flight)
        request_builder = RequestBuilder(engine_client.target, model_info)
        self.tool_support, self.compiler = request_builder.tool_support, GrammarCompiler(engine_client.target)
        context = ServerContext(
            engine_client=engine_client,
            model_info=model_info,
            limits=self.limits,
            admission=self.admission,
            metrics=self.metrics,
            token_text=TokenText(
                engine_client.target.tokenizer,
                {token: mark for mark, token in request_builder.tool_support.special_tokens.items()},
            ),
            grammar_spec_of=request_builder.grammar_spec,
            compiler=self.compiler,
        )
        chat = Endpoint("chat", ChatCompletionRequest, request_builder.chat, context)
        self._drafter_swap = DrafterSwapEndpoint(engine_client, model_info, self.limits, self.metrics, slot)
        completion = Endpoint("text", CompletionRequest, request_builder.completion, context)
        self.asgi = Starlette(
            routes=[
                Route("/v1/chat/completions", chat, methods=["POST"]),
                Route("/v1/completions", completion, methods=["POST"]),
                Route("/v1/models", self._models, methods=["GET"]),
                Route("/v1/models/{name:path}", self._model, methods=["GET"]),
                Route("/v1/drafter", self._drafter_swap.handle, methods=["GET", "POST"]),
                Route("/health", self._health, methods=["GET"]),
                Route("/metrics", self._metrics, methods=["GET"]),
                Route("/status", self._status, methods=["GET"]),
                Route("/openapi.json", self._openapi, methods=["GET"]),
                *(page_routes() if page else ()),
            ],
            middleware=[Middleware(ApiKeyMiddleware, keys=tuple(keys))],
            exception_handlers={HTTPException: _error_response, ApiError: _error_response, Exception: _error_response},
        )

    async def _models(self, _: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [self._model_card()]})

    async def _model(self, http: HttpRequest) -> Response:
        name = http.path_params["name"]
        if name != self.model_info.name:
            raise ApiError(
                404, f"model {name!r} is not served here; use {self.model_info.name!r}", code="model_not_found"
            )
        return JSONResponse(self._model_card())

    async def _health(self, _: HttpRequest) -> Response:
        state = state_of(self.engine_client, self.admission)
        body = {"status": state} | ({"reason": type(self.engine_client.failure).__name__} if state == "failed" else {})
        return JSONResponse(body, status_code=200 if state == "ok" else 503)

    async def _metrics(self, _: HttpRequest) -> Response:
        supervisor = self.engine_client.supervisor
        snapshot = await self.engine_client.snapshot()
        text = self.metrics.render(snapshot, failed_steps=supervisor.failed_steps, replaced=supervisor.replaced)
        return Response(text, media_type=CONTENT_TYPE)

    async def _status(self, _: HttpRequest) -> Response:
        body = await status_of(self.engine_client, self.model_info, self.admission, started=self.started)
        return JSONResponse(body, headers={"cache-control": "no-store"})

    async def _openapi(self, _: HttpRequest) -> Response:
        return JSONResponse(openapi_document())

    def _model_card(self) -> dict[str, Any]:
        model_info = self.model_info
        return {
            "id": model_info.name,
            "object": "model",
            "created": model_info.created,
            "owned_by": "eyas",
            "root": model_info.target,
            "max_model_len": model_info.max_model_len,
            "speculative": self._drafter_swap.card(),
        }


async def _error_response(_: HttpRequest, error: Exception) -> Response:
    """Every error in the one format, those of the router too."""
    failure, headers = to_api_error(error), dict[str, str]()
    if isinstance(error, HTTPException):
        failure = ApiError(error.status_code, f"{error.detail}; see /openapi.json for what there is")
        headers |= error.headers or {}
    return JSONResponse(failure.body, status_code=failure.status, headers=headers | failure.headers)
