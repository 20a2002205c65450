"""Swaps the drafter while serving: loads another in a thread and switches between two steps, or changes nothing.

Requests of an administrator and the learner both use `DrafterSwaps`. Swaps run one at a time; afterwards the engine,
the status and the slot for an engine that must be rebuilt agree.
"""

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import EllipsisType

from eyas.drafter.model import Drafter
from eyas.drafter.shipped import NO_DRAFTER, SHIPPED
from eyas.engine.request import Speculation
from eyas.errors import UserError
from eyas.serve.api_error import ApiError
from eyas.serve.engine_client import EngineClient
from eyas.serve.model_info import ModelInfo
from eyas.serve.monitoring.drafter_changes import ChangeKind, DrafterChanges
from eyas.serve.monitoring.metrics import ServerMetrics
from eyas.serve.protocol.validation import shortened


@dataclass(kw_only=True, eq=False)
class DrafterSlot:
    """The drafter in use, for an engine that must be rebuilt, and the function that loads another."""

    model: Drafter | None
    load: Callable[[str], Drafter]
    source: str | None = None
    """The name, folder or hub id that the drafter in use was loaded from."""
    swappable: bool = True
    """Whether requests may ask for another drafter at all."""
    kept_because: str = "--no-drafter-swap"
    """The reason, if they may not."""
    allowed: Iterable[str] = ()
    """Names, folders and hub ids that a request may ask for, beside `none` and those that come with eyas.

    A request may also name a folder by its last part, as answers do.
    """

    def source_of(self, name: str) -> str | None:
        """The source to load for a name in a request; None for no drafter."""
        if name == NO_DRAFTER:
            return None
        given = [*self.allowed, *SHIPPED]
        source = next((one for one in given if name in (one, Path(one).name)), None)
        if source is None:
            names = ", ".join([*dict.fromkeys(Path(one).name for one in given), NO_DRAFTER])
            message = f"model is {shortened(name)}, which the operator does not allow; use one of {names}"
            raise ApiError(403, message, field="model", code="drafter_not_allowed")
        return source


class DrafterChangedError(UserError):
    """The drafter in use is not the one that was to be replaced."""


class DrafterSwaps:
    """Changes the drafter, one change at a time."""

    def __init__(
        self,
        engine_client: EngineClient,
        model_info: ModelInfo,
        metrics: ServerMetrics,
        changes: DrafterChanges,
        slot: DrafterSlot,
    ) -> None:
        self.slot, self.changes = slot, changes
        self._engine_client, self._model_info, self._metrics = engine_client, model_info, metrics
        self._thread = ThreadPoolExecutor(1, "eyas-load")
        self._lock = asyncio.Lock()
        metrics.set_drafter(model_info.drafter)

    @property
    def busy(self) -> bool:
        """Whether another drafter is being loaded."""
        return self._lock.locked()

    async def swap(
        self,
        source: str | None,
        *,
        name: str | None = None,
        speculation: Speculation | None = None,
        only_in_place: bool = False,
        kind: ChangeKind = "swap",
        reason: str | None = None,
        instead_of: str | EllipsisType | None = ...,
    ) -> bool:
        """Load a drafter, or none, and use it. Returns whether its weights were copied into the previous one.

        `name` is what clients see. `speculation` becomes the default for requests that do not say how they are drafted
        for. With `only_in_place` a drafter of another shape is refused. `kind` and `reason` go into the changes.
        `instead_of` is the source of the only drafter that may be replaced: a swap in between makes this one fail.
        """
        async with self._lock:
            if instead_of is not ... and self.slot.source != instead_of:
                raise DrafterChangedError("another drafter was chosen meanwhile, and that one stays")
            model = None
            if source is not None:
                model = await asyncio.get_running_loop().run_in_executor(self._thread, self.slot.load, source)
            in_place = await self._engine_client.swap_drafter(model, only_in_place=only_in_place)
            # Nothing below can fail, so status, engine and slot agree.
            if not in_place:
                self.slot.model = model
            self.slot.source, model_info = source, self._model_info
            model_info.drafter = name or (None if source is None else Path(source).name)
            model_info.drafter_quantization = None if model is None else model.quantization
            model_info.speculation = speculation or model_info.speculation
            self._metrics.set_drafter(model_info.drafter)
            self._metrics.swaps.inc()
            self.changes.note(model_info.drafter, kind, reason)
            return in_place
