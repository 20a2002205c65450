"""API keys protect PROTECTED_PATHS. Health and metrics stay open: probes carry no keys and see no text.

The web page stays open too; it shows nothing until its user enters a key.
"""

from collections.abc import Iterable
from hashlib import sha256
from hmac import compare_digest

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from eyas.serve.api_error import ApiError
from eyas.serve.connection import ResponseWriter

PROTECTED_PATHS = ("/v1", "/status", "/tokenize", "/detokenize")


class ApiKeyMiddleware:
    """Rejects requests to protected paths without a valid key. If no keys are set, everything passes."""

    def __init__(self, app: ASGIApp, keys: Iterable[str]) -> None:
        self._app = app
        # Digests have equal length, so the comparison leaks nothing about a key.
        self._digests = [sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check the key and pass the request on."""
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
