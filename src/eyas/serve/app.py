"""The routes of the server."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from eyas import __version__
from eyas.errors import UserError
from eyas.serve.access.audit import AuditMiddleware, mark_recorded, note_refusal
from eyas.serve.access.auth import ApiKeyMiddleware, HostMiddleware
from eyas.serve.access.policy import AccessRules
from eyas.serve.api_error import ApiError, to_api_error
from eyas.serve.context import ServerContext
from eyas.serve.drafter_swaps import DrafterSlot, DrafterSwaps
from eyas.serve.endpoints.completions import Endpoint
from eyas.serve.endpoints.drafter_swap import DrafterSwapEndpoint
from eyas.serve.endpoints.refused import refused_routes
from eyas.serve.endpoints.responses import ResponsesEndpoint
from eyas.serve.endpoints.tokenize import TokenizerEndpoints
from eyas.serve.engine_client import EngineClient
from eyas.serve.learning.collector import LearnFolder
from eyas.serve.learning.learner import LearnerSettings
from eyas.serve.learning.loop import LearningLoop
from eyas.serve.model_info import ModelInfo, ServerLimits
from eyas.serve.monitoring.json_logging import log_event
from eyas.serve.monitoring.metrics import CONTENT_TYPE, MetricsNames
from eyas.serve.monitoring.status import StatusRecorder, state_of, status_of
from eyas.serve.openapi import openapi_document
from eyas.serve.page_files import page_routes
from eyas.serve.protocol.completions import ChatCompletionRequest, CompletionRequest
from eyas.serve.protocol.request_policy import RequestPolicy
from eyas.serve.transport.connection import ClientDisconnectedError
from eyas.serve.transport.root_path import RootPathMiddleware

logger = logging.getLogger(__name__)
CLIENT_CLOSED_REQUEST = 499
"""nginx's status for a client that has left; nobody receives it."""
EXPOSED_HEADERS = ("x-request-id", "retry-after")
"""Headers that web pages of allowed origins may read."""


