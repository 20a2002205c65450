"""`eyas serve` with eyas' own engine: load both models into this process."""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from eyas.cli.served_engine import ServedEngine
from eyas.cli.speculative_config import SpeculativeConfig

if TYPE_CHECKING:
    from eyas.engine.config import EngineConfig
    from eyas.target.chat_template import ChatFormat


@contextmanager
def local_engine(
    target: str,
    config: SpeculativeConfig,
    options: "EngineConfig",
    *,
    dtype: str,
    device: str,
    quantization: str,
    revision: str | None,
    chat_format: "ChatFormat",
    cache: Path | None,
    drafter_swap: bool,
    allowed_drafters: Sequence[str],
) -> Iterator[ServedEngine]:
    """Load a target and its drafter and run them for the length of the block."""
    from eyas.drafter.checkpoint import read_config
    from eyas.engine.engine import Engine
    from eyas.loading import load_another, load_pair
    from eyas.serve.drafter_swaps import DrafterSlot
    from eyas.serve.local_engine import LocalEngineClient
    from eyas.target.device import device_words
    from eyas.target.fingerprint import fingerprint

    if config.drafter is not None and config.drafter_method is not None:
        config.require_method(read_config(config.drafter).method)
    loaded, model = load_pair(
        target,
        config.drafter,
        dtype=dtype,
        device=device,
        quantization=quantization,
        cache=cache,
        revision=revision,
        chat_format=chat_format,
    )
    slot = DrafterSlot(
        model=model,
        source=config.drafter,
        load=lambda name: load_another(loaded, name, cache=cache),
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
            device=f"{device_words(loaded.device, asked=device)}, {precision}",
        )
