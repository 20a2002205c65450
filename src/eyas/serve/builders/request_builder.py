"""Builds engine requests from a valid body: tokenizes prompts, maps fields, checks limits under their API names.

One body may ask for several answers: n for each prompt. They are numbered prompt by prompt, as OpenAI numbers choices.
"""

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from eyas.engine.grammar import Grammar
from eyas.engine.request import Request, Speculation
from eyas.sampling import Sampling
from eyas.serve.api_error import ApiError, invalid, unsupported
from eyas.serve.builders.answer_formats import ReasoningSupport, ToolSupport, template_of
from eyas.serve.builders.least_tokens import least_tokens
from eyas.serve.builders.messages import rendered_messages, template_options
from eyas.serve.builders.token_text import PromptEcho
from eyas.serve.grammar.structured_outputs import GrammarSpec, grammar_spec_of
from eyas.serve.model_info import ModelInfo
from eyas.serve.parsers.base import OutputParser
from eyas.serve.parsers.registry import choose_formats
from eyas.serve.protocol.completions import ChatCompletionRequest, CompletionRequest, GenerationRequest
from eyas.serve.protocol.request_policy import RequestPolicy
from eyas.target.text import TargetText, bad_word_tokens

COMPLETION_TOKENS = 16
"""Default max_tokens of /v1/completions, as in OpenAI's API."""
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
    """Tokens of all prompts; a prompt with several answers counts once."""
    new_parser: Callable[[], OutputParser] | None = None
    """Creates the parser of an answer; None if all of it is content."""
    reasoning_fields: tuple[str, ...] = ()
    """The fields of a message that hold reasoning; none without a reasoning parser."""

    def with_cache_salt(self, cache_salt: str | None) -> "EngineRequests":
        """These requests, sharing cached prefixes only with those of the same salt."""
        return replace(self, requests=tuple(replace(request, cache_salt=cache_salt) for request in self.requests))