class Application:
    """A served model behind HTTP: `asgi` is the application that a server runs."""

    def __init__(
        self,
        engine_client: EngineClient,
        model_info: ModelInfo,
        *,
        limits: ServerLimits | None = None,
        policy: RequestPolicy | None = None,
        access: AccessRules | None = None,
        page: bool = True,
        metrics_names: MetricsNames = "both",
        root_path: str = "",
        learn_folder: LearnFolder | None = None,
        slot: DrafterSlot,
    ) -> None:
        limits, policy, access = limits or ServerLimits(), policy or RequestPolicy(), access or AccessRules()
        context = ServerContext.create(engine_client, model_info, limits, policy, metrics_names, learn_folder)
        swaps = DrafterSwaps(engine_client, model_info, context.metrics, context.drafter_changes, slot)
        if learn_folder is not None and learn_folder.learner is not None:
            context = replace(context, learning_loop=_learning_loop(learn_folder, learn_folder.learner, context, swaps))
        self.context, self._root_path, self.history = context, root_path, StatusRecorder(context)
        builder, tokenizer = context.request_builder, TokenizerEndpoints(context)
        completion = Endpoint(CompletionRequest, builder.completion, context)
        routes = [
            Route("/v1/chat/completions", Endpoint(ChatCompletionRequest, builder.chat, context), methods=["POST"]),
            Route("/v1/completions", completion, methods=["POST"]),
            Route("/v1/responses", ResponsesEndpoint(ChatCompletionRequest, builder.chat, context), methods=["POST"]),
            Route("/v1/models", self._models, methods=["GET"]),
            Route("/v1/models/{name:path}", self._model, methods=["GET"]),
            Route("/v1/drafter", DrafterSwapEndpoint(context, swaps, access).handle, methods=["GET", "POST"]),
            Route("/tokenize", tokenizer.tokenize, methods=["POST"]),
            Route("/detokenize", tokenizer.detokenize, methods=["POST"]),
            Route("/health", self._health, methods=["GET"]),
            Route("/ping", self._health, methods=["GET", "POST"]),  # SageMaker's name of /health
            Route("/load", self._load, methods=["GET"]),
            Route("/version", self._version, methods=["GET"]),
            Route("/metrics", self._metrics, methods=["GET"]),
            Route("/status", self._status, methods=["GET"]),
            Route("/status/history", self._status_history, methods=["GET"]),
            Route("/openapi.json", self._openapi, methods=["GET"]),
            *(page_routes() if page else ()),
            *refused_routes(),
        ]
        self.asgi = Starlette(
            routes=routes,
            middleware=[
                *([Middleware(RootPathMiddleware, root_path=root_path)] if root_path else ()),
                *_middleware(access, context, routes),
            ],
            exception_handlers={
                HTTPException: _error_response,
                ApiError: _error_response,
                ClientDisconnectedError: self._disconnected,
                Exception: _error_response,
            },
        )

    def close(self) -> None:
        """Stop a running adaptation and write the answers that still wait. Call it once nothing is served any more."""
        if self.context.learning_loop is not None:
            self.context.learning_loop.close()
        if self.context.collector is not None:
            self.context.collector.close()

    async def _models(self, _: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [self._model_card()]})

    async def _model(self, http: HttpRequest) -> Response:
        self.context.model_info.require(http.path_params["name"])
        return JSONResponse(self._model_card())

    async def _health(self, _: HttpRequest) -> Response:
        state, failure = state_of(self.context), self.context.engine_client.failure
        reason = type(failure).__name__ if state == "failed" else self.context.engine_client.unavailable
        body = {"status": state} | ({} if state in ("ok", "draining") else {"reason": reason})
        return JSONResponse(body, status_code=200 if state == "ok" else 503)

    async def _load(self, _: HttpRequest) -> Response:
        return JSONResponse({"server_load": self.context.admission.in_flight})

    async def _version(self, _: HttpRequest) -> Response:
        return JSONResponse({"version": __version__})

    async def _metrics(self, _: HttpRequest) -> Response:
        snapshot = await self.context.engine_client.snapshot()
        return Response(self.context.metrics.render(snapshot), media_type=CONTENT_TYPE)

    async def _status(self, _: HttpRequest) -> Response:
        status = await status_of(self.context)
        return JSONResponse(status.model_dump(), headers={"cache-control": "no-store"})

    async def _status_history(self, _: HttpRequest) -> Response:
        headers = {"cache-control": "no-store"}
        return Response(self.history.to_json(), headers=headers, media_type="application/json")

    async def _openapi(self, _: HttpRequest) -> Response:
        servers = {"servers": [{"url": self._root_path}]} if self._root_path else {}
        return JSONResponse(openapi_document() | servers)

    async def _disconnected(self, http: HttpRequest, _: Exception) -> Response:
        """Record a client that left while it sent its body. Endpoints that generate keep their own records."""
        mark_recorded(http.scope)
        path = http.scope["route"].path
        self.context.metrics.requests.labels(path, "disconnected").inc()
        client = http.client.host if http.client else None
        log_event(logger, "request", path=path, client=client, outcome="disconnected")
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    def _model_card(self) -> dict[str, Any]:
        model_info = self.context.model_info
        return {
            "id": model_info.name,
            "object": "model",
            "created": model_info.created,
            "owned_by": "eyas",
            "root": model_info.target,
            "engine": model_info.engine,
            "max_model_len": model_info.max_model_len,
            "quantization": model_info.quantization,
            "kv_cache_dtype": model_info.kv_cache_dtype,
            "speculative": model_info.speculative_card(),
        }


def _learning_loop(
    folder: LearnFolder, settings: LearnerSettings, context: ServerContext, swaps: DrafterSwaps
) -> LearningLoop:
    collector, name = context.collector, context.model_info.drafter
    assert collector is not None
    if name is None or swaps.slot.source is None:
        raise UserError("--learn-share adapts a drafter, and there is none; name one by --speculative-config")
    return LearningLoop(
        settings,
        folder.ring.folder,
        fingerprint=folder.author["target_fingerprint"],
        collector=collector,
        swaps=swaps,
        engine_client=context.engine_client,
        name=name,
        metrics=context.metrics,
    )


def _middleware(access: AccessRules, context: ServerContext, routes: Sequence[Route]) -> list[Middleware]:
    """From the outermost: audit, host and origin, CORS headers for allowed origins, API keys."""
    cors = Middleware(
        CORSMiddleware,
        allow_origins=access.allowed_origins,
        allow_methods=("GET", "POST"),
        allow_headers=("*",),  # no cookies are read, so headers that a page can send give it no rights
        expose_headers=EXPOSED_HEADERS,
    )
    return [
        Middleware(AuditMiddleware, metrics=context.metrics, routes=routes),
        Middleware(HostMiddleware, access=access),
        *([cors] if access.allowed_origins else ()),
        Middleware(ApiKeyMiddleware, access=access),
    ]


async def _error_response(http: HttpRequest, error: Exception) -> Response:
    """Answer with an error in OpenAI's format, the router's errors included."""
    failure, headers = to_api_error(error), dict[str, str]()
    if isinstance(error, HTTPException):
        failure = ApiError(error.status_code, f"{error.detail}; see /openapi.json for what there is")
        headers |= error.headers or {}
    note_refusal(http.scope, failure)
    return JSONResponse(failure.body, status_code=failure.status, headers=headers | failure.headers)
