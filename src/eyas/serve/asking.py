"""From a valid body to requests of the engine: prompts to tokens, fields to options, limits checked by their API names.

One body may ask for several answers: n of each prompt. They are numbered prompt by prompt, as OpenAI numbers choices.
"""

import json
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from eyas.engine.grammar.base import Grammar
from eyas.engine.request import Request, Speculation
from eyas.sampling import Sampling
from eyas.serve.calls import CallReader
from eyas.serve.failure import ApiError
from eyas.serve.forms import Form, form_of
from eyas.serve.protocol import Answered, CalledFunction, ChatRequest, Common, CompletionRequest, TextPart, ToolResult
from eyas.serve.served import Served
from eyas.serve.tools import Toolbox
from eyas.target.model import Target

COMPLETION_TOKENS = 16
"""What /v1/completions answers when nobody says how much; OpenAI's own default."""
MOST_STOPS = 16


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a body comes to."""

    requests: tuple[Request, ...]
    prompt_tokens: int
    """Of all prompts together; a prompt with several answers counts once."""
    reader: Callable[[], CallReader] | None = None
    """Makes what finds tool calls in an answer, where there are tools."""


class Translator:
    """Knows the target's tokens and what is served."""

    def __init__(self, target: Target, served: Served) -> None:
        self._target, self._served = target, served
        self._stop_ids = target.stop_ids()
        self.toolbox = Toolbox(target, served.tool_parser)

    def form(self, body: Common) -> Form | None:
        """What the answer must look like, if the body says so."""
        form = form_of(body)
        if not isinstance(body, ChatRequest):
            return form
        if form is not None and self.toolbox.offered(body):
            raise ApiError(
                400, f"{form.field} forbids the calls that tools offer; drop one or use tool_choice none", field="tools"
            )
        return form or self.toolbox.form(body)

    def chat(self, body: ChatRequest, grammar: Grammar | None) -> Asked:
        """The requests of a conversation."""
        if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
            raise ApiError(
                400,
                f"max_tokens {body.max_tokens} and max_completion_tokens {body.max_completion_tokens} differ; give one",
                field="max_tokens",
            )
        if body.top_logprobs is not None and not body.logprobs:
            raise ApiError(
                400, f"top_logprobs {body.top_logprobs} needs logprobs true; set it or leave both out", field="logprobs"
            )
        tools = [tool.model_dump(exclude_none=True) for tool in self.toolbox.offered(body)]
        prompt = self._target.encode_chat(self._messages(body), tools or None)
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        most = body.max_completion_tokens or body.max_tokens
        return self._ask(body, [prompt], most, logprobs, grammar, self.toolbox.reader(body))

    def completion(self, body: CompletionRequest, grammar: Grammar | None) -> Asked:
        """The requests of one prompt or several."""
        prompts = self._prompts(body.prompt)
        return self._ask(body, prompts, body.max_tokens or COMPLETION_TOKENS, body.logprobs, grammar)

    def _messages(self, body: ChatRequest) -> list[dict[str, Any]]:
        """The conversation as templates take it."""
        messages: list[dict[str, Any]] = []
        names: dict[str, str] = {}
        for number, message in enumerate(body.messages):
            role = "system" if message.role == "developer" else message.role
            told: dict[str, Any] = {"role": role, "content": _text(message.content)}
            field = f"messages.{number}"
            if isinstance(message, Answered) and message.tool_calls:
                self.toolbox.require(f"{field}.tool_calls", "leave them out")
                told["tool_calls"] = [
                    {"id": call.id, "type": "function", "function": _called(call.function, f"{field}.tool_calls")}
                    for call in message.tool_calls
                ]
                names |= {call.id: call.function.name for call in message.tool_calls}
            elif message.content is None:
                message_field = f"{field}.content"
                raise ApiError(400, f"{message_field} is missing, and so are tool_calls; give one", field=message_field)
            if isinstance(message, ToolResult):
                self.toolbox.require(f"{field}.role", "is tool: tell what a tool said as user")
                told["tool_call_id"] = message.tool_call_id
                told |= {"name": names[message.tool_call_id]} if message.tool_call_id in names else {}
            messages.append(told)
        return messages

    def _prompts(self, prompt: Any) -> list[list[int]]:
        if isinstance(prompt, list) and not prompt:
            raise ApiError(400, "prompt is an empty list; give at least one prompt", field="prompt")
        if isinstance(prompt, list) and isinstance(prompt[0], int):
            prompt = [prompt]
        texts_or_ids = prompt if isinstance(prompt, list) else [prompt]
        return [self._encode(item) if isinstance(item, str) else item for item in texts_or_ids]

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._target.tokenizer.encode(text)
        return ids

    def _ask(
        self,
        body: Common,
        prompts: Sequence[Sequence[int]],
        max_tokens: int | None,
        logprobs: int | None,
        grammar: Grammar | None,
        reader: Callable[[], CallReader] | None = None,
    ) -> Asked:
        if body.stream_options is not None and not body.stream:
            raise ApiError(400, "stream_options needs stream true; set it or leave both out", field="stream_options")
        sampling = _sampling(body)
        seed = secrets.randbits(63) if body.seed is None else body.seed
        requests = [
            Request(
                prompt=tuple(prompt),
                sampling=sampling,
                max_new_tokens=self._room(prompt, max_tokens),
                min_new_tokens=body.min_tokens,
                stop_ids=self._stops_at(body),
                stop_strings=_stop_strings(body.stop),
                seed=_wrap(seed + choice),
                logprobs=logprobs,
                speculation=self._speculation(body),
                grammar=grammar,
            )
            for prompt in prompts
            for choice in range(body.n)
        ]
        return Asked(requests=tuple(requests), prompt_tokens=sum(map(len, prompts)), reader=reader)

    def _room(self, prompt: Sequence[int], max_tokens: int | None) -> int:
        """How many tokens the answer may have; the engine would cut it silently, so it is checked here."""
        room = self._served.max_model_len - len(prompt)
        if room < 1:
            raise ApiError(
                400,
                f"the prompt has {len(prompt)} tokens, above the {self._served.max_model_len - 1} that leave room for "
                "an answer; shorten it",
                code="context_length_exceeded",
            )
        if max_tokens is not None and max_tokens > room:
            raise ApiError(
                400,
                f"max_tokens {max_tokens} and a prompt of {len(prompt)} tokens are above the "
                f"{self._served.max_model_len} of this server; use {room} or fewer",
                field="max_tokens",
                code="context_length_exceeded",
            )
        return max_tokens or room

    def _stops_at(self, body: Common) -> frozenset[int]:
        own = frozenset() if body.ignore_eos else self._stop_ids
        return own | frozenset(body.stop_token_ids or ())

    def _speculation(self, body: Common) -> Speculation:
        if body.speculative is None:
            return self._served.speculation if self._served.drafter is not None else Speculation()
        return Speculation(mode=body.speculative.mode, depth=body.speculative.depth)


def _sampling(body: Common) -> Sampling:
    return Sampling(
        temperature=body.temperature,
        top_k=max(0, body.top_k),
        top_p=body.top_p,
        min_p=body.min_p,
        repetition_penalty=body.repetition_penalty,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        logit_bias=body.logit_bias or {},
    )


def _text(content: str | list[TextPart] | None) -> str:
    """The whole content of a message."""
    return "".join(part.text for part in content) if isinstance(content, list) else content or ""


def _called(function: CalledFunction, field: str) -> dict[str, Any]:
    """A call as templates take it: arguments are an object there, not its text."""
    try:
        arguments = json.loads(function.arguments or "{}")
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        raise ApiError(
            400, f"{field} has arguments of {function.name!r} that are no JSON object; mend them", field=field
        )
    return {"name": function.name, "arguments": arguments}


def _stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    strings = [stop] if isinstance(stop, str) else stop or []
    if len(strings) > MOST_STOPS:
        raise ApiError(400, f"stop has {len(strings)} strings, above the {MOST_STOPS} allowed; drop some", field="stop")
    return tuple(strings)


def _wrap(seed: int) -> int:
    """Within the engine's 64 bits, for the choices behind the largest seed."""
    return (seed + 2**63) % 2**64 - 2**63
