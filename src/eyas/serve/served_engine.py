"""An engine that is ready behind the server's routes, and eyas' own one, loaded into this process."""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from eyas.drafter.checkpoint import read_config
from eyas.engine.config import EngineConfig
from eyas.engine.engine import Engine
from eyas.loading import load_another, load_pair
from eyas.plan.memory import BlockBudget
from eyas.serve.drafter_swaps import DrafterSlot
from eyas.serve.engine_client import EngineClient
from eyas.serve.local_engine import LocalEngineClient
from eyas.serve.speculative_config import SpeculativeConfig
from eyas.target.device import device_words
from eyas.target.parts import fingerprint


@dataclass(frozen=True, kw_only=True, eq=False)
class ServedEngine:
    """An engine, ready to answer."""

    client: EngineClient
    slot: DrafterSlot
    generation: GenerationConfig | None
    """The model's generation config."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Fields of `ModelInfo` that the engine decides."""
    author: Callable[[], dict[str, str]]
    """The target by name and, if they can be seen, by its weights, for records of answers."""
    memory: BlockBudget | str
    device: str
    """Device and precision, for people."""


@contextmanager
def local_engine(
    target: str,
    config: SpeculativeConfig,
    options: EngineConfig,
    *,
    placement: Mapping[str, Any],
    drafter_swap: bool,
    allowed_drafters: Sequence[str],
) -> Iterator[ServedEngine]:
    """Load a target and its drafter and run them for the length of the block; `placement` is for `load_pair`."""
    if config.drafter is not None and config.drafter_method is not None:
        config.require_method(read_config(config.drafter).method)
    loaded, model = load_pair(target, config.drafter, **placement)
    slot = DrafterSlot(
        model=model,
        source=config.drafter,
        load=lambda name: load_another(loaded, name, cache=placement["cache"]),
        swappable=drafter_swap,
        allowed=[*([] if config.drafter is None else [config.drafter]), *allowed_drafters],
    )
    del model  # so that a swap frees it

    with LocalEngineClient(lambda: Engine(loaded, slot.model, config=options)) as client:
        # What is loaded by now stays: a collector that went through all of it would hold up a step for 0.2 s.
        gc.collect()
        gc.freeze()
        precision = str(loaded.dtype).removeprefix("torch.")
        if loaded.quantization != "none":
            precision += f", weights {loaded.quantization}"
        yield ServedEngine(
            client=client,
            slot=slot,
            generation=loaded.generation_config,
            facts={
                "drafter": None if config.drafter is None else Path(config.drafter).name,
                "max_model_len": client.budget.max_model_len,
                "quantization": loaded.quantization,
                "drafter_quantization": None if slot.model is None else slot.model.quantization,
                "speculation": config.speculation,
                "suffix_depth": 0 if options.suffix is None else options.suffix.deepest,
            },
            author=lambda: {"target": loaded.facts.source, "target_fingerprint": fingerprint(loaded.model)},
            memory=client.budget,
            device=f"{device_words(loaded.device, asked=placement['device'])}, {precision}",
        )
