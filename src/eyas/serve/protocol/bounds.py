"""Bounds of request fields that are checked before their items: a list that is too long is not validated first."""

from typing import Any

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

TOO_MANY = "too_many_items"
MAX_MESSAGES = 2048
"""As OpenAI has it."""
MAX_PARTS = 2048
"""Text parts of one message."""
MAX_TOOLS = 128
"""As OpenAI has it; also calls in one message."""
MAX_OBJECTS = 8192
"""Of lists whose objects are checked one by one later."""
MAX_LOGIT_BIAS = 4096
MAX_STOP_TOKEN_IDS = 4096
MAX_ALLOWED_TOKEN_IDS = 2**18
"""The largest vocabularies."""
MAX_FIELDS = 256
"""Fields of any object with a fixed set of them."""


def at_most(count: int) -> BeforeValidator:
    """A bound on the length of a list or an object."""
    return BeforeValidator(lambda given: require_at_most(given, count))


def require_at_most(given: Any, count: int) -> Any:
    """The value, or an error if it is a longer list or object."""
    if isinstance(given, list | dict) and len(given) > count:
        raise PydanticCustomError(
            TOO_MANY, "has {given} items, above the {count} allowed", {"given": len(given), "count": count}
        )
    return given
