"""The OpenAPI document. All schemas come from the pydantic models."""

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from eyas import __version__
from eyas.serve.endpoints.drafter_swap import DrafterSwapRequest
from eyas.serve.endpoints.tokenize import DetokenizeRequest, TokenizeRequest
from eyas.serve.monitoring.status import Status, StatusHistory
from eyas.serve.protocol.completions import NEUTRAL_VALUES, ChatCompletionRequest, CompletionRequest
from eyas.serve.protocol.responses import ResponsesRequest


class ErrorDetail(BaseModel):
    """An error."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    """OpenAI's error body."""

    error: ErrorDetail


_POSTS: dict[str, tuple[str, type[BaseModel]]] = {
    "/v1/chat/completions": ("Answer a conversation.", ChatCompletionRequest),
    "/v1/completions": ("Continue prompts.", CompletionRequest),
    "/v1/responses": ("Answer in the Responses API.", ResponsesRequest),
    "/v1/drafter": ("Swap the drafter.", DrafterSwapRequest),
    "/tokenize": ("Token ids of a text.", TokenizeRequest),
    "/detokenize": ("The text of token ids.", DetokenizeRequest),
}
_ERROR_RESPONSES = {
    "400": "A field is invalid, unknown or not supported; the message names it.",
    "401": "No valid API key.",
    "403": "Not for this key, or not for web pages of this origin.",
    "404": "Another model is served.",
    "408": "The body came too slowly.",
    "409": "Another drafter is being loaded.",
    "413": "The body is too large.",
    "421": "The Host is no name of this server.",
    "415": "The content type is not application/json.",
    "429": "The queue is full; see Retry-After.",
    "500": "The engine failed; other requests continue.",
    "503": "The server is shutting down, or the engine is down.",
    "504": "The request took too long.",
}
_KEY: dict[str, Any] = {"security": [{"key": []}, {}]}
_OBJECT = {"type": "object"}


def openapi_document() -> dict[str, Any]:
    """The OpenAPI document."""
    bodies = [body for _, body in _POSTS.values()]
    references, definitions = models_json_schema(
        [
            *((body, "validation") for body in bodies),
            *((answer, "serialization") for answer in (Error, Status, StatusHistory)),
        ],
        ref_template="#/components/schemas/{model}",
    )
    schemas = definitions["$defs"]
    for body in (ChatCompletionRequest, CompletionRequest):
        schemas[body.__name__] = _with_neutral_values(schemas[body.__name__])
    paths: dict[str, dict[str, Any]] = {
        path: {"post": _post(summary, references[body, "validation"])} for path, (summary, body) in _POSTS.items()
    }
    paths["/v1/drafter"]["get"] = _get("The drafter in use.", "401") | _KEY
    status, history = references[Status, "serialization"], references[StatusHistory, "serialization"]
    return {
        "openapi": "3.1.0",
        "info": {"title": "eyas", "version": __version__},
        "paths": paths
        | {
            "/v1/models": {"get": _get("The model that is served.", "401") | _KEY},
            "/version": {"get": _get("The version of eyas.")},
            "/load": {"get": _get("Answers in flight, as server_load.")},
            "/ping": {"get": _get("The same as /health.", "503")},
            "/health": {"get": _get("Whether requests are accepted.", "503")},
            "/metrics": {"get": _get("Prometheus metrics.", schema={"type": "string"}, content="text/plain")},
            "/status": {"get": _get("The server's state; counts are since the start.", "401", schema=status) | _KEY},
            "/status/history": {"get": _get("The last hour of /status.", "401", schema=history) | _KEY},
        },
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _with_neutral_values(body: dict[str, Any]) -> dict[str, Any]:
    """A body's schema with null for optional fields, and with the neutral values of unsupported fields."""
    required = body["required"]
    properties = {
        name: field if name in required else {"anyOf": [field, {"type": "null"}]}
        for name, field in body["properties"].items()
    }
    neutral = {name: {"enum": [None, *values]} for name, values in NEUTRAL_VALUES.items()}
    return body | {"properties": neutral | properties}


def _post(summary: str, body: Any) -> dict[str, Any]:
    answer = {
        "description": "The response, or its events if stream is true.",
        "content": {"application/json": {"schema": _OBJECT}, "text/event-stream": {}},
    }
    return {
        "summary": summary,
        **_KEY,
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        "responses": {"200": answer} | {status: _error_response(status) for status in _ERROR_RESPONSES},
    }


def _get(summary: str, *errors: str, schema: Any = _OBJECT, content: str = "application/json") -> dict[str, Any]:
    responses = {"200": {"description": summary, "content": {content: {"schema": schema}}}}
    return {"summary": summary, "responses": responses | {status: _error_response(status) for status in errors}}


def _error_response(status: str) -> dict[str, Any]:
    schema = {"$ref": "#/components/schemas/Error"}
    return {"description": _ERROR_RESPONSES[status], "content": {"application/json": {"schema": schema}}}
