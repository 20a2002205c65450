"""Modes to measure: with and without drafting, per request where the server can, else by a second server."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from eyas.bench.server import ServerInfo
from eyas.errors import UserError

SPECULATIVE, PLAIN, AS_SERVED = "speculative", "plain", "as served"
OFF = {"speculative": {"mode": "off"}}
"""Request fields that turn drafting off in eyas."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A server, with or without drafting."""

    name: str
    """Shown in reports; a plain server used as the baseline has the name of the drafting one."""
    mode: str
    server: ServerInfo
    extra: Mapping[str, Any] = field(default_factory=dict)


def list_variants(
    servers: Sequence[ServerInfo], baselines: Mapping[str, ServerInfo], *, baseline: bool
) -> tuple[Variant, ...]:
    """The modes to measure, each with its plain baseline if there is one."""
    variants: list[Variant] = []
    for server in servers:
        mode = {True: SPECULATIVE, False: PLAIN, None: AS_SERVED}[server.drafts]
        variants.append(Variant(name=server.name, mode=mode, server=server))
        other = baselines.get(server.name)
        if other is not None:
            if mode == PLAIN:
                raise UserError(f"{server.name} does not draft, so it is its own baseline; leave the other one out")
            if other.drafts:
                raise UserError(f"the baseline of {server.name} at {other.address.url} drafts itself; start it without")
            variants.append(Variant(name=server.name, mode=PLAIN, server=other))
        elif baseline and server.kind == "eyas" and server.drafts and server.own_depths:
            variants.append(Variant(name=server.name, mode=PLAIN, server=server, extra=OFF))
    return tuple(variants)
