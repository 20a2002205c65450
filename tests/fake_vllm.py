"""A fake of vLLM 0.32's routes and events, around eyas' own engine and a tiny target."""

from __future__ import annotations

import asyncio
import json
import threading
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from aiohttp import web

from eyas.engine.async_engine import AsyncEngine
from eyas.engine.engine import Engine
from eyas.engine.request import Request, Speculation
from eyas.sampling import Sampling

if TYPE_CHECKING:
    from eyas.engine.logprobs import TokenLogprobs
    from eyas.engine.output import OutputDelta

METRICS = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0"} 1.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0"} 2.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0"} 0.25
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="64"} 1.0
# TYPE vllm:prefix_cache_queries counter
vllm:prefix_cache_queries_total{engine="0"} 320.0
# TYPE vllm:prefix_cache_hits counter
vllm:prefix_cache_hits_total{engine="0"} 160.0
# TYPE vllm:generation_tokens counter
vllm:generation_tokens_total{engine="0"} 100.0
# TYPE vllm:spec_decode_num_drafts counter
vllm:spec_decode_num_drafts_total{engine="0"} 40.0
# TYPE vllm:spec_decode_num_draft_tokens counter
vllm:spec_decode_num_draft_tokens_total{engine="0"} 120.0
# TYPE vllm:spec_decode_num_accepted_tokens counter
vllm:spec_decode_num_accepted_tokens_total{engine="0"} 55.0
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 30.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 25.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="2"} 0.0
"""


class FakeVLLM:
    """A server in a thread, which also plays the supervised process."""

    def __init__(self, engine: Engine, depth: int | None) -> None:
        self.key, self.log, self.exit_code = "secret", "no log", None
        self.bodies: list[dict[str, Any]] = []
        self.left = 0
        """Number of requests whose client disconnected."""
        self.pause = 0.0
        """Seconds before each event."""
        self.reply: tuple[int, dict[str, Any]] | None = None
        """Status and body in place of an answer."""
        self.cut_after: int | None = None
        """Number of events before the connection is cut."""
        self._engine, self._depth = AsyncEngine(engine), depth
        self._stats = engine.stats_of
        self._loop, ready = asyncio.new_event_loop(), threading.Event()
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._serve(ready)), daemon=True)
        self._thread.start()
        assert ready.wait(10)

    def health(self) -> int:
        return 200

    def reason(self) -> str:
        return "it was told to"

    def stop(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(10)
            self._engine.close()

    async def _serve(self, ready: threading.Event) -> None:
        self._stop = asyncio.Event()
        app = web.Application()
        app.router.add_post("/inference/v1/generate", self._generate)
        app.router.add_get("/metrics", self._metrics)
        runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        ready.set()
        await self._stop.wait()
        await runner.cleanup()

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(text=METRICS)

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        assert http.headers["authorization"] == f"Bearer {self.key}"
        body = await http.json()
        self.bodies.append(body)
        if self.reply is not None:
            return web.json_response(self.reply[1], status=self.reply[0])
        try:
            return await self._answer(http, body)
        except (asyncio.CancelledError, ConnectionResetError):
            self.left += 1
            raise

    async def _answer(self, http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        request, asked = self._request(body), body["sampling_params"].get("logprobs")
        stream, deltas, stats = web.StreamResponse(), list[Any](), list[Any]()
        if body["stream"]:
            await stream.prepare(http)
        taken_on = lambda engine, key: stats.append(engine.stats_of(key))  # noqa: E731
        async with aclosing(self._engine.stream(request, taken_on=taken_on)) as outputs:
            async for delta in outputs:
                if self.cut_after is not None and len(deltas) >= self.cut_after:
                    assert http.transport is not None
                    http.transport.abort()
                    return stream
                deltas.append(delta)
                await asyncio.sleep(self.pause)
                if body["stream"]:
                    await stream.write(_event({"choices": [_choice([delta], asked)]}))
        end = {"usage": _usage(body, deltas), "metrics": {"speculative_decoding": _spec(stats[0], deltas, self._depth)}}
        if not body["stream"]:
            rows = [None, *(_prompt_row(entry) for entry in deltas[0].prompt_logprobs or ())]
            return web.json_response({"choices": [_choice(deltas, asked)], "prompt_logprobs": rows, **end})
        await stream.write(_event({"choices": [], **end}) + b"data: [DONE]\n\n")
        return stream

    def _request(self, body: dict[str, Any]) -> Request:
        params = body["sampling_params"]
        names = (
            "temperature",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
            "top_k",
            "top_p",
            "min_p",
        )
        fixed = Speculation(mode="fixed", depth=self._depth) if self._depth else Speculation(mode="off")
        return Request(
            prompt=tuple(body["token_ids"]),
            sampling=Sampling(**{name: params[name] for name in names if name in params}),
            max_new_tokens=params["max_tokens"],
            min_new_tokens=params["min_tokens"],
            stop_ids=frozenset(params["stop_token_ids"]),
            stop_strings=tuple(params["stop"]),
            seed=params.get("seed", 7),
            logprobs=params.get("logprobs"),
            prompt_logprobs=params.get("prompt_logprobs"),
            speculation=fixed,
        )


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def _choice(deltas: list[OutputDelta], asked: int | None) -> dict[str, Any]:
    finished = deltas[-1].finished
    content = [_entry(one, asked) for delta in deltas for one in delta.logprobs or ()] if asked is not None else None
    return {
        "index": 0,
        "token_ids": [token for delta in deltas for token in delta.tokens],
        "finish_reason": None if finished is None else finished.value,
        "stop_reason": deltas[-1].stop_reason,
        "logprobs": None if content is None else {"content": content},
    }


def _entry(entry: TokenLogprobs, asked: int) -> dict[str, Any]:
    """The chosen token first, then the most likely ones, cut to the number asked for, as vLLM does."""
    first = {"token_id": entry.token, "logprob": entry.logprob, "rank": entry.rank}
    others = [{"token_id": token, "logprob": value} for token, value in entry.top if token != entry.token]
    return first | {"top_logprobs": [first, *others][: max(asked, 1)]}


def _prompt_row(entry: TokenLogprobs) -> dict[str, Any]:
    row = {str(token): {"logprob": value, "rank": rank} for rank, (token, value) in enumerate(entry.top, 1)}
    return {str(entry.token): {"logprob": entry.logprob, "rank": entry.rank}} | row


def _usage(body: dict[str, Any], deltas: list[OutputDelta]) -> dict[str, Any]:
    prompt, made = len(body["token_ids"]), sum(len(delta.tokens) for delta in deltas)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": made,
        "prompt_tokens_details": {"cached_tokens": deltas[0].num_cached_tokens},
    }


def _spec(stats: Any, deltas: list[OutputDelta], depth: int | None) -> dict[str, Any] | None:
    if depth is None:
        return None
    steps = [delta for delta in deltas if delta.drafted]
    histogram = [sum(step.accepted == count for step in steps) for count in range(depth + 1)]
    return {
        "acceptance_histogram": histogram,
        "num_spec_steps": stats.drafts,
        "num_draft_tokens": stats.drafted,
        "num_accepted_draft_tokens": stats.accepted,
        "num_spec_tokens": depth,
        "per_step_accepted": [step.accepted for step in steps],
        "per_step_drafted": [step.drafted for step in steps],
    }
