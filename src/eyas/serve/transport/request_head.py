"""Refuse a request by its head alone, before a route sees it and before its body is read."""

from starlette.types import Scope

from eyas.serve.api_error import ApiError

HTTP_VERSIONS = ("1.0", "1.1")
MAX_HEAD_BYTES = 16 * 1024
MAX_HEADERS = 100


def check_head(scope: Scope, *, body_bytes: int) -> None:
    """Raise an error unless the head is one that this server answers. The HTTP parser has checked its syntax."""
    version = scope["http_version"]
    if version not in HTTP_VERSIONS:
        raise ApiError(505, f"HTTP/{version} is not spoken here; use HTTP/1.1", code="http_version")
    headers = scope["headers"]
    line = len(scope["method"]) + len(scope["raw_path"]) + len(scope["query_string"])
    size = line + sum(len(name) + len(value) for name, value in headers)
    if len(headers) > MAX_HEADERS or size > MAX_HEAD_BYTES:
        raise ApiError(
            431,
            f"the head has {len(headers)} headers and {size:,} bytes, above the {MAX_HEADERS} headers or "
            f"{MAX_HEAD_BYTES:,} bytes this server takes; send less",
            code="head_too_large",
        )
    if any(character < " " for character in scope["path"]):
        raise ApiError(400, "the path has control characters; leave them out", code="bad_path")
    lengths = [value for name, value in headers if name == b"content-length"]
    encoded = any(name == b"transfer-encoding" for name, _ in headers)
    if encoded and (lengths or version == "1.0"):
        # A proxy in front may read another length than we do: the rest would be a smuggled request.
        beside = "Content-Length" if lengths else "HTTP/1.0"
        raise ApiError(
            400, f"Transfer-Encoding with {beside} leaves the end of the body open; send one length", code="bad_framing"
        )
    if lengths and int(lengths[0]) > body_bytes:
        raise ApiError(
            413,
            f"Content-Length is {int(lengths[0]):,}, above the {body_bytes:,} bytes this server takes; send less",
            code="too_large",
        )
