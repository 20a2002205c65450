"""vLLM behind the server's routes: checks the drafter, writes the options as vLLM takes them, starts and runs it."""

import asyncio
import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from eyas.drafter.check import check
from eyas.drafter.checkpoint import find_folder, vllm_folder
from eyas.engine.request import Speculation
from eyas.errors import UserError
from eyas.plan.depth_table import DepthTable
from eyas.serve.drafter_swaps import DrafterSlot
from eyas.serve.served_engine import ServedEngine
from eyas.serve.speculative_config import SpeculativeConfig
from eyas.serve.vllm.client import VLLMEngineClient
from eyas.serve.vllm.command import ServeOptions
from eyas.serve.vllm.process import VLLMProcess, require_started
from eyas.serve.vllm.version import CPU_BUILD
from eyas.target.chat_template import ChatFormat
from eyas.target.facts import read_embedding, read_facts
from eyas.target.locate import locate, user_cache
from eyas.target.text import ServedTarget

logger = logging.getLogger(__name__)
LONGEST = 8192
"""Default of tokens of prompt and answer, as with eyas' own engine."""
USUAL_DEPTH = 3
"""Depth where neither a number nor a table was given: vLLM measures no costs, so there is no auto."""
START_SECONDS = 3600.0
"""For vLLM to load; one that ends earlier is noticed at once."""


def vllm_options(
    target: str,
    config: SpeculativeConfig,
    *,
    cache: Path | None,
    max_model_len: int | None,
    revision: str | None,
    drafter_out: Path | None = None,
    **others: Any,
) -> ServeOptions:
    """Make options for vLLM: the target as a folder or hub id, the drafter checked and in vLLM's format."""
    facts = read_facts(target, cache=cache, revision=revision)
    place = locate(target, cache=cache)
    speculative: dict[str, Any] | None = None
    if config.drafter is not None:
        embedding = partial(read_embedding, target, cache=cache)
        checked = check(config.drafter, target=facts, target_embedding=embedding)
        found, method = checked.findings, checked.config.method
        config.require_method(method)
        faults = [one.message for one in found if one.severity == "error"]
        if faults:
            more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
            raise UserError(f"`eyas check {config.drafter} --target {target}` refuses this pair: {faults[0]}{more}")
        for one in found:
            if one.severity == "warning":
                logger.info(f"warning   {one.message}")
        folder = vllm_folder(config.drafter, cache or user_cache(), drafter_out)
        if folder != find_folder(config.drafter).resolve():
            logger.info(f"drafter   written for vLLM: {folder}")
        depths = _depths(config)
        if depths is None:
            speculative = {"model": str(folder), "method": method, "num_speculative_tokens": config.depth}
        elif (deepest := max(depth for _, _, depth in depths)) > 0:
            speculative = {"model": str(folder), "method": method, "num_speculative_tokens": deepest}
            if len(depths) > 1:  # one depth for all sizes needs no table, which costs vLLM its full CUDA graphs
                speculative["num_speculative_tokens_per_batch_size"] = [list(row) for row in depths]
        else:
            logger.info("drafting  none: the table of depths has 0 for every batch size")
    most = facts.max_position_embeddings or LONGEST
    return ServeOptions(
        model=str(Path(place).resolve()) if Path(place).is_dir() else place,
        revision=revision,
        max_model_len=max_model_len or min(most, LONGEST),
        speculative_config=speculative,
        **others,
    )


def _depths(config: SpeculativeConfig) -> DepthTable | None:
    """The table of depths; None where one number was given."""
    if config.depth is not None and config.table is None:
        return None
    if config.table is None:
        logger.info(
            f"drafting  {USUAL_DEPTH} deep at every batch size: vLLM has no auto; give num_speculative_tokens, or a "
            "table by --depths"
        )
        return ((1, 1, USUAL_DEPTH),)
    return config.table


def served_speculation(options: ServeOptions) -> Speculation | None:
    """How vLLM drafts for every request; auto is its table."""
    told = options.speculative_config
    if told is None:
        return None
    if "num_speculative_tokens_per_batch_size" in told:
        return Speculation()
    return Speculation(mode="fixed", depth=told["num_speculative_tokens"])


@contextmanager
def vllm_engine(
    target: str,
    options: ServeOptions,
    drafter: str | None,
    *,
    installed: tuple[str, str],
    revision: str | None,
    chat_format: ChatFormat,
    cache: Path | None,
) -> Iterator[ServedEngine]:
    """Run vLLM for the length of the block; `installed` is an interpreter and the version of vLLM that it has."""

    interpreter, version = installed
    text = ServedTarget.load(target, cache=cache, revision=revision, chat_format=chat_format)
    with tempfile.NamedTemporaryFile(prefix="eyas-vllm-", suffix=".log", delete=False) as file:
        log = Path(file.name)
    speculation = served_speculation(options)

    def start() -> VLLMProcess:
        return VLLMProcess(interpreter, options.seam_words, log)

    logger.info(f"vllm      {version}, its log: {log}")
    process = start()
    try:
        require_started(process, START_SECONDS, logger.info)
    except BaseException:
        process.stop()
        raise
    client = VLLMEngineClient(
        process,
        start,
        target=text,
        model=options.name,
        speculation=speculation,
        max_depth=(options.speculative_config or {}).get("num_speculative_tokens", 0),
        start_seconds=START_SECONDS,
        on_cpu=CPU_BUILD in version,
    )
    with client:
        try:
            asyncio.run(client.try_out())
        except Exception as error:
            raise UserError(f"vLLM started, and a trial request failed ({error}); its log: {log}") from error
        snapshot = asyncio.run(client.snapshot())
        tokens = snapshot.blocks * snapshot.block_size
        yield ServedEngine(
            client=client,
            slot=DrafterSlot(model=None, load=_refuse, swappable=False, kept_because="vLLM cannot change it"),
            generation=text.generation_config,
            facts={
                "max_model_len": options.max_model_len,
                "quantization": "as stored" if options.quantization == "auto" else options.quantization,
                "drafter": None if speculation is None else drafter and Path(drafter).name,
                "speculation": speculation or Speculation(),
                "engine": f"vLLM {version}",
                "own_depths": False,
            },
            author=lambda: {"target": text.facts.source},
            memory=f"{snapshot.blocks:,} blocks of {snapshot.block_size} tokens in vLLM, {tokens:,} in all",
            device=f"vLLM's choice, {options.dtype}",
        )
    if client.failure is None:
        log.unlink(missing_ok=True)


def _refuse(name: str) -> Any:
    raise UserError(f"{name}: vLLM keeps its drafter")
