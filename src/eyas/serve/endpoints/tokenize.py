"""/tokenize and /detokenize, with vLLM's fields: what clients use to count tokens and to cut prompts to a length."""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from eyas.serve.access.audit import mark_recorded
from eyas.serve.access.caller import caller_of
from eyas.serve.api_error import invalid, to_api_error
from eyas.serve.context import ServerContext
from eyas.serve.monitoring.json_logging import log_event
from eyas.serve.protocol.completions import ChatCompletionRequest, Message, Messages, TokenIds, Tools, WireModel
from eyas.serve.protocol.validation import Body, parse_body, read_body
from eyas.serve.transport.connection import ClientDisconnectedError

logger = logging.getLogger(__name__)


class TokenizeRequest(WireModel):
    """The body of /tokenize: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = Field(None, min_length=1)
    add_special_tokens: bool | None = Field(
        None, description="Whether the tokenizer adds its own; by default for a prompt, not for messages."
    )
    return_token_strs: bool | None = Field(None, description="Return each token as the vocabulary writes it, too.")
    add_generation_prompt: bool | None = Field(None, description="End where the assistant answers; messages only.")
    continue_final_message: bool | None = Field(None, description="Leave the last message open; messages only.")
    tools: Tools | None = None
    chat_template: str | None = Field(None, description="Refused, unless the operator allows it; messages only.")
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, max_length=32, description="Variables of the chat template; messages only."
    )


SHARED_WITH_CHAT = ("add_generation_prompt", "continue_final_message", "tools", "chat_template", "chat_template_kwargs")


class DetokenizeRequest(WireModel):
    """The body of /detokenize."""

    model: str | None = None
    tokens: TokenIds


class TokenizerEndpoints:
    """The two routes. They take no place in the engine, but a full or stopping server refuses them too."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._tokenizer = context.engine_client.target.tokenizer

    async def tokenize(self, http: HttpRequest) -> Response:
        """The token ids of a prompt or of messages."""
        return await self._answer(http, TokenizeRequest, self._tokenize)

    async def detokenize(self, http: HttpRequest) -> Response:
        """The text of token ids."""
        return await self._answer(http, DetokenizeRequest, self._detokenize)

    async def _answer(
        self, http: HttpRequest, kind: type[Body], work: Callable[[Body], dict[str, Any]]
    ) -> JSONResponse:
        context, started = self._context, time.monotonic()
        mark_recorded(http.scope)
        try:
            context.admission.check_capacity()
            raw = await read_body(http, context.limits)
            body = parse_body(kind, raw)
            name = getattr(body, "model", None)
            if name is not None:
                context.model_info.require(name)
            loop = asyncio.get_running_loop()
            async with asyncio.timeout(context.limits.request_seconds):
                answer = await loop.run_in_executor(context.tokenizer_lane(len(raw)), work, body)
        except ClientDisconnectedError:
            raise  # the application records it
        except Exception as error:
            failure = to_api_error(error)
            self._record(http, started, failure.code or str(failure.status), failure.status)
            raise failure from error
        self._record(http, started, "ok", 200)
        return JSONResponse(answer)

    def _record(self, http: HttpRequest, started: float, outcome: str, status: int) -> None:
        """One log line and one count, as for a completion."""
        path, seconds = http.scope["path"], round(time.monotonic() - started, 4)
        self._context.metrics.requests.labels(path, outcome).inc()
        fields = {"path": path, **caller_of(http.scope).log_fields}
        log_event(logger, "request", **fields, status=status, outcome=outcome, seconds=seconds)

    def _tokenize(self, body: TokenizeRequest) -> dict[str, Any]:
        tokens = self._prompt_tokens(body) if body.messages is None else self._message_tokens(body, body.messages)
        return {
            "count": len(tokens),
            "max_model_len": self._context.model_info.max_model_len,
            "tokens": tokens,
            "token_strs": self._tokenizer.convert_ids_to_tokens(tokens) if body.return_token_strs else None,
        }

    def _prompt_tokens(self, body: TokenizeRequest) -> list[int]:
        if body.prompt is None:
            raise invalid("prompt", "prompt and messages are both missing; give one")
        for field in SHARED_WITH_CHAT:
            if getattr(body, field) is not None:
                raise invalid(field, f"{field} is for messages, and there is a prompt; leave it out")
        self._context.request_builder.require_fitting(body.prompt)
        tokens: list[int] = self._tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens is not False)
        return tokens

    def _message_tokens(self, body: TokenizeRequest, messages: list[Message]) -> list[int]:
        if body.prompt is not None:
            raise invalid("messages", "prompt and messages are both given; give one")
        if body.add_special_tokens:
            field = "add_special_tokens"
            raise invalid(field, f"{field} is true, but the chat template adds them; leave it out")
        # The checks and the rendering of a chat completion of these messages.
        shared = {name: value for name in SHARED_WITH_CHAT if (value := getattr(body, name)) is not None}
        return self._context.request_builder.chat_tokens(
            ChatCompletionRequest.model_construct(messages=messages, **shared)
        )

    def _detokenize(self, body: DetokenizeRequest) -> dict[str, Any]:
        most, vocabulary = self._context.model_info.max_model_len, self._context.engine_client.target.facts.vocab_size
        if len(body.tokens) > most:
            raise invalid("tokens", f"tokens has {len(body.tokens)} ids, above the {most} of this server; send fewer")
        wrong = next((token for token in body.tokens if not 0 <= token < vocabulary), None)
        if wrong is not None:
            raise invalid("tokens", f"token id {wrong} is outside of 0 to {vocabulary - 1}; change it")
        return {"prompt": str(self._tokenizer.decode(body.tokens, skip_special_tokens=False))}