class RequestBuilder:
    """Builds engine requests for one target."""

    def __init__(self, target: TargetText, model_info: ModelInfo, policy: RequestPolicy) -> None:
        self._target, self._model_info, self._policy = target, model_info, policy
        self._stop_ids = target.stop_ids()
        self._least_tokens = least_tokens(target.tokenizer)
        template = template_of(target)
        tool, reasoning = choose_formats(template, model_info.tool_parser, model_info.reasoning_parser)
        markers = (*(tool.markers if tool else ()), *(reasoning.markers if reasoning else ()))
        added = getattr(target.tokenizer, "added_tokens_decoder", {})
        self.special_tokens: dict[str, int] = {
            token.content: id_ for id_, token in added.items() if token.special and token.content in markers
        }
        """Markers that are special tokens, by their text."""
        self.tool_support = ToolSupport(target.facts.source, template, tool, self.special_tokens)
        self.reasoning_support = ReasoningSupport(tokenizer=target.tokenizer, format=reasoning)

    def grammar_spec(self, body: GenerationRequest) -> GrammarSpec | None:
        """The grammar that the body asks for, if any."""
        spec = grammar_spec_of(body)
        if not isinstance(body, ChatCompletionRequest):
            return spec
        if spec is not None and self.tool_support.offered(body):
            message = f"{spec.field} forbids the calls that tools offer; drop one or use tool_choice none"
            raise invalid("tools", message)
        return spec or self.tool_support.grammar_spec(body)

    def chat(self, body: ChatCompletionRequest, grammar: Grammar | None) -> EngineRequests:
        """The requests of a chat completion."""
        given, longest = body.max_tokens, body.max_completion_tokens
        if None not in (given, longest) and given != longest:
            message = f"max_tokens {given} and max_completion_tokens {longest} differ; give one"
            raise invalid("max_tokens", message)
        if body.top_logprobs is not None and not body.logprobs:
            message = f"top_logprobs {body.top_logprobs} needs logprobs true; set it or leave both out"
            raise invalid("logprobs", message)
        prompt = self.chat_tokens(body)
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        if grammar is not None:
            by_tools, tool_format = self.tool_support.requires_call(body), self.tool_support.format
            if not (by_tools and tool_format is not None and tool_format.grammar_has_reasoning):
                field = "tool_choice" if by_tools else "response_format"
                grammar = self.reasoning_support.after_reasoning(grammar, prompt, field)
        return self._build(body, [prompt], longest or given, logprobs, grammar, self._new_parser(body, prompt))

    def chat_tokens(self, body: ChatCompletionRequest) -> list[int]:
        """The prompt of a conversation."""
        tools = [tool.model_dump(exclude_none=True) for tool in self.tool_support.offered(body)]
        options = template_options(body, self._target, self._policy)
        return self._target.encode_chat(self.messages(body), tools or None, options, check_text=self.require_fitting)

    def messages(self, body: ChatCompletionRequest) -> list[dict[str, Any]]:
        """The messages as chat templates take them."""
        return rendered_messages(body, self.tool_support)

    def require_fitting(self, text: str) -> None:
        """Raise an error for a text that cannot fit, whatever its tokens are, before they are computed.

        It need not leave room for an answer: the tokens are counted exactly afterwards. Truncation does not help such
        a text, because all of it would be tokenized first.
        """
        least, most = self._least_tokens.of(text) if self._least_tokens else 0, self._model_info.max_model_len
        if least > most:
            message = (
                f"the prompt has {len(text):,} characters, which are {least} tokens at least, above the {most} of this "
                "server; shorten it"
            )
            raise ApiError(400, message, code="context_length_exceeded")

    def completion(self, body: CompletionRequest, grammar: Grammar | None) -> EngineRequests:
        """The requests of a text completion."""
        if body.max_tokens == 0 and not body.echo:
            message = "max_tokens is 0, which needs echo true: nothing would come back; use 1 or more"
            raise invalid("max_tokens", message)
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
        tool_format = self.tool_support.format if new_tool_parser else None
        markers = [mark for format_ in (tool_format, reasoning.format) if format_ for mark in format_.markers]

        def new_parser() -> OutputParser:
            parser = reasoning.new_parser(prompt, new_tool_parser() if new_tool_parser else None)
            assert parser is not None
            return OutputParser(parser, markers=markers)

        return new_parser if new_tool_parser or reasoning.format else None

    def _prompts(self, prompt: Any) -> list[list[int]]:
        if isinstance(prompt, list) and not prompt:
            raise invalid("prompt", "prompt is an empty list; give at least one prompt")
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
        self._check_options(body)
        prompts = [self._truncated(prompt, body, max_tokens) for prompt in prompts]
        sampling = _sampling(body, self._model_info.sampling_defaults.given)
        seed = secrets.randbits(63) if body.seed is None else body.seed
        eos_ids = frozenset() if body.ignore_eos else self._stop_ids
        requests = [
            Request(
                prompt=tuple(prompt),
                sampling=sampling,
                max_new_tokens=self._max_new_tokens(prompt, max_tokens),
                min_new_tokens=body.min_tokens,
                stop_ids=eos_ids | frozenset(body.stop_token_ids or ()),
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
        reasoning_fields: tuple[str, ...] = ()
        if new_parser is not None and self.reasoning_support.format is not None:
            alias = ("reasoning_content",) if self._model_info.reasoning_content_alias else ()
            reasoning_fields = ("reasoning", *alias)
        return EngineRequests(
            requests=tuple(requests),
            eos_ids=eos_ids,
            prompt_tokens=sum(map(len, prompts)),
            new_parser=new_parser,
            reasoning_fields=reasoning_fields,
        )

    def _check_options(self, body: GenerationRequest) -> None:
        if body.stream_options is not None and not body.stream:
            raise invalid("stream_options", "stream_options needs stream true; set it or leave both out")
        if not body.spaces_between_special_tokens and not self._target.tokenizer.is_fast:
            field = "spaces_between_special_tokens"
            raise unsupported(field, f"{field} is false, but the tokenizer of this model puts them in; leave it out")
        if body.priority and self._policy.scheduling_policy != "priority":
            message = (
                f"priority is {body.priority}, but requests are served in the order of arrival here; leave it out, or "
                "start the server with --scheduling-policy priority"
            )
            raise unsupported("priority", message)

    def _truncated(self, prompt: Sequence[int], body: GenerationRequest, max_tokens: int | None) -> Sequence[int]:
        """The last tokens of a prompt, as many as the body asks for; -1: as many as leave room for the answer."""
        most, max_model_len = body.truncate_prompt_tokens, self._model_info.max_model_len
        if most is None:
            return prompt
        if most > max_model_len:
            field = "truncate_prompt_tokens"
            message = f"{field} is {most}, above the {max_model_len} tokens of this server; lower it, or use -1"
            raise invalid(field, message)
        if most == -1:
            most = max(1, max_model_len - (max_tokens or 1))
        return prompt[max(0, len(prompt) - most) :]

    def _max_new_tokens(self, prompt: Sequence[int], max_tokens: int | None) -> int:
        """The answer's token limit. It is checked here because the engine would cut the answer silently."""
        most = self._model_info.max_model_len
        room = most - len(prompt)
        if room < 1:
            message = (
                f"the prompt has {len(prompt)} tokens, above the {most - 1} that leave room for an answer; shorten it"
            )
            raise ApiError(400, message, code="context_length_exceeded")
        if max_tokens is not None and max_tokens > room:
            message = (
                f"max_tokens {max_tokens} and a prompt of {len(prompt)} tokens are above the {most} of this server; "
                f"use {room} or fewer"
            )
            raise invalid("max_tokens", message, code="context_length_exceeded")
        default = self._model_info.sampling_defaults.max_new_tokens
        return max_tokens or min(default or room, room)

    def _speculation(self, body: GenerationRequest) -> Speculation:
        if body.speculative is None:
            return self._model_info.default_speculation
        asked = body.speculative
        return Speculation(mode=asked.mode, depth=asked.depth, method=asked.method)


def num_answers(body: GenerationRequest) -> int:
    """How many answers a body asks for: n for each prompt."""
    prompt = body.prompt if isinstance(body, CompletionRequest) else ""
    several = isinstance(prompt, list) and not isinstance(next(iter(prompt), 0), int)
    return body.n * (len(prompt) if several else 1)


def _sampling(body: GenerationRequest, defaults: Mapping[str, Any]) -> Sampling:
    values = {
        name: defaults[name] if name in defaults and name not in body.model_fields_set else getattr(body, name)
        for name in DEFAULTED
    }
    return Sampling(
        **values | {"top_k": max(0, values["top_k"])},
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        logit_bias=body.logit_bias or {},
        allowed_tokens=None if body.allowed_token_ids is None else frozenset(body.allowed_token_ids),
    )


def _prompt_logprobs(body: GenerationRequest, logprobs: int | None) -> int | None:
    """How many alternatives the engine reports for tokens of the prompt, for both fields that ask."""
    if body.prompt_logprobs is not None and body.stream:
        message = "prompt_logprobs needs stream false; set it, or use echo with logprobs"
        raise invalid("prompt_logprobs", message)
    echoed = logprobs if isinstance(body, CompletionRequest) and body.echo else None
    return max((count for count in (body.prompt_logprobs, echoed) if count is not None), default=None)


def _stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    strings = [stop] if isinstance(stop, str) else stop or []
    if len(strings) > MAX_STOP_STRINGS:
        raise invalid("stop", f"stop has {len(strings)} strings, above the {MAX_STOP_STRINGS} allowed; drop some")
    longest = max(map(len, strings), default=0)
    if longest > MAX_STOP_LETTERS:
        message = f"stop has a string of {longest:,} characters, above the {MAX_STOP_LETTERS} allowed; shorten it"
        raise invalid("stop", message)
    return tuple(strings)


def _wrap_seed(seed: int) -> int:
    """Wrap a seed into 64 bits: choice i uses seed + i, which may exceed the largest seed."""
    return (seed + 2**63) % 2**64 - 2**63
