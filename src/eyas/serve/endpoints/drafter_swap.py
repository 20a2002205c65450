"""Swap the drafter while serving: load it in a thread, switch between two steps, or refuse and change nothing.

A request chooses among the drafters that the operator allows. It never names a path or a hub id of its own: loading
reads files, and may download them.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from eyas.drafter.model import Drafter
from eyas.drafter.shipped import NO_DRAFTER, SHIPPED
from eyas.engine.request import Speculation
from eyas.serve.access.caller import Caller, caller_of
from eyas.serve.access.policy import AccessRules
from eyas.serve.api_error import ApiError, to_api_error
from eyas.serve.context import ServerContext
from eyas.serve.monitoring.json_logging import log_event
from eyas.serve.protocol.completions import Count, WireModel
from eyas.serve.protocol.validation import parse_body, read_body, shortened

logger = logging.getLogger(__name__)


class DrafterSwapRequest(WireModel):
    """The body of POST /v1/drafter, with the fields of vLLM's speculative config."""

    model: str = Field(min_length=1, description="One of the drafters that the operator allows; none for no drafter.")
    num_speculative_tokens: Count | None = Field(None, description="Without it, as deep as pays.")


@dataclass(kw_only=True, eq=False)
class DrafterSlot:
    """The drafter in use, for an engine that must be rebuilt, and the function that loads another."""

    model: Drafter | None
    load: Callable[[str], Drafter]
    swappable: bool = True
    """Whether requests may ask for another one at all."""
    kept_because: str = "--no-drafter-swap"
    """Why not, if they may not."""
    allowed: Iterable[str] = ()
    """Names, folders and hub ids that a request may ask for, beside those that come with eyas and none.

    A request may also call a folder by its last part, as answers do.
    """

    def source(self, name: str) -> str | None:
        """What to load for a name in a request; None for no drafter."""
        if name == NO_DRAFTER:
            return None
        given = [*self.allowed, *SHIPPED]
        source = next((one for one in given if name in (one, Path(one).name)), None)
        if source is None:
            names = ", ".join([*dict.fromkeys(Path(one).name for one in given), NO_DRAFTER])
            message = f"model is {shortened(name)}, which the operator does not allow; use one of {names}"
            raise ApiError(403, message, field="model", code="drafter_not_allowed")
        return source


class DrafterSwapEndpoint:
    """/v1/drafter. One swap at a time."""

    def __init__(self, context: ServerContext, slot: DrafterSlot, access: AccessRules) -> None:
        self._context, self._slot, self._access = context, slot, access
        self._thread = ThreadPoolExecutor(1, "eyas-load")
        self._swap_lock = asyncio.Lock()
        context.metrics.set_drafter(context.model_info.drafter)

    async def handle(self, http: HttpRequest) -> Response:
        """GET: the current drafter. POST: swap it, then the same, and which way that went."""
        if http.method != "POST":
            return JSONResponse(self._context.model_info.speculative_card())
        if not self._slot.swappable:
            message = f"this server keeps its drafter ({self._slot.kept_because})"
            raise ApiError(403, message, code="drafter_swap_disabled")
        self._access.require_admin(http.scope)
        limits = self._context.limits
        raw = await read_body(http, max_bytes=limits.body_bytes, seconds=limits.body_seconds)
        body = parse_body(DrafterSwapRequest, raw)
        if self._swap_lock.locked():
            raise ApiError(409, "another drafter is being loaded; try again when it is there", code="busy", retry=1)
        async with self._swap_lock:
            try:
                in_place = await self._swap(body, caller_of(http.scope))
            except Exception as error:
                failure = to_api_error(error)
                if failure.status >= 500:
                    logger.error("swapping the drafter failed", exc_info=error)
                raise failure from error
        return JSONResponse(self._context.model_info.speculative_card() | {"in_place": in_place})

    async def _swap(self, body: DrafterSwapRequest, caller: Caller) -> bool:
        """Whether weights were copied into the drafter that serves."""
        engine_client, model_info = self._context.engine_client, self._context.model_info
        source, model = self._slot.source(body.model), None
        if source is not None:
            model = await asyncio.get_running_loop().run_in_executor(self._thread, self._slot.load, source)
        depth = body.num_speculative_tokens
        most = engine_client.max_depth
        if depth is not None and (model is None or depth > most):
            limit = "there is no drafter" if model is None else f"the most here is {most}"
            raise ApiError(
                400, f"num_speculative_tokens is {depth}, but {limit}; change it", field="num_speculative_tokens"
            )
        in_place = await engine_client.swap_drafter(model)
        # Nothing below can fail, so status, engine and the slot for a rebuild agree.
        if not in_place:
            self._slot.model = model
        before, model_info.drafter = model_info.drafter, None if source is None else Path(source).name
        model_info.drafter_quantization = None if model is None else model.quantization
        model_info.speculation = Speculation() if depth is None else Speculation(mode="fixed", depth=depth)
        self._context.metrics.set_drafter(model_info.drafter)
        self._context.metrics.swaps.inc()
        self._context.drafter_changes.note(model_info.drafter)
        log_event(
            logger,
            "change",
            level=logging.WARNING,
            what="drafter",
            before=before or NO_DRAFTER,
            after=model_info.drafter or NO_DRAFTER,
            depth=depth,
            in_place=in_place,
            client=caller.address,
            key=caller.fingerprint,
        )
        return in_place
