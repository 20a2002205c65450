"""Address of a server, its model, and its error messages."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from eyas.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Address:
    """URL and API key of a server."""

    url: str
    api_key: str | None = field(default=None, repr=False)

    @classmethod
    def of(cls, url: str, *, api_key: str | None = None) -> "Address":
        """Parse a URL, with or without /v1."""
        plain = url.rstrip("/").removesuffix("/v1").rstrip("/")
        if not plain.startswith(("http://", "https://")):
            raise UserError(f"{url!r} is no address of a server; give one such as http://127.0.0.1:8000")
        if "@" in plain:
            raise UserError("an address with a password in it would end up in the record; give --api-key instead")
        return cls(url=plain, api_key=api_key)

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.api_key is None else {"authorization": f"Bearer {self.api_key}"}


def read_model_card(reply: tuple[int, bytes], address: Address, model: str | None) -> Mapping[str, Any]:
    """The entry of `model`, or of the only model, in a reply of `/v1/models`; raises if there is none."""
    status, body = reply
    if status in (401, 403):
        raise UserError(f"{address.url} lets only holders of a key in ({status}); give --api-key")
    try:
        listed = json.loads(body)["data"] if status == 200 else None
        cards: dict[str, dict[str, Any]] = {str(card["id"]): dict(card) for card in listed or ()}
    except (ValueError, KeyError, TypeError):
        cards = {}
    if not cards:
        start = " ".join(body[:80].decode("utf-8", "replace").split())
        raise UserError(
            f"{address.url} is no OpenAI-compatible server: /v1/models answered {status} {start!r}; check the address"
        )
    if model is None:
        if len(cards) > 1:
            raise UserError(f"{address.url} serves {', '.join(cards)}; choose one with --model")
        return next(iter(cards.values()))
    if model not in cards:
        raise UserError(f"{address.url} does not serve {model!r}; give --model {' or '.join(cards)}, or leave it out")
    return cards[model]


def error_message(body: object) -> str:
    """The message of an error reply, given as bytes or parsed, in one line."""
    if isinstance(body, bytes):
        text = body.decode("utf-8", "replace")
        try:
            body = json.loads(text)
        except ValueError:
            body = text
    if isinstance(body, dict):
        body = body.get("error") or body
    if isinstance(body, dict):
        body = body.get("message") or body.get("detail") or body
    return " ".join(str(body).split())[:300]
