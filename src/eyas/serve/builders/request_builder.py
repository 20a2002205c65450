"""Build engine requests from a valid body: tokenize prompts, map fields, check limits under their API names.

One body may ask for several answers: n for each prompt. They are numbered prompt by prompt, as OpenAI numbers choices.
"""

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from eyas.engine.grammar import Grammar
from eyas.engine.request import Request, Speculation
from eyas.sampling import Sampling
from eyas.serve.api_error import ApiError
from eyas.serve.builders.least_tokens import least_tokens
from eyas.serve.builders.prompt_echo import PromptEcho
from eyas.serve.builders.reasoning import ReasoningSupport
from eyas.serve.builders.tools import ToolSupport
from eyas.serve.grammar.structured_outputs import GrammarSpec, grammar_spec_of
from eyas.serve.model_info import ModelInfo
from eyas.serve.parsers.harmony import HarmonyFormat
from eyas.serve.parsers.output_parser import OutputParser
from eyas.serve.parsers.registry import choose_formats
from eyas.serve.protocol.chat_template import template_options
from eyas.serve.protocol.completions import (
    AssistantMessage,
    ChatCompletionRequest,
    CompletionRequest,
    FunctionCall,
    GenerationRequest,
    TextPart,
    ToolMessage,
)
from eyas.serve.protocol.prompt_tokens import require_spaces, truncated
from eyas.serve.protocol.request_policy import RequestPolicy
from eyas.target.bad_words import bad_word_tokens
from eyas.target.text import TargetText

COMPLETION_TOKENS = 16
"""Default max_tokens of /v1/completions, as OpenAI has it."""
MAX_STOP_STRINGS = 16
MAX_STOP_LETTERS = 1024
DEFAULTED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Sampling fields that a generation config has values for."""


@dataclass(frozen=True, kw_only=True)
class EngineRequests:
    """The engine requests of one body."""

    requests: tuple[Request, ...]
    echoes: tuple[PromptEcho, ...] = ()
    """The prompt of each request, where it comes back before the answer."""
    answers: bool = True
    """Whether answers come back too."""
    eos_ids: frozenset[int]
    """The target's own stop tokens, where they end an answer."""
    prompt_tokens: int
    """Over all prompts; a prompt with several answers counts once."""
    new_parser: Callable[[], OutputParser] | None = None
    """Creates the parser of an answer; None if all of it is content."""
    reasoning_fields: tuple[str, ...] = ()
    """The fields of a message that hold reasoning; none without a reasoning parser."""

    def with_cache_salt(self, cache_salt: str | None) -> "EngineRequests":
        """The same requests, which share cached prefixes with those of this salt alone."""
        return replace(self, requests=tuple(replace(request, cache_salt=cache_salt) for request in self.requests))


