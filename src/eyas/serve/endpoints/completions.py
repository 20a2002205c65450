"""One HTTP request from first byte to last: read, validate, admit, generate, respond.

Invariant: however it ends (a response, a refusal, a failed engine, a disconnect, a timeout), its places are released,
its requests leave the engine, and one log line and one count in the metrics record it.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.types import Receive, Scope, Send

from eyas.engine.grammar import Grammar
from eyas.engine.output import OutputDelta, SpecDecodeStats
from eyas.engine.request import FinishReason
from eyas.serve.access.audit import mark_recorded
from eyas.serve.access.caller import Caller, caller_of
from eyas.serve.api_error import ApiError, to_api_error
from eyas.serve.builders.request_builder import EngineRequests, num_answers
from eyas.serve.builders.response_builder import (
    ChoiceOutput,
    CompletionFormatter,
    ResponseFormatter,
    speculative_usage,
    without_answer,
)
from eyas.serve.context import ServerContext
from eyas.serve.learning.answer_record import FinishedAnswer
from eyas.serve.learning.consent import may_learn
from eyas.serve.monitoring.json_logging import log_event
from eyas.serve.protocol.completions import GenerationRequest
from eyas.serve.protocol.validation import ignored_header, read_body, read_known_fields
from eyas.serve.transport.connection import ClientDisconnectedError, ResponseWriter, cancel_on_disconnect

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class RequestTrace:
    """The course of one request, for log and metrics."""

    request_id: str
    started: float
    caller: Caller
    body: GenerationRequest | None = None
    engine_requests: EngineRequests | None = None
    choices: list[ChoiceOutput] = field(default_factory=list)
    first_token: float | None = None
    last_token: dict[int, float] = field(default_factory=dict)
    """When the newest tokens of each choice arrived."""
    outcome: str = "error"
    formatter: ResponseFormatter | None = None


class Endpoint:
    """The ASGI application of one completion route."""

    named_events = False
    """Whether the events of a stream have names, as those of /v1/responses."""

    def __init__(
        self,
        body: type[GenerationRequest],
        build: Callable[[Any, Grammar | None], EngineRequests],
        context: ServerContext,
    ) -> None:
        self._body, self._build, self._context = body, build, context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        trace = RequestTrace(request_id=uuid.uuid4().hex, started=time.monotonic(), caller=caller_of(scope))
        mark_recorded(scope)
        writer = ResponseWriter(send, trace.request_id, named_events=self.named_events)
        try:
            async with asyncio.timeout(self._context.limits.request_seconds):
                await self._answer(HttpRequest(scope, receive), receive, writer, trace)
        except ClientDisconnectedError:
            trace.outcome = "disconnected"
        except asyncio.CancelledError:
            trace.outcome = "cancelled"
            raise
        except Exception as error:
            failure = self._to_api_error(error)
            trace.outcome = failure.code or str(failure.status)
            if writer.status is not None:  # the audit sees statuses alone, not errors inside a stream
                self._context.metrics.errors.labels(failure.status).inc()
            await writer.fail(failure, trace.formatter and trace.formatter.failed(failure))
        finally:
            if self._context.learning_loop is not None:
                for index in range(len(trace.choices)):
                    self._context.learning_loop.rounds.end((trace.request_id, index))
            self._log_request(scope, trace, writer)

    async def _answer(self, http: HttpRequest, receive: Receive, writer: ResponseWriter, trace: RequestTrace) -> None:
        context = self._context
        context.admission.check_capacity()  # before reading the body too: a full server should refuse cheaply
        raw, new_formatter = self._prepare(await read_body(http, context.limits))
        trace.body, ignored = read_known_fields(self._body, raw, context.policy.unknown_fields)
        body, writer.headers = trace.body, ignored_header(ignored)
        if body.model is not None:
            context.model_info.require(body.model)
        learn = may_learn(body, trace.caller, collecting=context.collector is not None)
        with context.admission.admit(num_answers(body)):  # counted before any work is done for them
            engine_requests = await self._engine_requests(body, len(raw), trace)
            trace.formatter = new_formatter(
                trace.request_id,
                model=context.model_info.name,
                created=int(time.time()),
                body=body,
                engine_requests=engine_requests,
                num_spec_tokens=self._num_spec_tokens(engine_requests),
                token_text=context.token_text,
            )
            context.metrics.prompt_tokens.inc(engine_requests.prompt_tokens)
            await cancel_on_disconnect(receive, self._generate(trace.formatter, body, engine_requests, writer, trace))
        if learn:
            self._collect(body, engine_requests, trace)

    def _prepare(self, raw: bytes) -> tuple[bytes, Callable[..., ResponseFormatter]]:
        """The body in the fields of a completion, and the class that formats its answer."""
        return raw, CompletionFormatter

    async def _engine_requests(self, body: GenerationRequest, body_bytes: int, trace: RequestTrace) -> EngineRequests:
        """Compile the grammar and tokenize the prompts."""
        context, loop = self._context, asyncio.get_running_loop()
        spec = context.request_builder.grammar_spec(body)
        client = trace.caller.key_digest or trace.caller.address or ""
        grammar = None if spec is None else await context.compiler.compile(spec, client=client)
        built = await loop.run_in_executor(context.tokenizer_lane(body_bytes), self._build, body, grammar)
        trace.engine_requests = engine_requests = built.with_cache_salt(trace.caller.cache_salt(body.cache_salt))
        trace.choices = [
            ChoiceOutput(
                parser=engine_requests.new_parser and engine_requests.new_parser(),
                reasoning_fields=engine_requests.reasoning_fields,
            )
            for _ in engine_requests.requests
        ]
        return engine_requests

    async def _generate(
        self,
        formatter: ResponseFormatter,
        body: GenerationRequest,
        engine_requests: EngineRequests,
        writer: ResponseWriter,
        trace: RequestTrace,
    ) -> None:
        token_text, learning_loop = self._context.token_text, self._context.learning_loop

        async def on_output(index: int, deltas: Sequence[OutputDelta], stats: SpecDecodeStats) -> None:
            choice = trace.choices[index]
            deltas = deltas if engine_requests.answers else [without_answer(delta) for delta in deltas]
            choice.stats = stats
            choice.append(deltas, token_text)
            if learning_loop is not None:
                learning_loop.rounds.observe((trace.request_id, index), deltas)
            self._observe_latency(trace, index, deltas)
            if deltas[-1].finished is FinishReason.ERROR:
                message = "the grammar became too complex during generation; simplify it"
                raise ApiError(400, message, code="grammar_too_complex")
            if not body.stream:
                return
            for event in formatter.delta(index, choice):
                await writer.event(event)

        if learning_loop is not None:
            for index in range(len(trace.choices)):
                learning_loop.rounds.begin((trace.request_id, index))
        await self._context.engine_client.generate(engine_requests.requests, on_output)
        ends = {choice.deltas[-1].finished for choice in trace.choices}
        trace.outcome = "+".join(sorted(end.value for end in ends if end is not None))
        if not body.stream:
            await writer.json(formatter.whole(trace.choices))
            return
        for event in formatter.end(trace.choices):
            await writer.event(event)
        await writer.end()

    def _collect(self, body: GenerationRequest, engine_requests: EngineRequests, trace: RequestTrace) -> None:
        """Give finished answers to the collector, equal answers to one prompt once."""
        assert self._context.collector is not None
        if not engine_requests.answers:
            return
        answers = [
            FinishedAnswer(body=body, prompt=request.prompt, choice=choice, key=trace.caller.fingerprint)
            for request, choice in zip(engine_requests.requests, trace.choices, strict=True)
        ]
        for answer in {(answer.prompt, answer.tokens): answer for answer in answers}.values():
            self._context.collector.offer(answer)

    def _observe_latency(self, trace: RequestTrace, index: int, deltas: Sequence[OutputDelta]) -> None:
        """Record time to first token and inter-token latency."""
        now, metrics = time.monotonic(), self._context.metrics
        if trace.first_token is None:
            trace.first_token = now - trace.started
            metrics.time_to_first_token.observe(trace.first_token)
        before, tokens = trace.last_token.get(index), sum(len(delta.tokens) for delta in deltas)
        if before is not None:
            for _ in range(tokens):
                metrics.inter_token_latency.observe((now - before) / tokens)
        trace.last_token[index] = now

    def _num_spec_tokens(self, engine_requests: EngineRequests) -> int | None:
        """The deepest draft of a request; None if nothing is drafted for it."""
        speculation = engine_requests.requests[0].speculation
        model_info = self._context.model_info
        by_drafter = model_info.drafter is not None and speculation.by_drafter
        suffix = model_info.suffix_depth if speculation.by_suffix else 0
        if not by_drafter and not suffix:
            return None
        return speculation.depth or max(suffix, self._context.engine_client.max_depth if by_drafter else 0)

    def _to_api_error(self, error: Exception) -> ApiError:
        failure = to_api_error(error)
        if failure.status == 500 and self._context.admission.draining:
            return ApiError(503, "the server was shut down before the answer was complete", code="shutting_down")
        if failure.status == 500 and self._context.engine_client.failure is not None:
            return ApiError(503, "the engine has failed and could not be replaced; see /health", code="engine_down")
        if failure.code == "internal_error":
            logger.error("a bug in eyas ended a request", exc_info=error)
        return failure

    def _log_request(self, scope: Scope, trace: RequestTrace, writer: ResponseWriter) -> None:
        seconds = time.monotonic() - trace.started
        metrics = self._context.metrics
        metrics.requests.labels(scope["path"], trace.outcome).inc()
        metrics.e2e_latency.observe(seconds)
        if trace.choices and trace.engine_requests is not None:
            metrics.request_prompt_tokens.observe(trace.engine_requests.prompt_tokens)
        for choice in trace.choices:
            finished = choice.deltas[-1].finished if choice.deltas else None
            metrics.request_success.labels("abort" if finished is None else finished.value).inc()
            metrics.request_generation_tokens.observe(choice.tokens)
        speculative = speculative_usage(choice.stats for choice in trace.choices)
        log_event(
            logger,
            "request",
            request_id=trace.request_id,
            path=scope["path"],
            client=trace.caller.address,
            key=trace.caller.fingerprint,
            user=trace.body.user if trace.body else None,
            status=writer.status,
            outcome=trace.outcome,
            stream=trace.body.stream if trace.body else None,
            answers=len(trace.choices),
            prompt_tokens=trace.engine_requests.prompt_tokens if trace.engine_requests else None,
            completion_tokens=sum(choice.tokens for choice in trace.choices),
            seconds=round(seconds, 4),
            first_token_seconds=None if trace.first_token is None else round(trace.first_token, 4),
            drafts=speculative["drafts"],
            acceptance_length=speculative["acceptance_length"],
        )
