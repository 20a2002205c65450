"""Reads and validates a request body, or raises an error that names the field, its value and what is allowed."""

import asyncio
import json
import re
from difflib import get_close_matches
from reprlib import Repr
from typing import Any, TypeVar

from pydantic import ValidationError
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest

from eyas.serve.api_error import ApiError, invalid, unsupported
from eyas.serve.model_info import ServerLimits
from eyas.serve.protocol.bounds import TOO_MANY
from eyas.serve.protocol.completions import NEUTRAL_VALUES, WireModel
from eyas.serve.protocol.request_policy import UnknownFields
from eyas.serve.transport.connection import ClientDisconnectedError

Body = TypeVar("Body", bound=WireModel)
Location = tuple[int | str, ...]

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
MAX_VALUES = 65_536
"""Strings (keys too), lists and objects of one body. 2048 messages of several parts each are a third of it."""
IGNORED_HEADER = "x-eyas-ignored-fields"
MOST_IGNORED = 64
"""A body with more faults is refused for the first of them: dropping many fields one by one takes time."""
MOST_NAMED, LONGEST_NAME = 16, 64
"""Names in the header, and letters of each, so that it stays below the limits of proxies."""
_SHORT = Repr()  # repr() would write out all of a large value first
_SHORT.maxlist = _SHORT.maxdict = MAX_SHOWN
_SHORT.maxstring = _SHORT.maxlong = 2 * MAX_SHOWN
# Possessive, so that nothing is scanned twice; a string without an end reaches to the end of the body.
_STRING_OR_OPENING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?+|[\[{]', re.DOTALL)


async def read_body(http: HttpRequest, limits: ServerLimits) -> bytes:
    """The whole body, if it is JSON, small enough and arrives in time."""
    kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        # This also blocks cross-site posts: a browser sends this content type only after a CORS preflight.
        message = f"content-type is {kind or 'missing'}; send application/json"
        raise ApiError(415, message, code="unsupported_media_type")
    body = bytearray()
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for chunk in http.stream():
                body += chunk
                if len(body) > limits.body_bytes:
                    message = f"the body is above the {limits.body_bytes:,} bytes this server takes; send less"
                    raise ApiError(413, message, code="too_large")
    except TimeoutError:
        message = f"the body did not come within {limits.body_seconds:g} s; send it faster"
        raise ApiError(408, message, code="timeout") from None
    except ClientDisconnect:
        raise ClientDisconnectedError from None
    check_shape(bytes(body))
    return bytes(body)


def check_shape(body: bytes) -> None:
    """Raise an error if the body has more strings, lists and objects than any request needs, before it is parsed.

    A byte of text costs a byte, but `{}` costs hundreds: parsing 4 MiB of `{},` held up every other request for a
    minute, because the parser holds the interpreter's lock. Numbers are cheap, so lists of token ids may be as long as
    the body.
    """
    # Every one of them begins with such a sign; inside strings there may be more, so count those only if in doubt.
    if sum(body.count(sign) for sign in (b'"', b"[", b"{")) <= MAX_VALUES:
        return
    for count, _ in enumerate(_STRING_OR_OPENING.finditer(body), 1):
        if count > MAX_VALUES:
            message = f"the body has more than {MAX_VALUES:,} strings, lists and objects; send fewer in one request"
            raise ApiError(413, message, code="too_large")


def parse_body(kind: type[Body], body: bytes) -> Body:
    """Parse and validate the body as `kind`."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise _validation_error(kind, error) from None


def read_known_fields(kind: type[Body], raw: bytes, policy: UnknownFields) -> tuple[Body, list[str]]:
    """The valid body, and the paths of the fields that were ignored; none unless the policy is `report`.

    Fields of OpenAI's API that are known and not supported are refused either way (`NEUTRAL_VALUES`): they ask for
    something that the answer would not have.
    """
    ignored: list[str] = []
    while policy == "report":
        try:
            return kind.model_validate_json(raw), ignored
        except ValidationError as error:
            paths = _unknown_paths(error)
            if not paths or len(ignored) + len(paths) > MOST_IGNORED:
                break
            dropped, raw = _without(raw, paths)
            if not dropped:
                break
            ignored += dropped
    return parse_body(kind, raw), ignored


def ignored_header(ignored: list[str]) -> dict[str, str]:
    """The response header that names ignored fields. Whatever their names hold, it is one short line of plain signs."""
    if not ignored:
        return {}
    names = [re.sub(r"[^A-Za-z0-9_.\-]", "?", name)[:LONGEST_NAME] for name in ignored[:MOST_NAMED]]
    left = len(ignored) - len(names)
    return {IGNORED_HEADER: ", ".join(names) + (f" and {left} more" if left else "")}


def _unknown_paths(error: ValidationError) -> list[Location]:
    """Where the body has unknown fields, as pydantic locates them."""
    if error.error_count() > MOST_IGNORED:
        return []
    found = error.errors(include_url=False, include_context=False, include_input=False)
    unknown = [one["loc"] for one in found if one["type"] == "extra_forbidden"]
    return [loc for loc in unknown if len(loc) > 1 or loc[0] not in NEUTRAL_VALUES]


def _without(raw: bytes, paths: list[Location]) -> tuple[list[str], bytes]:
    """The paths of the fields that were dropped, and the body without them."""
    try:
        body = json.loads(raw)
        dropped = [name for path in paths if (name := _drop(body, path)) is not None]
        return dropped, json.dumps(body).encode()
    except ValueError:  # Python writes no integer of thousands of digits
        return [], raw


def _drop(value: Any, loc: Location, path: str = "") -> str | None:
    """Drop the field at `loc`. Returns its path, or None if it is gone already.

    Pydantic puts names of union members between the keys, which the body does not have: they are skipped.
    """
    key, rest = loc[0], loc[1:]
    if isinstance(value, dict) and isinstance(key, str) and key in value:
        if not rest:
            del value[key]
            return f"{path}{key}"
        if (name := _drop(value[key], rest, f"{path}{key}.")) is not None:
            return name
    if isinstance(value, list) and isinstance(key, int) and key < len(value):
        return _drop(value[key], rest, f"{path}{key}.") if rest else None
    return _drop(value, rest, path) if rest else None


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
        role = first["input"].get("role") if isinstance(first["input"], dict) else first["input"]
        known = "system, developer, user, assistant or tool"
        message = f"{field}.role is {shortened(role)}; it should be {known}"
        return invalid(f"{field}.role", message, code="invalid_value")
    if first["type"] == "extra_forbidden":
        return _unknown_field_error(kind, field, first["input"])
    if first["type"] == "missing":
        return invalid(field, f"{field} is missing; give it", code="missing_required_parameter")
    if top in EXPECTED_SHAPES:
        return invalid(top, f"{top} is not {EXPECTED_SHAPES[top]}; change it", code="invalid_type")
    if top == "messages" and "content" in first["loc"]:
        return invalid(field, f"{field} is neither a string nor a list of text parts; change it")
    limit = first["msg"].removeprefix("Input should be ")
    return invalid(field, f"{field} is {shortened(first['input'])}; it should be {limit}", code="invalid_value")


def _field_path(loc: Location) -> str:
    """The path of a field, as a client would write it."""
    if loc[:1] == ("messages",) and len(loc) > 3:
        # After the index comes the message class that pydantic chose, and after content its type: leave both out.
        loc = (*loc[:2], *loc[3:4]) if loc[3] == "content" else (*loc[:2], *loc[3:])
    return ".".join(str(part) for part in loc)


def _unknown_field_error(kind: type[WireModel], field: str, value: Any) -> ApiError:
    if field in NEUTRAL_VALUES:
        message = f"{field} is not supported yet, so {shortened(value)} would have no effect; leave it out"
        return unsupported(field, message)
    near = get_close_matches(field, kind.model_fields, n=1)
    hint = f"did you mean {near[0]}?" if near else "leave it out"
    return invalid(field, f"{field} is not a field of this request; {hint}", code="unknown_parameter")


def shortened(value: Any) -> str:
    """A value as messages show it."""
    text = _SHORT.repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"