class RequestBuilder:
    """Builds engine requests for one target."""

    def __init__(self, target: TargetText, model_info: ModelInfo, policy: RequestPolicy) -> None:
        self._target, self._model_info, self._policy = target, model_info, policy
        self._stop_ids = target.stop_ids()
        self._least_tokens = least_tokens(target.tokenizer)
        template = template_of(target)
        tool, reasoning = choose_formats(template, model_info.tool_parser, model_info.reasoning_parser)
        self.special_tokens = _special_tokens(
            target, (*(tool.markers if tool else ()), *(reasoning.markers if reasoning else ()))
        )
        """Markers that are special tokens, by their text."""
        self.tool_support = ToolSupport(target.facts.source, template, tool, self.special_tokens)
        self.reasoning_support = ReasoningSupport(tokenizer=target.tokenizer, format=reasoning)

    def grammar_spec(self, body: GenerationRequest) -> GrammarSpec | None:
        """The grammar that the body asks for, if any."""
        spec = grammar_spec_of(body)
        if not isinstance(body, ChatCompletionRequest):
            return spec
        if spec is not None and self.tool_support.offered(body):
            raise ApiError(
                400, f"{spec.field} forbids the calls that tools offer; drop one or use tool_choice none", field="tools"
            )
        return spec or self.tool_support.grammar_spec(body)

    def chat(self, body: ChatCompletionRequest, grammar: Grammar | None) -> EngineRequests:
        """The requests of a chat completion."""
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
        prompt = self.chat_tokens(body)
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        max_tokens = body.max_completion_tokens or body.max_tokens
        if grammar is not None:
            grammar = self._after_reasoning(body, grammar, prompt)
        return self._build(body, [prompt], max_tokens, logprobs, grammar, self._new_parser(body, prompt))

    def chat_tokens(self, body: ChatCompletionRequest) -> list[int]:
        """The prompt of a conversation."""
        tools = [tool.model_dump(exclude_none=True) for tool in self.tool_support.offered(body)]
        options = template_options(body, self._target, self._policy)
        return self._target.encode_chat(self.messages(body), tools or None, options, check_text=self.require_fitting)

    def require_fitting(self, text: str) -> None:
        """Raise an error for a text that cannot fit, whatever its tokens are, before they are computed.

        It need not leave room for an answer: the tokens are counted exactly afterwards. Truncation does not help such
        a text, because all of it would be tokenized first.
        """
        least, most = self._least_tokens.of(text) if self._least_tokens else 0, self._model_info.max_model_len
        if least > most:
            raise ApiError(
                400,
                f"the prompt has {len(text):,} characters, which are {least} tokens at least, above the {most} of this "
                "server; shorten it",
                code="context_length_exceeded",
            )

    def completion(self, body: CompletionRequest, grammar: Grammar | None) -> EngineRequests:
        """The requests of a text completion."""
        if body.max_tokens == 0 and not body.echo:
            raise ApiError(
                400,
                "max_tokens is 0, which needs echo true: nothing would come back; use 1 or more",
                field="max_tokens",
            )
        prompts = self._prompts(body.prompt)
        max_tokens = COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
        built = self._build(body, prompts, max(1, max_tokens), body.logprobs, grammar)
        if not body.echo:
            return built
        given = body.prompt if isinstance(body.prompt, list) else [body.prompt]
        echoes = [
            PromptEcho.of(built.requests[number * body.n].prompt, text if isinstance(text, str) else None, self._target)
            for number, text in enumerate(given[: len(prompts)])  # the ids of one prompt are one prompt
        ]
        return replace(
            built, echoes=tuple(echo for echo in echoes for _ in range(body.n)), answers=body.max_tokens != 0
        )

    def _new_parser(self, body: ChatCompletionRequest, prompt: Sequence[int]) -> Callable[[], OutputParser] | None:
        """Creates parsers of the answers to a prompt; None if all of them is content."""
        new_tool_parser, reasoning = self.tool_support.new_parser(body), self.reasoning_support
        markers = (
            *(self.tool_support.format.markers if new_tool_parser and self.tool_support.format else ()),
            *(reasoning.format.markers if reasoning.format else ()),
        )

        def new_parser() -> OutputParser:
            parser = reasoning.new_parser(prompt, new_tool_parser() if new_tool_parser else None)
            assert parser is not None
            return OutputParser(parser, markers=markers)

        return new_parser if new_tool_parser or reasoning.format else None

    def _after_reasoning(self, body: ChatCompletionRequest, grammar: Grammar, prompt: Sequence[int]) -> Grammar:
        by_tools = self.tool_support.requires_call(body)
        if by_tools and isinstance(self.tool_support.format, HarmonyFormat):
            return grammar  # it is a grammar of the whole answer, reasoning included
        return self.reasoning_support.after_reasoning(grammar, prompt, "tool_choice" if by_tools else "response_format")

    def messages(self, body: ChatCompletionRequest) -> list[dict[str, Any]]:
        """The messages as chat templates take them."""
        messages: list[dict[str, Any]] = []
        names: dict[str, str] = {}
        for number, message in enumerate(body.messages):
            role = "system" if message.role == "developer" else message.role
            rendered: dict[str, Any] = {"role": role, "content": _content_text(message.content)}
            field = f"messages.{number}"
            if isinstance(message, AssistantMessage):
                rendered |= _reasoning(message)
            if isinstance(message, AssistantMessage) and message.tool_calls:
                self.tool_support.require(f"{field}.tool_calls", "leave them out")
                rendered["tool_calls"] = [
                    {
                        "id": call.id,
                        "type": "function",
                        "function": _rendered_call(call.function, f"{field}.tool_calls"),
                    }
                    for call in message.tool_calls
                ]
                names |= {call.id: call.function.name for call in message.tool_calls}
            elif message.content is None and len(rendered) == 2:
                message_field = f"{field}.content"
                raise ApiError(400, f"{message_field} is missing, and so are tool_calls; give one", field=message_field)
            if isinstance(message, ToolMessage):
                self.tool_support.require(f"{field}.role", "is tool: send tool results with role user")
                rendered["tool_call_id"] = message.tool_call_id
                rendered |= {"name": names[message.tool_call_id]} if message.tool_call_id in names else {}
            if message.name is not None:
                rendered["name"] = message.name
            messages.append(rendered)
        return messages

    def _prompts(self, prompt: Any) -> list[list[int]]:
        if isinstance(prompt, list) and not prompt:
            raise ApiError(400, "prompt is an empty list; give at least one prompt", field="prompt")
        if isinstance(prompt, list) and isinstance(prompt[0], int):
            prompt = [prompt]
        texts_or_ids = prompt if isinstance(prompt, list) else [prompt]
        return [self._encode(item) if isinstance(item, str) else item for item in texts_or_ids]

    def _encode(self, text: str) -> list[int]:
        self.require_fitting(text)
        ids: list[int] = self._target.tokenizer.encode(text)
        return ids

    def _build(
        self,
        body: GenerationRequest,
        prompts: Sequence[Sequence[int]],
        max_tokens: int | None,
        logprobs: int | None,
        grammar: Grammar | None,
        new_parser: Callable[[], OutputParser] | None = None,
    ) -> EngineRequests:
        if body.stream_options is not None and not body.stream:
            raise ApiError(400, "stream_options needs stream true; set it or leave both out", field="stream_options")
        require_spaces(body, self._target)
        if body.priority and self._policy.scheduling_policy != "priority":
            raise ApiError(
                400,
                f"priority is {body.priority}, but requests are served in the order of arrival here; leave it out, or "
                "start the server with --scheduling-policy priority",
                field="priority",
                code="unsupported_parameter",
            )
        prompts = [truncated(prompt, body, max_tokens, self._model_info.max_model_len) for prompt in prompts]
        sampling = _sampling(body, self._model_info.sampling_defaults.given)
        seed = secrets.randbits(63) if body.seed is None else body.seed
        requests = [
            Request(
                prompt=tuple(prompt),
                sampling=sampling,
                max_new_tokens=self._max_new_tokens(prompt, max_tokens),
                min_new_tokens=body.min_tokens,
                stop_ids=self._stop_token_ids(body),
                stop_strings=_stop_strings(body.stop),
                bad_words=bad_word_tokens(body.bad_words or (), self._target.tokenizer),
                include_stop=body.include_stop_str_in_output,
                # A parser of calls puts the markers it needs back in by itself.
                skip_special_tokens=body.skip_special_tokens or new_parser is not None,
                seed=_wrap_seed(seed + choice),
                seeded=body.seed is not None,
                logprobs=logprobs,
                prompt_logprobs=_prompt_logprobs(body, logprobs),
                speculation=self._speculation(body),
                grammar=grammar,
                priority=body.priority,
            )
            for prompt in prompts
            for choice in range(body.n)
        ]
        return EngineRequests(
            requests=tuple(requests),
            eos_ids=frozenset() if body.ignore_eos else self._stop_ids,
            prompt_tokens=sum(map(len, prompts)),
            new_parser=new_parser,
            reasoning_fields=self._reasoning_fields if new_parser is not None else (),
        )

    @property
    def _reasoning_fields(self) -> tuple[str, ...]:
        if self.reasoning_support.format is None:
            return ()
        return ("reasoning", "reasoning_content") if self._model_info.reasoning_content_alias else ("reasoning",)

    def _max_new_tokens(self, prompt: Sequence[int], max_tokens: int | None) -> int:
        """The answer's token limit. It is checked here because the engine would cut the answer silently."""
        room = self._model_info.max_model_len - len(prompt)
        if room < 1:
            raise ApiError(
                400,
                f"the prompt has {len(prompt)} tokens, above the {self._model_info.max_model_len - 1} that leave "
                "room for an answer; shorten it",
                code="context_length_exceeded",
            )
        if max_tokens is not None and max_tokens > room:
            raise ApiError(
                400,
                f"max_tokens {max_tokens} and a prompt of {len(prompt)} tokens are above the "
                f"{self._model_info.max_model_len} of this server; use {room} or fewer",
                field="max_tokens",
                code="context_length_exceeded",
            )
        default = self._model_info.sampling_defaults.max_new_tokens
        return max_tokens or min(default or room, room)

    def _stop_token_ids(self, body: GenerationRequest) -> frozenset[int]:
        own = frozenset() if body.ignore_eos else self._stop_ids
        return own | frozenset(body.stop_token_ids or ())

    def _speculation(self, body: GenerationRequest) -> Speculation:
        if body.speculative is None:
            return self._model_info.default_speculation
        asked = body.speculative
        return Speculation(mode=asked.mode, depth=asked.depth, method=asked.method)


