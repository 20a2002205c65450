"""The checks before a request reaches a route: its Host and Origin, then its API key."""

from hashlib import sha256
from hmac import compare_digest

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from eyas.serve.access.audit import refuse
from eyas.serve.access.caller import Caller, address_of, set_caller
from eyas.serve.access.policy import ANY, AccessRules
from eyas.serve.api_error import ApiError

OPEN_PATHS = frozenset({"/", "/health", "/ping", "/load", "/version", "/metrics", "/openapi.json"})
"""Paths that need no key: probes carry none and see no text, and the web page shows nothing until a key is entered."""
OPEN_FOLDER = "/page/"
MAX_SHOWN = 60


class HostMiddleware:
    """Refuses requests with a Host or an Origin that is not allowed.

    Without this, a page in the operator's own browser could use a server without keys: under a name of its own that it
    lets resolve to 127.0.0.1 (DNS rebinding), or with a request across sites.
    """

    def __init__(self, app: ASGIApp, access: AccessRules) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            host, origin = headers.get("host", ""), headers.get("origin")
            if len(headers.getlist("host")) > 1 or not self._access.allows_host(host):
                fix = "use its address, or start it with --allowed-hosts NAME"
                message = f"this server is not called {host[:MAX_SHOWN]!r}; {fix}"
                await refuse(scope, send, ApiError(421, message, field="host", code="unknown_host"), host=host)
                return
            if origin is not None and not self._access.allows_origin(origin, host):
                fix = "start it with --allowed-origins ORIGIN"
                message = f"web pages of {origin[:MAX_SHOWN]!r} may not call this server; {fix}"
                failure = ApiError(403, message, field="origin", code="origin_not_allowed")
                await refuse(scope, send, failure, origin=origin)
                return
        await self._app(scope, receive, send)


class ApiKeyMiddleware:
    """Notes the caller, and if keys are set refuses requests without a valid one, except to open paths."""

    def __init__(self, app: ASGIApp, access: AccessRules) -> None:
        self._app = app
        self._digests = tuple(
            [sha256(key.encode()).digest() for key in keys]
            for keys in (access.api_keys, access.admin_keys, access.learn_keys)
        )
        self._all_learn = ANY in access.learn_keys
        self._needs_key = bool(access.api_keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            caller = self._caller(scope)
            set_caller(scope, caller)
            if self._needs_key and caller.key_digest is None and not _is_open(scope["path"]):
                message = "the API key is missing or unknown; send Authorization: Bearer KEY"
                await refuse(scope, send, ApiError(401, message, code="bad_key"))
                return
        await self._app(scope, receive, send)

    def _caller(self, scope: Scope) -> Caller:
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        digest = sha256(key.strip().encode("latin-1", "replace")).digest()
        # Digests have equal length and all are compared, so the time tells nothing about a key.
        api, admin, learns = (sum(compare_digest(digest, known) for known in keys) > 0 for keys in self._digests)
        if not (api or admin) or scheme.lower() != "bearer":
            return Caller(address=address_of(scope), learns=self._all_learn)
        learns = learns or self._all_learn
        return Caller(address=address_of(scope), key_digest=digest.hex(), admin=admin, learns=learns)


def _is_open(path: str) -> bool:
    return path in OPEN_PATHS or path.startswith(OPEN_FOLDER)
