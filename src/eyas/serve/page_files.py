"""Serves the files of the web page: read once, revalidated by ETag, and not allowed to load anything from elsewhere.

The page is static and holds no data. It fetches what it shows with the key that its user enters.
"""

from hashlib import sha256
from importlib.resources import files
from importlib.resources.abc import Traversable

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

INDEX = "index.html"
TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
CONTENT_SECURITY_POLICY = "; ".join(
    [
        "default-src 'self'",  # no inline script, no inline style, nothing from elsewhere
        "object-src 'none'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",  # a key is entered here: no other page may frame it
        "require-trusted-types-for 'script'",  # model output can never become markup
    ]
)
HEADERS = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",  # keep it, but revalidate: a new version shows at once
}


def page_routes() -> list[Route]:
    """The routes of `/` and of its files under `/page/`."""
    found = {item.name: _StaticFile(item).respond for item in files("eyas.serve").joinpath("page").iterdir()}
    return [Route("/" if name == INDEX else f"/page/{name}", one, methods=["GET"]) for name, one in found.items()]


class _StaticFile:
    """A file in memory."""

    def __init__(self, file: Traversable) -> None:
        self._content = file.read_bytes()
        self._type = TYPES[file.name.rpartition(".")[2]]
        self._tag = f'"{sha256(self._content).hexdigest()[:32]}"'

    async def respond(self, http: HttpRequest) -> Response:
        """The file, or 304 if the browser has it."""
        headers = HEADERS | {"etag": self._tag}
        known = [tag.strip().removeprefix("W/") for tag in http.headers.get("if-none-match", "").split(",")]
        if self._tag in known or "*" in known:
            return Response(status_code=304, headers=headers)
        return Response(self._content, headers=headers, media_type=self._type)
