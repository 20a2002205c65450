"""Loads the target of a training run, on the device of its process."""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from eyas.loading import load_target
from eyas.target.model import Target, loads_onto_device
from eyas.target.parts import TargetParts
from eyas.train.features import OpenSource
from eyas.train.preflight import layers_read
from eyas.train.ranks import Ranks
from eyas.train.recipe import Recipe
from eyas.train.served.open import open_served, states_server
from eyas.train.sources.live import LiveSource

logger = logging.getLogger(__name__)


@contextmanager
def open_training_target(
    recipe: Recipe, ranks: Ranks, stop: Callable[[], bool], cache: Path | None
) -> Iterator[tuple[TargetParts, OpenSource, Callable[[], dict[str, Any]]]]:
    """Yield the parts of the target that training needs, a source of its states, and what a record says of that."""
    if not recipe.features.servers:
        target = load_training_target(recipe, ranks, cache)
        yield TargetParts.of(target), partial(LiveSource, target, chunk=recipe.train.chunk), dict
        return
    parts = TargetParts.load(
        recipe.target.source,
        dtype=recipe.target.dtype,
        device=choose_training_device(recipe.target.device),
        cache=cache,
        chat_format=recipe.target.chat_format(),
    )
    layer_ids = layers_read(recipe, parts.facts)
    with open_served(recipe, parts, layer_ids, ranks=ranks, stop=stop) as open_source:
        line = states_server(recipe, layer_ids, parts.facts.num_hidden_layers, cache).line()
        logger.info(f"states come from {', '.join(recipe.features.servers)}; such a server is started by: {line}")
        yield parts, open_source, open_source.record


def load_training_target(recipe: Recipe, ranks: Ranks, cache: Path | None) -> Target:
    """Load the target; where weights pass through the host's memory, one process of a machine after the other."""
    told = recipe.target
    device = choose_training_device(told.device)
    place = partial(Target.load, spread=told.spread) if told.quantization == "none" else load_target
    load = partial(
        place,
        told.source,
        dtype=told.dtype,
        device=device,
        quantization=told.quantization,
        cache=cache,
        chat_format=told.chat_format(),
    )
    if ranks.world == 1 or device == "cpu" or loads_onto_device():
        return load()
    logger.info(
        "accelerate is not installed: the processes load the target one after another, through the host's memory"
    )
    loaded = None
    for turn in range(int(os.environ.get("LOCAL_WORLD_SIZE", str(ranks.world)))):
        if turn == int(os.environ.get("LOCAL_RANK", "0")):
            loaded = load()
        ranks.barrier()
    assert loaded is not None
    return loaded


def choose_training_device(asked: str) -> str:
    """Resolve auto to this process's own GPU, or the CPU."""
    if asked != "auto":
        return asked
    if not torch.cuda.is_available():
        return "cpu"
    local = int(os.environ.get("LOCAL_RANK", "0"))
    torch.cuda.set_device(local)
    return f"cuda:{local}"
