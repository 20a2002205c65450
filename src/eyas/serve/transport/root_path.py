"""Support for a proxy that serves under a path: `https://example.org/eyas/v1` instead of `https://example.org/v1`.

A proxy may strip the prefix or leave it; both work, and all routes see paths without it. The page's addresses are
relative.
"""

import re

from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from eyas.errors import UserError


def read_root_path(text: str) -> str:
    """`/eyas` for `/eyas`, `eyas` or `/eyas/`; an empty path for `/` or nothing."""
    path = "/" + text.strip("/")
    if path == "/":
        return ""
    if not re.fullmatch(r"(/[A-Za-z0-9._~-]+)+", path) or any(part in (".", "..") for part in path.split("/")):
        raise UserError(f"--root-path {text!r} is no path; give one such as /eyas")
    return path


class RootPathMiddleware:
    """Strips the prefix where the proxy left it."""

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app = app
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope.get("path", "")
        if path == self._root_path:
            # Relative addresses of the page need the slash.
            await RedirectResponse(f"{self._root_path}/", status_code=308)(scope, receive, send)
            return
        if path.startswith(f"{self._root_path}/"):
            cut = len(self._root_path)
            scope = {**scope, "path": path[cut:], "raw_path": scope.get("raw_path", path.encode())[cut:]}
        await self._app(scope, receive, send)
