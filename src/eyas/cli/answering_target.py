"""A target that answers for `eyas data`: an engine on this machine, or servers elsewhere."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from eyas.cli.engine_answerer import OwnEngine
from eyas.cli.options import SEQS_ELSEWHERE, SEQS_ON_CPU, SEQS_PER_SERVER
from eyas.cli.server_answerer import Servers
from eyas.remote.server_pool import RetryPolicy
from eyas.target.chat_template import ChatFormat
from eyas.target.locate import DEFAULT_TARGET


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Servers that answer in place of this machine, if there are any, and how they are asked."""

    urls: Sequence[str]
    model: str | None
    api_key: str | None
    timeout: float
    patience: float


@contextmanager
def answering_target(
    target: str | None,
    drafter: str | None,
    servers: ServerOptions,
    *,
    own: Mapping[str, str],
    slots: int | None,
    total: int,
    cache: Path | None,
    chat_format: ChatFormat,
) -> Iterator[tuple[OwnEngine | Servers, int]]:
    """Load it, or connect to it; how many of the `total` answers run at the same time comes with it.

    `own` are the options of a target on this machine, as they were given.
    """
    if not servers.urls:
        engine = OwnEngine.load(
            target or DEFAULT_TARGET,
            drafter,
            dtype=own["dtype"],
            device=own["device"],
            quantization=own["quantization"],
            kv_cache_dtype=own["kv_cache_dtype"],
            cache=cache,
            chat_format=chat_format,
        )
        yield engine, min(slots or (SEQS_ON_CPU if engine.on_cpu else SEQS_ELSEWHERE), total)
        return
    retry = RetryPolicy(timeout=servers.timeout, patience=servers.patience)
    seqs = min(slots or SEQS_PER_SERVER * len(servers.urls), total)
    connect = Servers.connect(servers.urls, model=servers.model, api_key=servers.api_key, retry=retry, slots=seqs)
    with connect as connected:
        connected.load(target, cache=cache, chat_format=chat_format)
        yield connected, seqs
