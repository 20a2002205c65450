"""Recovery after a failed step: drops the running requests, or replaces the engine.

A step works on the running requests, so they are lost. Waiting requests hold nothing and continue, if the scheduler's
integrity check passes. The prefix cache is cleared, because the failed pass may have written anything. If the check
fails, or the next step fails before any token came, the engine is replaced: same target, same drafter, new KV cache.
"""

import logging
import traceback
from collections.abc import Callable, Collection

import torch

from eyas.engine.engine import Engine
from eyas.engine.output import SpecDecodeStats

logger = logging.getLogger(__name__)


class Supervisor:
    """Recovers an engine whose step failed. It runs on the engine's thread."""

    def __init__(self, build: Callable[[], Engine]) -> None:
        self._build = build
        self.failed_steps = 0
        self.replaced = 0
        self.replaced_stats = SpecDecodeStats()
        """The counts of the replaced engines."""
        self._passes_at_failure: int | None = None

    def __call__(self, engine: Engine, error: BaseException) -> tuple[Engine, Collection[int] | None]:
        """The engine to continue with, and the keys of the lost requests; None means all."""
        self.failed_steps += 1
        failed = f"a step failed ({_name(error)})"
        try:
            if self._passes_at_failure == engine.stats.passes:
                raise RuntimeError("it failed again before a token came")
            lost = _drop_running(engine)
        except Exception as second:
            logger.warning(f"{failed}; the engine is replaced, all its requests are lost: {_name(second)}")
            return self._replace(engine, error), None
        self._passes_at_failure = engine.stats.passes
        logger.warning(f"{failed}; its {len(lost)} requests are lost, those that wait go on")
        return engine, lost

    def _replace(self, engine: Engine, error: BaseException) -> Engine:
        add_stats(self.replaced_stats, engine.stats)
        self.replaced += 1
        self._passes_at_failure = None
        # Two engines may not fit in memory. The old one never steps again, so free it first, even if referenced.
        traceback.clear_frames(error.__traceback__)
        vars(engine).clear()
        _release_memory()
        new = self._build()
        logger.warning("the engine was replaced and serves again")
        return new


def _drop_running(engine: Engine) -> list[int]:
    """Cancel the running requests and check that the rest is consistent."""
    lost = [seq.key for seq in engine.scheduler.running]
    for key in lost:
        engine.cancel(key)
    engine.abandon_step()
    engine.block_manager.forget()
    engine.scheduler.check()
    _release_memory()
    return lost


def _release_memory() -> None:
    """Return torch's cached memory: the step may have failed for lack of it."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def _name(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def add_stats(to: SpecDecodeStats, more: SpecDecodeStats) -> None:
    """Add the counts of `more` to `to`."""
    to.passes += more.passes
    to.drafts += more.drafts
    to.drafted += more.drafted
    to.accepted += more.accepted
    to.tokens += more.tokens
    to.suffix_drafted += more.suffix_drafted
    to.suffix_accepted += more.suffix_accepted
    to.accepted_at += [0] * (len(more.accepted_at) - len(to.accepted_at))
    for depth, count in enumerate(more.accepted_at):
        to.accepted_at[depth] += count
