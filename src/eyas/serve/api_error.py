"""Errors as clients get them: an HTTP status and OpenAI's error body.

Invariant: an error by the client names the field, the value, the limit and the fix. An error by the server says so, and
whether a retry makes sense.
"""

from typing import Any

from eyas.engine.async_engine import EngineError
from eyas.errors import UserError

_KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """An error response."""

    def __init__(
        self, status: int, message: str, *, field: str | None = None, code: str | None = None, retry: int | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.field, self.code, self.retry = status, message, field, code, retry

    @property
    def body(self) -> dict[str, Any]:
        """The JSON body."""
        kind = _KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.field, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        """Headers that clients use for retries and authentication."""
        headers = {} if self.retry is None else {"Retry-After": str(self.retry)}
        return headers | ({"WWW-Authenticate": "Bearer"} if self.status == 401 else {})


def invalid(field: str, message: str, code: str | None = None) -> ApiError:
    """A 400 for a field of the body."""
    return ApiError(400, message, field=field, code=code)


def unsupported(field: str, message: str) -> ApiError:
    """A 400 for a field that this server, or this model, does not support."""
    return invalid(field, message, code="unsupported_parameter")


def to_api_error(error: BaseException) -> ApiError:
    """The error response for an exception."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, UserError):
        return ApiError(400, str(error), code="invalid_value")
    if isinstance(error, TimeoutError):
        return ApiError(504, "the request took longer than this server allows; ask for fewer tokens", code="timeout")
    if isinstance(error, EngineError):
        cause = error.__cause__
        # Only the type: the message may hold anything, and the operator finds it in the log.
        kind = "" if cause is None else f" ({type(cause).__name__})"
        return ApiError(500, f"the engine failed while answering{kind}; try again", code="engine_failed")
    return ApiError(500, f"the server failed ({type(error).__name__}); this is a bug in eyas", code="internal_error")
