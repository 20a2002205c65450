"""Refuses the endpoints of OpenAI and vLLM that this server does not have, with what to use instead.

The status is 404, as clients take it for final. They would retry a 501.
"""

from functools import partial

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from eyas.serve.api_error import ApiError

_EMBEDDINGS = "the served model writes text and embeds none; use a server with an embedding model, such as vLLM's"
_SCORES = "the served model writes text and scores none; use a server with a scoring model, such as vLLM's"
_SOUND = "text is the only input and output here; use a speech server"
_NOT_STORED = "nothing is stored here, so there is nothing to fetch or change; keep what the server answers"
_NO_FILES = "no files or jobs are kept here; send requests one by one to /v1/chat/completions"
_NO_STATE = "no conversations are kept here; send the whole conversation to /v1/responses or /v1/chat/completions"

REFUSED_ENDPOINTS = {
    "/v1/embeddings": _EMBEDDINGS,
    "/pooling": _EMBEDDINGS,
    "/classify": _SCORES,
    "/score": _SCORES,
    "/v1/score": _SCORES,
    "/rerank": _SCORES,
    "/v1/rerank": _SCORES,
    "/v2/rerank": _SCORES,
    "/v1/moderations": _SCORES,
    "/v1/audio/{name}": _SOUND,
    "/v1/realtime": _SOUND,
    "/v1/images/{name}": "text is the only input and output here; use an image server",
    "/v1/responses/{name}": _NOT_STORED,
    "/v1/responses/{name}/{action}": _NOT_STORED,
    "/v1/chat/completions/{name}": _NOT_STORED,
    "/v1/files": _NO_FILES,
    "/v1/files/{name}": _NO_FILES,
    "/v1/batches": _NO_FILES,
    "/v1/batches/{name}": _NO_FILES,
    "/v1/fine_tuning/{name}": "models are not trained here; see eyas train for drafters",
    "/v1/assistants": _NO_STATE,
    "/v1/threads": _NO_STATE,
    "/v1/conversations": _NO_STATE,
    "/v1/conversations/{name}": _NO_STATE,
    "/v1/messages": "Anthropic's API is not spoken here; use /v1/chat/completions or /v1/responses",
    "/invocations": "SageMaker's single route is not served; use /v1/chat/completions or /v1/completions",
}
_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]


def refused_routes() -> list[Route]:
    """A route for each of them; put them behind the routes that exist."""
    return [Route(path, partial(_refuse, why), methods=_METHODS) for path, why in REFUSED_ENDPOINTS.items()]


async def _refuse(why: str, http: HttpRequest) -> Response:
    raise ApiError(404, f"{http.scope['path']} is not served: {why}", code="unsupported_endpoint")
