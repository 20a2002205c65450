"""Opens the source of served states for a recipe: files, clients and fetcher of this process, and their cleanup."""

import hashlib
import logging
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from eyas.errors import UserError
from eyas.target.locate import locate
from eyas.target.parts import TargetParts
from eyas.train.features import FeatureSource
from eyas.train.ranks import Ranks
from eyas.train.recipe import Recipe
from eyas.train.served.client import StateFiles, StatesClient
from eyas.train.served.command import StatesServer, captured_layers, require_servable
from eyas.train.served.fetcher import StateFetcher
from eyas.train.sources.served import ServedSource

logger = logging.getLogger(__name__)


class OpenServed:
    """Opens sources that share one fetcher."""

    def __init__(self, fetcher: StateFetcher, target: TargetParts, captured: Sequence[int], *, chunk: int) -> None:
        self._fetcher, self._target, self._captured, self._chunk = fetcher, target, captured, chunk

    def __call__(self, aux_layer_ids: Sequence[int], *, compiled: bool) -> FeatureSource:
        return ServedSource(
            self._fetcher, self._target, self._captured, aux_layer_ids, compiled=compiled, chunk=self._chunk
        )

    def record(self) -> dict[str, object]:
        """Statistics for the run's record."""
        return asdict(self._fetcher.counts)


def states_server(recipe: Recipe, layer_ids: Sequence[int], num_hidden_layers: int, cache: Path | None) -> StatesServer:
    """Command of the server that a recipe needs."""
    features = recipe.features
    place = locate(recipe.target.source, cache=cache)
    return StatesServer(
        model=place,
        layer_ids=tuple(layer_ids),
        num_hidden_layers=num_hidden_layers,
        folder=Path(features.states_folder),
        max_length=longest_document(recipe),
        dtype=recipe.target.dtype,
    )


def longest_document(recipe: Recipe) -> int:
    """Maximum tokens of a request to a server."""
    return max(recipe.data.max_length, recipe.data.join_length if recipe.data.join_share else 0)


@contextmanager
def open_served(
    recipe: Recipe,
    target: TargetParts,
    layer_ids: Sequence[int],
    *,
    ranks: Ranks,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[OpenServed]:
    """Fetch from the recipe's servers until the block ends; then remove files that are left."""
    require_servable(target.config, target.facts)
    if target.norm is None:
        raise UserError(
            f"{target.facts.source} ({target.facts.model_type}) keeps its last norm where it is not looked for, and "
            'served states need it; use features.source = "live"'
        )
    features, captured = recipe.features, captured_layers(layer_ids, target.facts.num_hidden_layers)
    files = StateFiles(
        folder=Path(features.states_folder),
        prefix=_prefix(recipe, ranks),
        captured=captured,
        hidden_size=target.facts.hidden_size,
    )
    if (freed := files.sweep()) > 0:
        logger.info(f"removed {freed / 1e6:.1f} MB of states that an earlier run left in {files.folder}")
    clients = [StatesClient(url, target, files, longest=longest_document(recipe)) for url in features.servers]
    fetcher = StateFetcher(
        clients,
        bytes_per_token=len(captured) * target.facts.hidden_size * target.dtype.itemsize,
        ahead_bytes=int(features.ahead_gb * 1e9),
        in_flight=features.in_flight,
        stop=stop,
    )
    try:
        yield OpenServed(fetcher, target, captured, chunk=recipe.train.chunk)
    finally:
        fetcher.close()
        files.sweep()
        counts = fetcher.counts
        if counts.documents:
            logger.info(
                f"{counts.documents:,} documents were requested, {counts.failed:,} of them failed, {counts.retried:,} "
                f"requests were repeated; training waited {counts.waited_seconds:.1f} s for them"
            )


def _prefix(recipe: Recipe, ranks: Ranks) -> str:
    """Prefix of this process's files: unique, but the same when the run is resumed."""
    run = f"{socket.gethostname()}:{Path(recipe.output.folder).absolute()}"
    return f"eyas-{hashlib.sha256(run.encode()).hexdigest()[:12]}-{ranks.rank}"
