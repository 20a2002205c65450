"""One log line and one count for every refused request, whether a router, a middleware or an endpoint refused it.

Endpoints that generate keep their own record of each request (`endpoints/completions.py`). Successful reads such as
/health leave no line.
"""

import logging
from collections.abc import Sequence
from typing import Any

from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from eyas.serve.access.caller import caller_of
from eyas.serve.api_error import ApiError
from eyas.serve.monitoring.json_logging import log_event
from eyas.serve.monitoring.metrics import ServerMetrics
from eyas.serve.transport.connection import ResponseWriter

logger = logging.getLogger(__name__)
UNKNOWN_PATH = "other"
"""The endpoint label of paths that do not exist, so that strangers cannot fill the metrics with names."""
MAX_SHOWN = 100
_RECORDED, _REFUSAL = "eyas.recorded", "eyas.refusal"


class AuditMiddleware:
    """Records refused requests that no endpoint has recorded. The outermost, so that it sees every refusal."""

    def __init__(self, app: ASGIApp, metrics: ServerMetrics, routes: Sequence[Route]) -> None:
        self._app, self._metrics, self._routes = app, metrics, routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 0

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if status >= 400:
                    self._metrics.errors.labels(status).inc()
            await send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            if status >= 400 and not scope.get(_RECORDED, False):
                self._record(scope, status)

    def _record(self, scope: Scope, status: int) -> None:
        fields: dict[str, Any] = {"outcome": str(status)} | scope.get(_REFUSAL, {})
        path = next((route.path for route in self._routes if route.matches(scope)[0] is not Match.NONE), None)
        self._metrics.requests.labels(path or UNKNOWN_PATH, fields["outcome"]).inc()
        log_event(
            logger,
            "refused",
            level=logging.WARNING,
            method=scope["method"],
            path=path or scope["path"][:MAX_SHOWN],
            status=status,
            **caller_of(scope).log_fields,
            **fields,
        )


async def refuse(scope: Scope, send: Send, failure: ApiError, **fields: Any) -> None:
    """Answer with an error from a middleware; `fields` are logged with it."""
    note_refusal(scope, failure, **fields)
    await ResponseWriter(send, "").fail(failure)


def note_refusal(scope: Scope, failure: ApiError, **fields: Any) -> None:
    """Tell the audit why a request is refused."""
    shown = {name: str(value)[:MAX_SHOWN] for name, value in fields.items()}
    scope[_REFUSAL] = {"outcome": failure.code or str(failure.status)} | shown


def mark_recorded(scope: Scope) -> None:
    """Tell the audit that an endpoint records this request itself."""
    scope[_RECORDED] = True
