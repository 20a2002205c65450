"""After a failed step: drop what took part in it, or begin with a new engine.

A step works on the running requests, so these are lost. Those that wait own nothing and go on, provided that the books
still balance; what the prefix cache holds is forgotten, since nobody knows what the failed pass wrote. If the books do
not balance, or the next step fails as well before a single token came, the engine is replaced: same target, same
drafter, new pages. Either way it is said.
"""

import logging
import traceback
from collections.abc import Callable, Collection

import torch

from eyas.engine.engine import Engine
from eyas.engine.output import SpecDecodeStats

logger = logging.getLogger(__name__)


class Supervisor:
    """Decides what becomes of an engine whose step failed. It runs on the engine's thread."""

    def __init__(self, build: Callable[[], Engine]) -> None:
        self._build = build
        self.failed_steps = 0
        self.replaced = 0
        """Engines so far that were given up."""
        self.replaced_stats = SpecDecodeStats()
        """What those had counted."""
        self._passes_at_failure: int | None = None

    def __call__(self, engine: Engine, error: BaseException) -> tuple[Engine, Collection[int] | None]:
        """An engine to go on with and the requests that were lost, None for all."""
        self.failed_steps += 1
        failed = f"a step failed ({_name(error)})"
        try:
            if self._passes_at_failure == engine.tally.passes:
                raise RuntimeError("it failed again before a token came")
            lost = _drop_running(engine)
        except Exception as second:
            logger.warning(f"{failed}; the engine is replaced, all its requests are lost: {_name(second)}")
            return self._replace(engine, error), None
        self._passes_at_failure = engine.tally.passes
        logger.warning(f"{failed}; its {len(lost)} requests are lost, those that wait go on")
        return engine, lost

    def _replace(self, engine: Engine, error: BaseException) -> Engine:
        add_stats(self.replaced_stats, engine.tally)
        self.replaced += 1
        self._passes_at_failure = None
        # Two engines may not fit. Nobody steps the old one again, so its pages go first, wherever it is still named.
        traceback.clear_frames(error.__traceback__)
        vars(engine).clear()
        _release_memory()
        new = self._build()
        logger.warning("the engine was replaced and serves again")
        return new


def _drop_running(engine: Engine) -> list[int]:
    """Cancel the running requests and see that the rest is in order."""
    lost = [seq.key for seq in engine.scheduler.running]
    for key in lost:
        engine.cancel(key)
    engine.pool.forget()
    engine.scheduler.check()
    _release_memory()
    return lost


def _release_memory() -> None:
    """If memory had run out, what torch keeps for later may be what is missing."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def _name(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def add_stats(to: SpecDecodeStats, more: SpecDecodeStats) -> None:
    """Count what another one counted."""
    to.passes += more.passes
    to.drafts += more.drafts
    to.drafted += more.drafted
    to.accepted += more.accepted
    to.tokens += more.tokens
    to.accepted_at += [0] * (len(more.accepted_at) - len(to.accepted_at))
    for depth, count in enumerate(more.accepted_at):
        to.accepted_at[depth] += count
