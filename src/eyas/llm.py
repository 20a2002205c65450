"""Python API for offline inference: a target with its drafter.

    from eyas import LLM, SamplingParams

    llm = LLM("smollm2")
    for output in llm.chat(["What is a falcon?"], SamplingParams(max_tokens=32)):
        print(output.text, output.finish_reason, output.acceptance_length)

`LLM` is synchronous, `AsyncLLM` serves many tasks of an event loop. Both run the engine of `eyas serve`, with packed
weights and CUDA graphs, and by default use the drafter that eyas ships for the target.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from eyas.drafter.shipped import choose_drafter
from eyas.engine.async_engine import AsyncEngine
from eyas.engine.config import EngineConfig
from eyas.engine.engine import Engine
from eyas.engine.grammar import Grammar
from eyas.engine.output import OutputDelta, RequestOutput, SpecDecodeStats
from eyas.engine.request import Request, Speculation
from eyas.engine.speculation.draft import MOST_IN_CHAIN
from eyas.errors import UserError
from eyas.grammar.llguidance import LlGuidance
from eyas.loading import load_another, load_pair, require_fit
from eyas.sampling import Sampling
from eyas.sampling_params import FORMS, SamplingParams
from eyas.target.chat_template import ChatFormat
from eyas.target.facts import read_facts
from eyas.target.model import Target
from eyas.target.text import bad_word_tokens

Prompt = str | Sequence[int]
"""Text, or token ids."""
Message = Mapping[str, Any]
Conversation = str | Sequence[Message]
"""Messages in OpenAI's format; a text alone is a user message."""
Params = SamplingParams | Sequence[SamplingParams] | None
"""For all prompts, or one for each."""
Each = TypeVar("Each")


class _Loaded(ABC):
    """Loads target and drafter into an engine."""

    def __init__(
        self,
        target: str = "smollm2",
        *,
        drafter: str | None = None,
        depth: int | Literal["auto"] = "auto",
        dtype: str = "auto",
        device: str = "auto",
        quantization: str = "auto",
        cache: Path | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        raw: bool = False,
        **settings: Any,
    ) -> None:
        known = [field.name for field in fields(EngineConfig)]
        for given in settings:
            if given not in known:
                near = get_close_matches(given, known, n=1)
                hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
                raise UserError(f"there is no setting {given!r} of the engine; {hint}")
        config = EngineConfig(**settings)
        if depth != "auto" and not (isinstance(depth, int) and 0 <= depth <= MOST_IN_CHAIN):
            raise UserError(f"depth is {depth!r}; give 0 to {MOST_IN_CHAIN}, or 'auto' for as deep as pays")
        if depth != "auto" and "max_depth" not in settings:
            config = replace(config, max_depth=max(config.max_depth, depth))
        name = choose_drafter(drafter, target)
        if name is not None:
            require_fit(name, read_facts(target, cache=cache))
        chat_format = ChatFormat(template=chat_template, raw=raw, variables=chat_template_kwargs or {})
        loaded, model = load_pair(
            target, name, dtype=dtype, device=device, quantization=quantization, cache=cache, chat_format=chat_format
        )
        engine = Engine(loaded, model, config=config)
        if loaded.device.type == "cpu" and not config.capture_ahead:
            engine.capture_graphs()  # a second at most, so that the first answers draft at the best depth
        self._cache, self._requests = cache, _RequestMaker(engine, depth)
        self._start(engine)

    @abstractmethod
    def _start(self, engine: Engine) -> None: ...


