"""Fields that this server does not know: refused, or ignored and named in a response header.

Fields of OpenAI's API that are known and not supported stay refused either way (`NEUTRAL_VALUES`): they ask for
something that the answer would not have.
"""

import json
import re
from typing import Any, TypeVar

from pydantic import ValidationError

from eyas.serve.protocol.completions import NEUTRAL_VALUES, WireModel
from eyas.serve.protocol.request_policy import UnknownFields
from eyas.serve.protocol.validation import parse_body

Body = TypeVar("Body", bound=WireModel)
IGNORED_HEADER = "x-eyas-ignored-fields"
MOST_IGNORED = 64
"""A body with more faults is refused for the first of them: dropping many fields one by one takes time."""
MOST_NAMED, LONGEST_NAME = 16, 64
"""Names in the header, and letters of each, so that it stays below the limits of proxies."""


def read_known_fields(kind: type[Body], raw: bytes, policy: UnknownFields) -> tuple[Body, list[str]]:
    """The valid body, and the paths of the fields that were ignored; none unless the policy is `report`."""
    if policy == "refuse":
        return parse_body(kind, raw), []
    ignored: list[str] = []
    while True:
        try:
            return kind.model_validate_json(raw), ignored
        except ValidationError as error:
            paths = _unknown_paths(error)
            if not paths or len(ignored) + len(paths) > MOST_IGNORED:
                return parse_body(kind, raw), ignored
            dropped, raw = _without(raw, paths)
            if not dropped:
                return parse_body(kind, raw), ignored
            ignored += dropped


def ignored_header(ignored: list[str]) -> dict[str, str]:
    """The response header that names ignored fields. Whatever their names hold, it is one short line of plain signs."""
    if not ignored:
        return {}
    names = [re.sub(r"[^A-Za-z0-9_.\-]", "?", name)[:LONGEST_NAME] for name in ignored[:MOST_NAMED]]
    left = len(ignored) - len(names)
    return {IGNORED_HEADER: ", ".join(names) + (f" and {left} more" if left else "")}


def _unknown_paths(error: ValidationError) -> list[tuple[int | str, ...]]:
    """Where the body has fields that are not known, in pydantic's words."""
    if error.error_count() > MOST_IGNORED:
        return []
    found = error.errors(include_url=False, include_context=False, include_input=False)
    unknown = [one["loc"] for one in found if one["type"] == "extra_forbidden"]
    return [loc for loc in unknown if len(loc) > 1 or loc[0] not in NEUTRAL_VALUES]


def _without(raw: bytes, paths: list[tuple[int | str, ...]]) -> tuple[list[str], bytes]:
    """The paths of the fields that were taken out, and the body without them."""
    try:
        body = json.loads(raw)
        dropped = [name for path in paths if (name := _drop(body, path)) is not None]
        return dropped, json.dumps(body).encode()
    except ValueError:  # Python writes no integer of thousands of digits
        return [], raw


def _drop(value: Any, loc: tuple[int | str, ...], path: str = "") -> str | None:
    """Take out the field at `loc`; its path, or None if it is gone already.

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
