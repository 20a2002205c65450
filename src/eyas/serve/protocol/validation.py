"""Validate a request body, or raise an error that names the field, its value and what is allowed."""

import asyncio
from difflib import get_close_matches
from reprlib import Repr
from typing import Any, TypeVar

from pydantic import ValidationError
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest

from eyas.serve.api_error import ApiError
from eyas.serve.protocol.body_shape import check_shape
from eyas.serve.protocol.bounds import TOO_MANY
from eyas.serve.protocol.completions import NEUTRAL_VALUES, WireModel
from eyas.serve.transport.connection import ClientDisconnectedError

Body = TypeVar("Body", bound=WireModel)

EXPECTED_SHAPES = {
    "prompt": "a string, a list of strings, a list of token ids or a list of such lists",
    "stop": "a string or a list of strings",
    "logit_bias": "an object from token ids to numbers",
    "stop_token_ids": "a list of token ids",
    "guided_json": "a JSON schema or the text of one",
    "structured_outputs": "an object with one of json, regex, choice, grammar or json_object",
    "tool_choice": 'none, auto, required or {"type": "function", "function": {"name": ...}}',
}
"""For fields with several types, one sentence is clearer than one error per type."""
MAX_SHOWN = 60
MAX_FIELD_PATH = 200
_SHORT = Repr()  # repr() would write out all of a large value first
_SHORT.maxlist = _SHORT.maxdict = MAX_SHOWN
_SHORT.maxstring = _SHORT.maxlong = 2 * MAX_SHOWN


async def read_body(http: HttpRequest, *, max_bytes: int, seconds: float) -> bytes:
    """The whole body, if it is JSON, small enough and arrives in time."""
    kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        # This also blocks cross-site posts: a browser sends this content type only after a CORS preflight.
        raise ApiError(
            415, f"content-type is {kind or 'missing'}; send application/json", code="unsupported_media_type"
        )
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for chunk in http.stream():
                body += chunk
                if len(body) > max_bytes:
                    raise ApiError(
                        413,
                        f"the body is above the {max_bytes:,} bytes this server takes; send less",
                        code="too_large",
                    )
    except TimeoutError:
        raise ApiError(408, f"the body did not come within {seconds:g} s; send it faster", code="timeout") from None
    except ClientDisconnect:
        raise ClientDisconnectedError from None
    check_shape(bytes(body))
    return bytes(body)


def parse_body(kind: type[Body], body: bytes) -> Body:
    """Parse and validate the body as `kind`."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise _validation_error(kind, error) from None


def _validation_error(kind: type[WireModel], error: ValidationError) -> ApiError:
    # Report the first error only, without pydantic's URLs and context.
    errors = error.errors(include_url=False, include_context=False)
    first = next((one for one in errors if one["type"] == TOO_MANY), errors[0])
    field = _field_path(first["loc"])[:MAX_FIELD_PATH]
    top = str(first["loc"][0]) if first["loc"] else ""
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is no JSON ({first['msg'].partition(': ')[2]})", code="invalid_json")
    if first["type"] == TOO_MANY:
        message = f"{field or 'the body'} {first['msg']}; send fewer"
        return ApiError(400, message, field=field or None, code="invalid_value")
    if not field:
        return ApiError(400, "the body is no JSON object; send one", code="invalid_json")
    if first["type"].startswith("union_tag") and top not in EXPECTED_SHAPES:
        known = "system, developer, user, assistant or tool"
        role = first["input"].get("role") if isinstance(first["input"], dict) else first["input"]
        return ApiError(
            400,
            f"{field}.role is {shortened(role)}; it should be {known}",
            field=f"{field}.role",
            code="invalid_value",
        )
    if first["type"] == "extra_forbidden":
        return _unknown_field_error(kind, field, first["input"])
    if first["type"] == "missing":
        return ApiError(400, f"{field} is missing; give it", field=field, code="missing_required_parameter")
    if top in EXPECTED_SHAPES:
        return ApiError(400, f"{top} is not {EXPECTED_SHAPES[top]}; change it", field=top, code="invalid_type")
    if top == "messages" and "content" in first["loc"]:
        return ApiError(400, f"{field} is neither a string nor a list of text parts; change it", field=field)
    limit = first["msg"].removeprefix("Input should be ")
    return ApiError(
        400, f"{field} is {shortened(first['input'])}; it should be {limit}", field=field, code="invalid_value"
    )


def _field_path(loc: tuple[int | str, ...]) -> str:
    """The path of a field, as a client would write it."""
    if loc[:1] == ("messages",) and len(loc) > 3:
        # After the index comes the message class that pydantic chose, and after content its type: leave both out.
        loc = (*loc[:2], *loc[3:4]) if loc[3] == "content" else (*loc[:2], *loc[3:])
    return ".".join(str(part) for part in loc)


def _unknown_field_error(kind: type[WireModel], field: str, value: Any) -> ApiError:
    if field in NEUTRAL_VALUES:
        message = f"{field} is not supported yet, so {shortened(value)} would have no effect; leave it out"
        return ApiError(400, message, field=field, code="unsupported_parameter")
    near = get_close_matches(field, kind.model_fields, n=1)
    hint = f"did you mean {near[0]}?" if near else "leave it out"
    return ApiError(400, f"{field} is not a field of this request; {hint}", field=field, code="unknown_parameter")


def shortened(value: Any) -> str:
    """A value as messages show it."""
    text = _SHORT.repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"
