"""The Python API: a target with its drafter, from prompts to answers.

    from eyas import LLM, SamplingParams

    llm = LLM("smollm2")
    for output in llm.chat(["What is a falcon?"], SamplingParams(max_tokens=32)):
        print(output.text, output.finish_reason, output.acceptance_length)

`LLM` answers while you wait, `AsyncLLM` serves many tasks of an event loop at the same time. Both run the engine that
`eyas serve` runs, with weights packed and CUDA graphs captured, and both choose the drafter that comes with eyas for a
target unless told otherwise.
"""

from collections import deque
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import fields, replace
from difflib import get_close_matches
from pathlib import Path
from types import TracebackType
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
from eyas.sampling_params import SamplingParams
from eyas.target.bad_words import bad_word_tokens
from eyas.target.chat_template import ChatFormat
from eyas.target.facts import read_facts
from eyas.target.model import Target

Prompt = str | Sequence[int]
"""Text, or token ids."""
Message = Mapping[str, Any]
Conversation = str | Sequence[Message]
"""Messages in OpenAI's form; a text alone is what the user says."""
Params = SamplingParams | Sequence[SamplingParams] | None
"""For all prompts, or one for each."""
Each = TypeVar("Each")


class LLM:
    """A target that answers, with or without a drafter. One thread at a time may use it.

    `drafter` is a name, a folder or a hub id; None takes the one that comes with eyas for the target, if there is one,
    and "none" decodes plainly. `depth` is how many tokens to draft where a request does not say. `chat_template` is the
    text of another template than the target's, `chat_template_kwargs` are variables for it, and with `raw` a chat is
    plain text and its continuation, for base models. `quantization` is what matrices of a target on a CPU are quantised
    as: "int8", "int4", "gguf" (as the file has them) or "none"; with "auto", a GGUF file's stay as they are. All fields
    of `EngineConfig` are keywords too: `LLM("my-model", max_num_seqs=256, max_model_len=4096)`.
    """

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
        chat_format = ChatFormat(template=chat_template, raw=raw, variables=chat_template_kwargs or {})
        self._engine = _load_engine(target, drafter, depth, dtype, device, quantization, cache, chat_format, settings)
        self._cache = cache
        self._requests = _RequestMaker(self._engine, depth)
        self._deltas: dict[int, deque[OutputDelta]] = {}
        """What open requests got and nobody has taken: a stream may be left for a while to ask something else."""

    def generate(self, prompts: Prompt | Sequence[Prompt], params: Params = None) -> list[RequestOutput]:
        """Continue each prompt, all together; answers come in the order of the prompts."""
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
        """Answer one prompt, or one conversation given as messages, piece by piece. Leaving it ends the answer."""
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
        """The engine below, for what this class does not offer."""
        return self._engine

    @property
    def stats(self) -> SpecDecodeStats:
        """How speculation went for all requests together."""
        return self._engine.stats

    def swap_drafter(self, drafter: str | None) -> None:
        """Go on with another drafter, or none. If it does not fit, nothing has changed.

        One of the same shape as the drafter before has its weights copied into place.
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
        """The next thing that a request got; the engine steps, for all of them, until there is one."""
        waiting = self._deltas[key]
        while not waiting:
            for delta in self._engine.step():
                if delta.key in self._deltas:
                    self._deltas[delta.key].append(delta)
        return waiting.popleft()

    def _drop(self, key: int) -> None:
        self._deltas.pop(key, None)
        self._engine.cancel(key)


class AsyncLLM:
    """The same for an event loop: requests of all tasks share the engine's batches. A context manager, or `close` it.

    Steps run on a thread of their own. A task that is cancelled, or a stream that is left, ends its answer.
    """

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
        chat_format = ChatFormat(template=chat_template, raw=raw, variables=chat_template_kwargs or {})
        engine = _load_engine(target, drafter, depth, dtype, device, quantization, cache, chat_format, settings)
        self._requests = _RequestMaker(engine, depth)
        self._engine = AsyncEngine(engine)

    async def generate(self, prompt: Prompt, params: SamplingParams | None = None) -> RequestOutput:
        """Continue a prompt."""
        return await self._answer(self._requests.of_prompt(prompt, params))

    async def chat(
        self,
        conversation: Conversation,
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> RequestOutput:
        """Answer a conversation through the target's chat template."""
        (messages,) = _conversations(conversation)
        return await self._answer(self._requests.of_chat(messages, params, tools))

    async def stream(
        self, prompt: Prompt | Sequence[Message], params: SamplingParams | None = None
    ) -> AsyncGenerator[OutputDelta, None]:
        """Answer one prompt, or one conversation given as messages, piece by piece."""
        async with aclosing(self._engine.stream(self._requests.of_either(prompt, params))) as deltas:
            async for delta in deltas:
                yield delta

    async def _answer(self, request: Request) -> RequestOutput:
        stats: list[SpecDecodeStats] = []
        deltas = self._engine.stream(request, taken_on=lambda engine, key: stats.append(engine.stats_of(key)))
        async with aclosing(deltas):
            return RequestOutput.of([delta async for delta in deltas], stats[0])

    def close(self) -> None:
        """Stop after the step under way; answers under way end with an error."""
        self._engine.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _RequestMaker:
    """From prompts and `SamplingParams` to the engine's requests."""

    def __init__(self, engine: Engine, depth: int | Literal["auto"]) -> None:
        self._target, self._max_model_len, self._depth = engine.target, engine.max_model_len, depth
        self._stop_ids = engine.target.stop_ids()
        self._guidance: LlGuidance | None = None

    def of_prompt(self, prompt: Prompt, params: SamplingParams | None) -> Request:
        """A text as it is, with what its tokenizer puts before texts, or token ids."""
        return self._request(self._target.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt, params)

    def of_chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> Request:
        """A conversation."""
        return self._request(self._target.encode_chat(messages, tools), params)

    def of_either(self, prompt: Prompt | Sequence[Message], params: SamplingParams | None) -> Request:
        """A prompt or a conversation, whichever it is."""
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
        forms = (params.json_schema, params.regex, params.choice, params.grammar)
        if all(form is None for form in forms):
            return None
        if self._guidance is None:
            self._guidance = LlGuidance(self._target.tokenizer, self._target.facts.vocab_size)
        if params.json_schema is not None:
            schema = params.json_schema
            return self._guidance.json_schema(schema if isinstance(schema, str) else dict(schema))
        if params.regex is not None:
            return self._guidance.regex(params.regex)
        if params.choice is not None:
            return self._guidance.choice(params.choice)
        assert params.grammar is not None
        return self._guidance.grammar(params.grammar)


