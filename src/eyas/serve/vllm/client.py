"""An `EngineClient` that sends token ids to its own vLLM process and reads token ids back.

Token ids instead of a proxy for vLLM's OpenAI routes: templates, parsers, limits, formats and refusals have one
implementation, so both engines behave alike towards clients. It costs one more event per step and answer in this
process; `eyas export vllm-command` gives the command line to run vLLM alone.

A request that ends here for any reason closes its connection, and vLLM then drops it.
"""

import asyncio
import itertools
import json
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import aiohttp

from eyas.drafter.model import Drafter
from eyas.engine.async_engine import EngineError
from eyas.engine.output import OutputProcessor, SpecDecodeStats
from eyas.engine.request import Request, Speculation
from eyas.sampling import Sampling
from eyas.serve.api_error import ApiError
from eyas.serve.engine_client import SNAPSHOT_SECONDS, EngineSnapshot, OnOutput, run_all
from eyas.serve.supervisor import add_stats
from eyas.serve.vllm.answers import AnswerStream, Json, events_of
from eyas.serve.vllm.counters import read_snapshot
from eyas.serve.vllm.process import VLLMProcess
from eyas.serve.vllm.request_body import generate_body
from eyas.serve.vllm.supervisor import VLLMSupervisor
from eyas.target.text import TargetText

logger = logging.getLogger(__name__)

ROUTE = "/inference/v1/generate"
RETRY_SECONDS = 30
"""Retry-After while vLLM starts."""
TRIAL_TOKENS = 8


class VLLMEngineClient:
    """An `EngineClient`. Use it as a context manager, or call `close`."""

    def __init__(
        self,
        process: VLLMProcess,
        start: Callable[[], VLLMProcess],
        *,
        target: TargetText,
        model: str,
        speculation: Speculation | None,
        max_depth: int,
        start_seconds: float,
        on_cpu: bool = False,
    ) -> None:
        """`process` is ready; `speculation` is its setting, None without a drafter."""
        self.target, self.max_depth = target, max_depth
        self.supervisor = VLLMSupervisor(process, start, start_seconds=start_seconds, on_end=self._keep_counts)
        self._model, self._speculation, self._on_cpu = model, speculation, on_cpu
        self._processor = OutputProcessor(target.decoder())
        self._keys = itertools.count()
        self._ended_stats = SpecDecodeStats()
        """The counts of ended processes, as of their last snapshot."""
        self._last = EngineSnapshot()

    @property
    def failure(self) -> BaseException | None:
        return self.supervisor.failure

    @property
    def unavailable(self) -> str | None:
        return self.supervisor.unavailable

    async def generate(self, requests: Sequence[Request], on_output: OnOutput) -> None:
        if self.failure is None and (why := self.unavailable) is not None:
            raise ApiError(503, f"{why}; try again", code="engine_restarting", retry=RETRY_SECONDS)
        told: dict[str, Any] = {"model": self._model, "served": self._speculation, "on_cpu": self._on_cpu}
        bodies = [generate_body(one, **told) for one in requests]
        await run_all(
            self._stream(index, request, body, on_output)
            for index, (request, body) in enumerate(zip(requests, bodies, strict=True))
        )

    async def snapshot(self) -> EngineSnapshot:
        process, supervisor = self.supervisor.process, self.supervisor
        try:
            async with (
                asyncio.timeout(SNAPSHOT_SECONDS),
                aiohttp.ClientSession() as session,
                session.get(f"{process.url}/metrics") as reply,
            ):
                snapshot = read_snapshot(await reply.text())
            if process is supervisor.process:
                self._last = snapshot
        except (TimeoutError, aiohttp.ClientError, ValueError):
            pass
        stats = SpecDecodeStats()
        add_stats(stats, self._ended_stats)
        add_stats(stats, self._last.stats)
        return replace(
            self._last,
            stats=stats,
            replaced=supervisor.restarts,
            notices=tuple(supervisor.notices),
        )

    async def swap_drafter(self, drafter: Drafter | None, *, only_in_place: bool = False) -> bool:
        """Refuse: vLLM keeps its drafter."""
        raise ApiError(501, "vLLM keeps the drafter that it was started with; start the server with another one")

    async def try_out(self) -> None:
        """Generate a few tokens, and check that vLLM drafts if it should."""
        prompt = tuple(self.target.tokenizer.encode("One, two, three,"))
        request = Request(prompt=prompt, sampling=Sampling(), max_new_tokens=TRIAL_TOKENS)
        ends: list[SpecDecodeStats] = []

        async def on_output(_: int, __: Any, stats: SpecDecodeStats) -> None:
            ends.append(stats)

        await self.generate([request], on_output)
        if self._speculation is not None and self._speculation.mode == "fixed" and not ends[-1].drafts:
            raise EngineError("vLLM was started with a drafter and drafted nothing")

    def close(self) -> None:
        self.supervisor.close()

    def __enter__(self) -> "VLLMEngineClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _keep_counts(self) -> None:
        add_stats(self._ended_stats, self._last.stats)
        self._last = replace(self._last, running=0, waiting=0, blocks_used=0, stats=SpecDecodeStats())

    async def _stream(self, index: int, request: Request, body: Json, on_output: OnOutput) -> None:
        answer = AnswerStream(next(self._keys), request, self._processor, self.max_depth)
        try:
            async with aclosing(self._events(body)) as events:
                async for event in events:
                    for choice in event["choices"]:
                        delta = answer.add(choice, event.get("prompt_logprobs"))
                        if delta is not None:
                            await on_output(index, [delta], answer.stats)
                    if event.get("usage"):
                        answer.count(event)
                        break
                    if answer.ended is not None and not event["choices"][0].get("finish_reason"):
                        answer.count({})  # a stop string ended it here, and vLLM would continue
                        break
            if answer.ended is None:
                raise EngineError("vLLM closed the connection before the answer was complete")
            await on_output(index, [answer.ended], answer.stats)
        finally:
            answer.close()

    async def _events(self, body: Json) -> AsyncGenerator[Json, None]:
        """The events of a stream; a response without a stream is one event."""
        process = self.supervisor.process
        # One connection per request, closed with it: vLLM aborts a request when its connection closes.
        connector = aiohttp.TCPConnector(force_close=True)
        timeout = aiohttp.ClientTimeout(total=None)  # the endpoint has a timeout
        headers = {"authorization": f"Bearer {process.key}"}
        try:
            async with (
                aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers) as session,
                session.post(f"{process.url}{ROUTE}", json=body) as reply,
            ):
                if reply.status != 200:
                    raise _refusal(reply.status, await reply.read())
                if not body["stream"]:
                    yield json.loads(await reply.read())
                    return
                rest = b""
                async for chunk in reply.content.iter_any():
                    events, rest = events_of(rest + chunk)
                    for event in events:
                        if "error" in event:
                            raise _refusal(int(event["error"].get("code") or 500), json.dumps(event).encode())
                        yield event
        except aiohttp.ClientError as error:
            raise EngineError("the connection to vLLM broke") from error


def _refusal(status: int, body: bytes) -> Exception:
    """The error for a failed response: a client's mistake with vLLM's message, else an engine error."""
    try:
        error = json.loads(body)
        message = str((error.get("error") or error).get("message"))
    except (ValueError, AttributeError):
        message = body[:200].decode("utf-8", "replace")
    if 400 <= status < 500 and status not in (401, 404):
        return ApiError(400, f"vLLM refuses this request: {message[:500]}", code="refused_by_engine")
    logger.error(f"vLLM answered {status}: {message[:2000]}")
    return EngineError(f"vLLM answered {status}")
