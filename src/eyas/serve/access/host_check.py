"""Requests must be addressed to a name of this server, and web pages elsewhere may not call it.

Without this, a page in the operator's own browser could use a server without keys: under a name of its own that it
lets resolve to 127.0.0.1 (DNS rebinding), or with a request across sites.
"""

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from eyas.serve.access.audit import refuse
from eyas.serve.access.policy import AccessRules
from eyas.serve.api_error import ApiError

MAX_SHOWN = 60


class HostMiddleware:
    """Rejects requests with a Host or an Origin that is not allowed."""

    def __init__(self, app: ASGIApp, access: AccessRules) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check Host and Origin and pass the request on."""
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            host, origin = headers.get("host", ""), headers.get("origin")
            if len(headers.getlist("host")) > 1 or not self._access.allows_host(host):
                message = (
                    f"this server is not called {host[:MAX_SHOWN]!r}; use its address, or start it with "
                    "--allowed-hosts NAME"
                )
                await refuse(scope, send, ApiError(421, message, field="host", code="unknown_host"), host=host)
                return
            if origin is not None and not self._access.allows_origin(origin, host):
                message = (
                    f"web pages of {origin[:MAX_SHOWN]!r} may not call this server; start it with "
                    "--allowed-origins ORIGIN"
                )
                failure = ApiError(403, message, field="origin", code="origin_not_allowed")
                await refuse(scope, send, failure, origin=origin)
                return
        await self._app(scope, receive, send)
