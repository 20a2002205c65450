"""Identifies a server by asking it: model, kind, and whether it drafts."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from eyas.bench.client import Client, ServerGoneError
from eyas.errors import UserError
from eyas.remote.address import Address, read_model_card

KINDS = ("eyas", "vllm", "sglang")


@dataclass(frozen=True, kw_only=True)
class ServerInfo:
    """A server that answered."""

    name: str
    address: Address
    model: str
    kind: str
    card: Mapping[str, Any]
    """The model's entry in /v1/models."""
    version: str | None
    drafts: bool | None
    """None where the server does not report it."""
    own_depths: bool = True
    """Whether requests to eyas may turn drafting off."""
    command: str | None = None
    """Command line, if the bench started it."""


async def identify(
    name: str, address: Address, *, model: str | None, timeout: float, command: str | None = None
) -> ServerInfo:
    """Identify a server; raises if it is not OpenAI-compatible or does not serve the model."""
    async with Client(address, timeout=timeout) as client:
        try:
            card = read_model_card(await client.get("/v1/models"), address, model)
            version = _version(await client.get("/version"))
            counters = await client.counters()
        except ServerGoneError as error:
            raise UserError(f"no server at {address.url}: {error}; start it, or check the address") from error
    kind = str(card.get("owned_by"))
    drafts: bool | None = None
    own_depths = True
    if kind == "eyas":
        speculative = card.get("speculative") or {}
        drafts = bool(speculative.get("drafter") or speculative.get("suffix"))
        own_depths = speculative.get("per_request", True)
    elif counters is not None and counters.generated is not None:
        drafts = counters.draft_counts is not None
    return ServerInfo(
        name=name,
        address=address,
        model=str(card["id"]),
        kind=kind if kind in KINDS else "other",
        card=card,
        version=version,
        drafts=drafts,
        own_depths=own_depths,
        command=command,
    )


def _version(reply: tuple[int, bytes]) -> str | None:
    try:
        return str(json.loads(reply[1])["version"]) if reply[0] == 200 else None
    except (ValueError, KeyError, TypeError):
        return None