class LLM(_Loaded):
    """A target with or without a drafter. Not thread-safe.

    `drafter` is a name, a folder or a hub id; None uses the one that eyas ships for the target, if any, and "none"
    decodes without one. `depth` is the default number of draft tokens. `chat_template` replaces the target's template,
    `chat_template_kwargs` are variables for it, and with `raw` a chat is plain text to be continued, for base models.
    `quantization` on a CPU is "int8", "int4", "gguf" (as in the file) or "none"; "auto" keeps a GGUF file as it is. All
    fields of `EngineConfig` are keywords too: `LLM("my-model", max_num_seqs=256, max_model_len=4096)`.
    """

    def _start(self, engine: Engine) -> None:
        self._engine = engine
        self._deltas: dict[int, deque[OutputDelta]] = {}
        """Output of open requests that was not read yet: a caller may pause a stream and ask something else."""

    def generate(self, prompts: Prompt | Sequence[Prompt], params: Params = None) -> list[RequestOutput]:
        """Continue all prompts as one batch; answers are in the order of the prompts."""
        return self._answer([self._requests.of_prompt(*each) for each in _paired(_several(prompts), params)])

    def chat(
        self,
        conversations: Conversation | Sequence[Conversation],
        params: Params = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[RequestOutput]:
        """Answer each conversation through the target's chat template."""
        several = _conversations(conversations)
        return self._answer([self._requests.of_chat(*each, tools) for each in _paired(several, params)])

    def stream(
        self, prompt: Prompt | Sequence[Message], params: SamplingParams | None = None
    ) -> Generator[OutputDelta, None, None]:
        """Stream the answer to one prompt, or to one conversation given as messages; closing the stream cancels it."""
        key = self._submit(self._requests.of_either(prompt, params))
        try:
            while True:
                delta = self._next(key)
                yield delta
                if delta.finished is not None:
                    return
        finally:
            self._drop(key)

    @property
    def target(self) -> Target:
        """The loaded target: tokenizer, facts, weights."""
        return self._engine.target

    @property
    def engine(self) -> Engine:
        """The underlying engine."""
        return self._engine

    @property
    def stats(self) -> SpecDecodeStats:
        """Speculative decoding statistics of all requests."""
        return self._engine.stats

    def swap_drafter(self, drafter: str | None) -> None:
        """Use another drafter, or none; nothing changes if it does not fit.

        Weights of a drafter of the same shape are copied into the present one.
        """
        self._engine.swap_drafter(
            None if drafter is None else load_another(self._engine.target, drafter, cache=self._cache), in_place=True
        )

    def _answer(self, requests: Sequence[Request]) -> list[RequestOutput]:
        keys: list[int] = []
        stats: list[SpecDecodeStats] = []
        outputs = []
        try:
            for request in requests:
                keys.append(self._submit(request))
                stats.append(self._engine.stats_of(keys[-1]))
            for key, each in zip(keys, stats, strict=True):
                deltas = [self._next(key)]
                while deltas[-1].finished is None:
                    deltas.append(self._next(key))
                outputs.append(RequestOutput.of(deltas, each))
        finally:
            for key in keys:
                self._drop(key)
        return outputs

    def _submit(self, request: Request) -> int:
        key = self._engine.submit(request)
        self._deltas[key] = deque()
        return key

    def _next(self, key: int) -> OutputDelta:
        """The next output of a request; steps the engine until there is one."""
        waiting = self._deltas[key]
        while not waiting:
            for delta in self._engine.step():
                if delta.key in self._deltas:
                    self._deltas[delta.key].append(delta)
        return waiting.popleft()

    def _drop(self, key: int) -> None:
        self._deltas.pop(key, None)
        self._engine.cancel(key)


class AsyncLLM(_Loaded):
    """`LLM` for asyncio: requests of all tasks are batched together. A context manager; else call `close`.

    The engine runs on a thread of its own. Cancelling a task or closing a stream cancels its request.
    """

    def _start(self, engine: Engine) -> None:
        self._engine = AsyncEngine(engine)

    async def generate(self, prompt: Prompt, params: SamplingParams | None = None) -> RequestOutput:
        return await self._answer(self._requests.of_prompt(prompt, params))

    async def chat(
        self,
        conversation: Conversation,
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> RequestOutput:
        (messages,) = _conversations(conversation)
        return await self._answer(self._requests.of_chat(messages, params, tools))

    async def stream(
        self, prompt: Prompt | Sequence[Message], params: SamplingParams | None = None
    ) -> AsyncGenerator[OutputDelta, None]:
        """Stream the answer to one prompt, or to one conversation given as messages."""
        async with aclosing(self._engine.stream(self._requests.of_either(prompt, params))) as deltas:
            async for delta in deltas:
                yield delta

    async def _answer(self, request: Request) -> RequestOutput:
        stats: list[SpecDecodeStats] = []
        deltas = self._engine.stream(request, taken_on=lambda engine, key: stats.append(engine.stats_of(key)))
        async with aclosing(deltas):
            return RequestOutput.of([delta async for delta in deltas], stats[0])

    def close(self) -> None:
        """Stop after the current step; open requests end with an error."""
        self._engine.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()


class _RequestMaker:
    """Makes engine requests of prompts and `SamplingParams`."""

    def __init__(self, engine: Engine, depth: int | Literal["auto"]) -> None:
        self._target, self._max_model_len, self._depth = engine.target, engine.max_model_len, depth
        self._stop_ids = engine.target.stop_ids()
        self._guidance: LlGuidance | None = None

    def of_prompt(self, prompt: Prompt, params: SamplingParams | None) -> Request:
        """Token ids, or a text that is tokenised with the tokenizer's usual special tokens."""
        return self._request(self._target.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt, params)

    def of_chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> Request:
        return self._request(self._target.encode_chat(messages, tools), params)

    def of_either(self, prompt: Prompt | Sequence[Message], params: SamplingParams | None) -> Request:
        messages = [part for part in prompt if isinstance(part, Mapping)]
        if messages:
            return self.of_chat(messages, params)
        return self.of_prompt(prompt, params)  # type: ignore[arg-type]

    def _request(self, ids: Sequence[int], params: SamplingParams | None) -> Request:
        params = params or SamplingParams()
        room = self._max_model_len - len(ids)
        if room < 1:
            raise UserError(
                f"the prompt has {len(ids)} tokens, above the {self._max_model_len - 1} that leave room for an answer; "
                "shorten it or raise max_model_len"
            )
        if params.max_tokens is not None and params.max_tokens > room:
            raise UserError(
                f"max_tokens {params.max_tokens} behind a prompt of {len(ids)} tokens is above max_model_len "
                f"{self._max_model_len}; use {room} or fewer, or None for all there is room for"
            )
        allowed = params.allowed_token_ids
        return Request(
            prompt=tuple(ids),
            sampling=Sampling(
                temperature=params.temperature,
                top_k=params.top_k,
                top_p=params.top_p,
                min_p=params.min_p,
                repetition_penalty=params.repetition_penalty,
                presence_penalty=params.presence_penalty,
                frequency_penalty=params.frequency_penalty,
                logit_bias=params.logit_bias or {},
                allowed_tokens=None if allowed is None else frozenset(allowed),
            ),
            max_new_tokens=params.max_tokens or room,
            min_new_tokens=params.min_tokens,
            stop_ids=(frozenset() if params.ignore_eos else self._stop_ids) | frozenset(params.stop_token_ids),
            stop_strings=(params.stop,) if isinstance(params.stop, str) else tuple(params.stop),
            bad_words=bad_word_tokens(params.bad_words, self._target.tokenizer),
            include_stop=params.include_stop_str_in_output,
            detokenize=params.detokenize,
            skip_special_tokens=params.skip_special_tokens,
            seed=params.seed,
            logprobs=params.logprobs,
            prompt_logprobs=params.prompt_logprobs,
            speculation=_speculation(self._depth if params.depth is None else params.depth, params.speculation_method),
            grammar=self._grammar(params),
        )

    def _grammar(self, params: SamplingParams) -> Grammar | None:
        form = next((name for name in FORMS if getattr(params, name) is not None), None)
        if form is None:
            return None
        if self._guidance is None:
            self._guidance = LlGuidance(self._target.tokenizer, self._target.facts.vocab_size)
        value = getattr(params, form)
        grammar: Grammar = getattr(self._guidance, form)(dict(value) if isinstance(value, Mapping) else value)
        return grammar


def _speculation(depth: int | Literal["auto"], method: Literal["auto", "eagle3", "suffix"]) -> Speculation:
    if depth == "auto":
        return Speculation(method=method)
    return Speculation(mode="fixed", depth=depth, method=method) if depth else Speculation(mode="off", method=method)


def _several(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts, given one (a text or token ids) or several."""
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _conversations(conversations: Conversation | Sequence[Conversation]) -> list[list[Message]]:
    """A list of conversations, given one (a text or messages) or several."""
    one = isinstance(conversations, str) or (conversations and isinstance(conversations[0], Mapping))
    several: Sequence[Any] = [conversations] if one else conversations
    return [[{"role": "user", "content": each}] if isinstance(each, str) else list(each) for each in several]


def _paired(prompts: Sequence[Each], params: Params) -> list[tuple[Each, SamplingParams]]:
    """Pairs of prompt and params; with shared params, each prompt gets another seed."""
    if params is None or isinstance(params, SamplingParams):
        shared = params or SamplingParams()
        return [(prompt, replace(shared, seed=shared.seed + number)) for number, prompt in enumerate(prompts)]
    if len(params) != len(prompts):
        raise UserError(f"there are {len(prompts)} prompts and {len(params)} params; give one for all or one for each")
    return list(zip(prompts, params, strict=True))
