"""Another drafter for a server at work: loaded beside it, taken between two steps, or refused with nothing changed."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from eyas.drafter.model import Drafter
from eyas.drafter.shipped import NO_DRAFTER
from eyas.engine.request import Speculation
from eyas.serve.failure import ApiError, failure_of
from eyas.serve.host import Host
from eyas.serve.log import LOGGER, warn
from eyas.serve.metrics import Meters
from eyas.serve.protocol import Count, Wire
from eyas.serve.reading import parse, read_body
from eyas.serve.served import Limits, Served


class DrafterWish(Wire):
    """The body of POST /v1/drafter, in the words of vLLM's speculative config."""

    model: str = Field(min_length=1, description="A drafter's name, folder or hub id; none for no drafter.")
    num_speculative_tokens: Count | None = Field(None, description="Without it, as deep as pays.")


@dataclass(kw_only=True, eq=False)
class Slot:
    """The drafter in use, from which an engine that must be replaced is built anew, and how others are loaded."""

    model: Drafter | None
    load: Callable[[str], Drafter]


class Swapper:
    """The endpoint. One swap at a time."""

    def __init__(self, host: Host, served: Served, limits: Limits, meters: Meters, slot: Slot | None) -> None:
        self._host, self._served, self._limits, self._meters, self._slot = host, served, limits, meters, slot
        self._thread = ThreadPoolExecutor(1, "eyas-load")
        self._turn = asyncio.Lock()
        meters.tell_drafter(served.drafter)

    def card(self) -> dict[str, Any]:
        """What drafts now, and how deep where a request does not say."""
        served = self._served
        return {
            "drafter": served.drafter,
            "mode": served.speculation.mode if served.drafter is not None else "off",
            "depth": served.speculation.depth if served.drafter is not None else None,
        }

    async def answer(self, http: HttpRequest) -> Response:
        """Tell what drafts now; with POST, after a swap."""
        if http.method != "POST":
            return JSONResponse(self.card())
        raw = await read_body(http, most_bytes=self._limits.body_bytes, seconds=self._limits.body_seconds)
        wish = parse(DrafterWish, raw)
        if self._slot is None:
            raise ApiError(400, "this server was started without a way to load drafters; restart it with one")
        if self._turn.locked():
            raise ApiError(409, "another drafter is being loaded; try again when it is there", code="busy", retry=1)
        async with self._turn:
            try:
                await self._swap(wish, self._slot)
            except Exception as error:
                failure = failure_of(error)
                if failure.status >= 500:
                    LOGGER.error("swap", exc_info=error)
                raise failure from error
        return JSONResponse(self.card())

    async def _swap(self, wish: DrafterWish, slot: Slot) -> None:
        model = None
        if wish.model != NO_DRAFTER:
            model = await asyncio.get_running_loop().run_in_executor(self._thread, slot.load, wish.model)
        depth = wish.num_speculative_tokens
        most = self._host.max_depth
        if depth is not None and (model is None or depth > most):
            limit = "there is no drafter" if model is None else f"the most here is {most}"
            raise ApiError(
                400, f"num_speculative_tokens is {depth}, but {limit}; change it", field="num_speculative_tokens"
            )
        await self._host.swap_drafter(model)
        # From here on nothing fails: what is told, what is drafted and what an engine is rebuilt from agree.
        slot.model = model
        self._served.drafter = None if model is None else Path(wish.model).name
        self._served.speculation = Speculation() if depth is None else Speculation(mode="fixed", depth=depth)
        self._meters.tell_drafter(self._served.drafter)
        self._meters.swaps.inc()
        warn(f"the drafter is {self._served.drafter or NO_DRAFTER} now")