def _sampling(body: GenerationRequest, defaults: Mapping[str, Any]) -> Sampling:
    own = {name: getattr(body, name) for name in DEFAULTED}
    left_out = {name: defaults[name] for name in DEFAULTED if name in defaults and name not in body.model_fields_set}
    wished = own | left_out
    return Sampling(
        **wished | {"top_k": max(0, wished["top_k"])},
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        logit_bias=body.logit_bias or {},
        allowed_tokens=None if body.allowed_token_ids is None else frozenset(body.allowed_token_ids),
    )


def _prompt_logprobs(body: GenerationRequest, logprobs: int | None) -> int | None:
    """How many alternatives the engine reports for tokens of the prompt, for both fields that ask."""
    if body.prompt_logprobs is not None and body.stream:
        raise ApiError(
            400, "prompt_logprobs needs stream false; set it, or use echo with logprobs", field="prompt_logprobs"
        )
    echoed = logprobs if isinstance(body, CompletionRequest) and body.echo else None
    asked = [wish for wish in (body.prompt_logprobs, echoed) if wish is not None]
    return max(asked, default=None)


def _content_text(content: str | list[TextPart] | None) -> str:
    """The text of a message."""
    return "".join(part.text for part in content) if isinstance(content, list) else content or ""


def _reasoning(message: AssistantMessage) -> dict[str, str]:
    """The reasoning of a message; `encode_chat` adds the other names that templates use."""
    text = message.reasoning if message.reasoning is not None else message.reasoning_content
    return {} if text is None else {"reasoning_content": text}


