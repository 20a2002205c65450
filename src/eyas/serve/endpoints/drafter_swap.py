"""Swaps the drafter while serving, on request, for one that the operator allows.

A request never names a path or a hub id of its own: loading reads files, and may download them.
"""

import logging

from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from eyas.drafter.shipped import NO_DRAFTER
from eyas.engine.request import Speculation
from eyas.serve.access.caller import Caller, caller_of
from eyas.serve.access.policy import AccessRules
from eyas.serve.api_error import ApiError, invalid, to_api_error
from eyas.serve.context import ServerContext
from eyas.serve.drafter_swaps import DrafterSwaps
from eyas.serve.monitoring.json_logging import log_event
from eyas.serve.protocol.completions import Count, WireModel
from eyas.serve.protocol.validation import parse_body, read_body

logger = logging.getLogger(__name__)


class DrafterSwapRequest(WireModel):
    """The body of POST /v1/drafter, with the fields of vLLM's speculative config."""

    model: str = Field(min_length=1, description="One of the drafters that the operator allows; none for no drafter.")
    num_speculative_tokens: Count | None = Field(None, description="Without it, as deep as pays.")


class DrafterSwapEndpoint:
    """/v1/drafter."""

    def __init__(self, context: ServerContext, swaps: DrafterSwaps, access: AccessRules) -> None:
        self._context, self._swaps, self._access = context, swaps, access

    async def handle(self, http: HttpRequest) -> Response:
        """GET: the current drafter. POST: swap it, then the new one, and whether it was swapped in place."""
        if http.method != "POST":
            return JSONResponse(self._context.model_info.speculative_card())
        slot = self._swaps.slot
        if not slot.swappable:
            message = f"this server keeps its drafter ({slot.kept_because})"
            raise ApiError(403, message, code="drafter_swap_disabled")
        self._access.require_admin(http.scope)
        body = parse_body(DrafterSwapRequest, await read_body(http, self._context.limits))
        if self._swaps.busy:
            raise ApiError(409, "another drafter is being loaded; try again when it is there", code="busy", retry=1)
        try:
            in_place = await self._swap(body, caller_of(http.scope))
        except Exception as error:
            failure = to_api_error(error)
            if failure.status >= 500:
                logger.error("swapping the drafter failed", exc_info=error)
            raise failure from error
        return JSONResponse(self._context.model_info.speculative_card() | {"in_place": in_place})

    async def _swap(self, body: DrafterSwapRequest, caller: Caller) -> bool:
        """Whether the weights were copied into the drafter in use."""
        model_info, most = self._context.model_info, self._context.engine_client.max_depth
        source, depth = self._swaps.slot.source_of(body.model), body.num_speculative_tokens
        if depth is not None and (source is None or depth > most):
            limit = "there is no drafter" if source is None else f"the most here is {most}"
            raise invalid("num_speculative_tokens", f"num_speculative_tokens is {depth}, but {limit}; change it")
        before = model_info.drafter
        speculation = Speculation() if depth is None else Speculation(mode="fixed", depth=depth)
        in_place = await self._swaps.swap(source, speculation=speculation)
        log_event(
            logger,
            "change",
            level=logging.WARNING,
            what="drafter",
            before=before or NO_DRAFTER,
            after=model_info.drafter or NO_DRAFTER,
            depth=depth,
            in_place=in_place,
            **caller.log_fields,
        )
        return in_place
