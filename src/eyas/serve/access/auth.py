"""API keys protect every path but the open ones. Probes carry no keys and see no text.

The web page is open too; it shows nothing until its user enters a key.
"""

from hashlib import sha256
from hmac import compare_digest

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from eyas.serve.access.audit import refuse
from eyas.serve.access.caller import Caller, address_of, set_caller
from eyas.serve.access.policy import ANY, AccessRules
from eyas.serve.api_error import ApiError

OPEN_PATHS = frozenset({"/", "/health", "/ping", "/load", "/version", "/metrics", "/openapi.json"})
OPEN_FOLDER = "/page/"


class ApiKeyMiddleware:
    """Notes who calls, and rejects requests to other than open paths without a valid key, if keys are set."""

    def __init__(self, app: ASGIApp, access: AccessRules) -> None:
        self._app = app
        self._digests = tuple(
            [sha256(key.encode()).digest() for key in keys]
            for keys in (access.api_keys, access.admin_keys, access.learn_keys)
        )
        self._all_learn = ANY in access.learn_keys
        self._needs_key = bool(access.api_keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check the key and pass the request on."""
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