def _load_engine(
    target: str,
    drafter: str | None,
    depth: int | Literal["auto"],
    dtype: str,
    device: str,
    quantization: str,
    cache: Path | None,
    chat_format: ChatFormat,
    settings: Mapping[str, Any],
) -> Engine:
    """An engine for both; what cannot work is refused before weights are read."""
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
    loaded, model = load_pair(
        target, name, dtype=dtype, device=device, quantization=quantization, cache=cache, chat_format=chat_format
    )
    engine = Engine(loaded, model, config=config)
    if loaded.device.type == "cpu" and not config.capture_ahead:
        engine.capture_graphs()  # a second at most, so that the first answers are drafted for as deep as pays
    return engine


def _speculation(depth: int | Literal["auto"], method: Literal["auto", "eagle3", "suffix"]) -> Speculation:
    if depth == "auto":
        return Speculation(method=method)
    return Speculation(mode="fixed", depth=depth, method=method) if depth else Speculation(mode="off", method=method)


def _several(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt is a text or a list of token ids; anything else is a list of prompts."""
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _conversations(conversations: Conversation | Sequence[Conversation]) -> list[list[Message]]:
    """One conversation is a text or a list of messages; anything else is a list of conversations."""
    one = isinstance(conversations, str) or (conversations and isinstance(conversations[0], Mapping))
    several: Sequence[Any] = [conversations] if one else conversations
    return [[{"role": "user", "content": each}] if isinstance(each, str) else list(each) for each in several]


def _paired(prompts: Sequence[Each], params: Params) -> list[tuple[Each, SamplingParams]]:
    """A prompt and its own params: of params for all, every prompt has another seed."""
    if params is None or isinstance(params, SamplingParams):
        shared = params or SamplingParams()
        return [(prompt, replace(shared, seed=shared.seed + number)) for number, prompt in enumerate(prompts)]
    if len(params) != len(prompts):
        raise UserError(f"there are {len(prompts)} prompts and {len(params)} params; give one for all or one for each")
    return list(zip(prompts, params, strict=True))
