"""The OpenAPI document. Schemas of request bodies come from `protocol`."""

from typing import Any

from pydantic.json_schema import models_json_schema

from eyas import __version__
from eyas.serve.endpoints.drafter_swap import DrafterSwapRequest
from eyas.serve.endpoints.tokenize import DetokenizeRequest, TokenizeRequest
from eyas.serve.monitoring.status import STATUS_SCHEMA
from eyas.serve.monitoring.status_history import HISTORY_SCHEMA
from eyas.serve.protocol.completions import NEUTRAL_VALUES, ChatCompletionRequest, CompletionRequest
from eyas.serve.protocol.responses import ResponsesRequest

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
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


def openapi_document() -> dict[str, Any]:
    """The OpenAPI document."""
    bodies = (ChatCompletionRequest, CompletionRequest)
    references, definitions = models_json_schema(
        [
            (body, "validation")
            for body in (*bodies, DrafterSwapRequest, TokenizeRequest, DetokenizeRequest, ResponsesRequest)
        ],
        ref_template="#/components/schemas/{model}",
    )
    schemas = definitions["$defs"] | {"Error": _ERROR, "Status": STATUS_SCHEMA, "StatusHistory": HISTORY_SCHEMA}
    for body in bodies:
        schemas[body.__name__] = _with_neutral_values(schemas[body.__name__])
    return {
        "openapi": "3.1.0",
        "info": {"title": "eyas", "version": __version__},
        "paths": {
            "/v1/chat/completions": {
                "post": _post("Answer a conversation.", references[ChatCompletionRequest, "validation"])
            },
            "/v1/completions": {"post": _post("Continue prompts.", references[CompletionRequest, "validation"])},
            "/v1/responses": {
                "post": _post("Answer in the Responses API.", references[ResponsesRequest, "validation"])
            },
            "/v1/models": {"get": _get("The model that is served.", keys=True)},
            "/v1/drafter": {
                "get": _get("The drafter in use.", keys=True),
                "post": _post("Swap the drafter.", references[DrafterSwapRequest, "validation"]),
            },
            "/tokenize": {"post": _post("Token ids of a text.", references[TokenizeRequest, "validation"])},
            "/detokenize": {"post": _post("The text of token ids.", references[DetokenizeRequest, "validation"])},
            "/version": {"get": _get("The version of eyas.")},
            "/load": {"get": _get("Answers in flight, as server_load.")},
            "/ping": {"get": _get("The same as /health.", "503")},
            "/health": {"get": _get("Whether requests are accepted.", "503")},
            "/metrics": {"get": _get("Prometheus metrics.", content="text/plain")},
            "/status": {"get": _get("The server's state; counts are since the start.", keys=True, schema="Status")},
            "/status/history": {"get": _get("The last hour of /status.", keys=True, schema="StatusHistory")},
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
    return {
        "summary": summary,
        "security": [{"key": []}, {}],
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        "responses": {
            "200": {
                "description": "The response, or its events if stream is true.",
                "content": {
                    "application/json": {"schema": {"type": "object"}},
                    "text/event-stream": {},
                },
            },
            **{status: _error_response(why) for status, why in _ERROR_RESPONSES.items()},
        },
    }


def _get(
    summary: str, *statuses: str, keys: bool = False, content: str = "application/json", schema: str | None = None
) -> dict[str, Any]:
    plain = {"type": "object"} if content == "application/json" else {"type": "string"}
    content_schema = plain if schema is None else {"$ref": f"#/components/schemas/{schema}"}
    responses = {"200": {"description": summary, "content": {content: {"schema": content_schema}}}}
    errors = {status: _error_response(_ERROR_RESPONSES[status]) for status in (*statuses, *(("401",) if keys else ()))}
    return {"summary": summary, "responses": responses | errors} | ({"security": [{"key": []}, {}]} if keys else {})


def _error_response(why: str) -> dict[str, Any]:
    return {"description": why, "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}}