def template_of(target: TargetText) -> str:
    """The chat template for conversations with tools."""
    tokenizer = target.tokenizer
    try:
        return str(tokenizer.get_chat_template(tools=[{}])) if tokenizer.chat_template else ""
    except ValueError:  # of several templates none is the default: whoever chats is told
        return ""


def _special_tokens(target: TargetText, markers: Sequence[str]) -> dict[str, int]:
    """Those of the markers that are special tokens, and their ids."""
    added = getattr(target.tokenizer, "added_tokens_decoder", {})
    return {token.content: id_ for id_, token in added.items() if token.special and token.content in markers}


def _rendered_call(function: FunctionCall, field: str) -> dict[str, Any]:
    """A function call as chat templates take it: arguments are an object, not a string."""
    try:
        arguments = json.loads(function.arguments or "{}")
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        raise ApiError(
            400, f"{field} has arguments of {function.name!r} that are no JSON object; fix them", field=field
        )
    return {"name": function.name, "arguments": arguments}


def num_answers(body: GenerationRequest) -> int:
    """How many answers a body asks for: n for each prompt."""
    prompt = body.prompt if isinstance(body, CompletionRequest) else ""
    several = isinstance(prompt, list) and not isinstance(next(iter(prompt), 0), int)
    return body.n * (len(prompt) if several else 1)


def _stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    strings = [stop] if isinstance(stop, str) else stop or []
    if len(strings) > MAX_STOP_STRINGS:
        raise ApiError(
            400, f"stop has {len(strings)} strings, above the {MAX_STOP_STRINGS} allowed; drop some", field="stop"
        )
    longest = max(map(len, strings), default=0)
    if longest > MAX_STOP_LETTERS:
        raise ApiError(
            400,
            f"stop has a string of {longest:,} characters, above the {MAX_STOP_LETTERS} allowed; shorten it",
            field="stop",
        )
    return tuple(strings)


def _wrap_seed(seed: int) -> int:
    """Wrap a seed into 64 bits: choice i uses seed + i, which may exceed the largest seed."""
    return (seed + 2**63) % 2**64 - 2**63
