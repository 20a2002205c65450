"""Records with markup in every string that users or servers supply."""

from __future__ import annotations

from typing import Any

MARKUP = "<script>'\"&</script>"


def hostile(value: Any) -> Any:
    """The same with markup in front of every string; keys stay, since they are the record's own."""
    if isinstance(value, dict):
        return {key: hostile(one) for key, one in value.items()}
    if isinstance(value, list):
        return [hostile(one) for one in value]
    return f"{MARKUP}{value}" if isinstance(value, str) else value
