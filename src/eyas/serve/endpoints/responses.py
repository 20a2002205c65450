"""/v1/responses: OpenAI's Responses API in front of a chat completion. Nothing can be fetched later."""

import re
from collections.abc import Callable
from functools import partial

from eyas.serve.api_error import ApiError
from eyas.serve.builders.response_builder import ResponseFormatter
from eyas.serve.builders.responses_formatter import ResponsesFormatter
from eyas.serve.endpoints.completions import Endpoint
from eyas.serve.protocol.responses import ResponsesRequest, chat_body
from eyas.serve.protocol.validation import parse_body

OWN_NAMES = {
    "response_format.json_schema.schema": "text.format.schema",
    "response_format": "text.format",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
}
"""Fields of the chat completion by the names they have here, for errors."""
_CHAT_FIELD = re.compile("|".join(rf"\b{re.escape(name)}\b" for name in OWN_NAMES))


class ResponsesEndpoint(Endpoint):
    """The ASGI application of /v1/responses."""

    named_events = True

    def _prepare(self, raw: bytes) -> tuple[bytes, Callable[..., ResponseFormatter]]:
        request = parse_body(ResponsesRequest, raw)
        return chat_body(request), partial(ResponsesFormatter, request=request)

    def _to_api_error(self, error: Exception) -> ApiError:
        failure = super()._to_api_error(error)
        if failure.code == "unknown_parameter":  # named as the client wrote it
            return failure
        failure.message = _CHAT_FIELD.sub(lambda found: OWN_NAMES[found[0]], failure.message)
        failure.field = failure.field and _CHAT_FIELD.sub(lambda found: OWN_NAMES[found[0]], failure.field)
        return failure
