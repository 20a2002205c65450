"""API keys: who may use /v1 and see /status. Health and metrics stay open to probes, which carry no keys and see no
texts; so does the page, which holds nothing before its user gives it a key.
"""

from collections.abc import Iterable
from hashlib import sha256
from hmac import compare_digest

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from eyas.serve.api_error import ApiError
from eyas.serve.connection import ResponseWriter

PROTECTED_PATHS = ("/v1", "/status")


class ApiKeyMiddleware:
    """Lets requests to guarded paths through if they carry one of the keys; without keys, all of them."""

    def __init__(self, app: ASGIApp, keys: Iterable[str]) -> None:
        self._app = app
        # Digests have one length, so that comparing tells nothing about a key.
        self._digests = [sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on or refuse."""
        if (
            scope["type"] == "http"
            and scope["path"].startswith(PROTECTED_PATHS)
            and self._digests
            and not self._has_valid_key(scope)
        ):
            failure = ApiError(401, "the API key is missing or unknown; send Authorization: Bearer KEY", code="bad_key")
            await ResponseWriter(send, "").fail(failure)
            return
        await self._app(scope, receive, send)

    def _has_valid_key(self, scope: Scope) -> bool:
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        digest = sha256(key.strip().encode("latin-1", "replace")).digest()
        matches = [compare_digest(digest, known) for known in self._digests]
        return scheme.lower() == "bearer" and any(matches)
