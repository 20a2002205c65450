"""What comes back beside an answer: why it stopped, token ids, the prompt and its logprobs, as vLLM has them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from eyas.engine.output import OutputDelta
from eyas.serve.builders.prompt_echo import PromptEcho
from eyas.serve.builders.request_builder import EngineRequests
from eyas.serve.builders.token_text import TokenText
from eyas.serve.protocol.completions import CompletionRequest, GenerationRequest

Kind = Literal["chat", "text"]


@dataclass(frozen=True, kw_only=True)
class ChoiceExtras:
    """What one request gets of it."""

    eos_ids: frozenset[int]
    """Stop tokens of the target's own, which are no reason worth telling."""
    prompts: tuple[tuple[int, ...], ...]
    """The prompt of each choice."""
    return_token_ids: bool
    tokens_as_ids: bool
    """Whether logprobs name tokens by their ids."""
    prompt_logprobs: int | None
    """Alternatives to tell for tokens of the prompt; None tells nothing of them."""
    echoes: tuple[PromptEcho, ...]
    """The prompt of each choice, where it comes back before the answer."""
    echo_logprobs: int | None
    """Alternatives to tell for tokens of an echo."""

    @classmethod
    def of(cls, body: GenerationRequest, engine_requests: EngineRequests) -> "ChoiceExtras":
        """As a body asks for it."""
        return cls(
            eos_ids=engine_requests.eos_ids,
            prompts=tuple(request.prompt for request in engine_requests.requests),
            return_token_ids=body.return_token_ids,
            tokens_as_ids=body.return_tokens_as_token_ids,
            prompt_logprobs=body.prompt_logprobs,
            echoes=engine_requests.echoes,
            echo_logprobs=body.logprobs if isinstance(body, CompletionRequest) else None,
        )

    def choice(
        self, kind: Kind, index: int, deltas: Sequence[OutputDelta], token_text: TokenText, *, first: bool
    ) -> dict[str, Any]:
        """Fields of a choice that got these outputs; `first` if nothing of it was sent before."""
        reason = deltas[-1].stop_reason
        fields: dict[str, Any] = {"stop_reason": None if reason in self.eos_ids else reason}
        if self.return_token_ids:
            fields["token_ids"] = [token for delta in deltas for token in delta.tokens]
            if kind == "text" and first:
                fields["prompt_token_ids"] = list(self.prompts[index])
        if kind == "text" and first:
            fields |= self._prompt_logprobs(deltas[0], token_text)
        return fields

    def response(self, kind: Kind, first: OutputDelta, token_text: TokenText) -> dict[str, Any]:
        """Fields of a chat response, or of its first chunk: there is one prompt. `first` is what came first."""
        if kind == "text":
            return {}
        ids = {"prompt_token_ids": list(self.prompts[0])} if self.return_token_ids else {}
        return ids | self._prompt_logprobs(first, token_text)

    def echo_text(self, index: int) -> str:
        """What comes before the answer."""
        return self.echoes[index].text if self.echoes else ""

    def with_echo(
        self, index: int, first: OutputDelta, logprobs: dict[str, Any] | None, token_text: TokenText
    ) -> dict[str, Any] | None:
        """Logprobs of the echo, then those of the answer; `first` is what came first."""
        if not self.echoes or self.echo_logprobs is None:
            return logprobs
        entries = [replace(entry, top=entry.top[: self.echo_logprobs]) for entry in first.prompt_logprobs or ()]
        told = self.echoes[index].logprobs(entries, token_text, self.tokens_as_ids)
        return {name: [*values, *(logprobs or {}).get(name, ())] for name, values in told.items()}

    def _prompt_logprobs(self, first: OutputDelta, token_text: TokenText) -> dict[str, Any]:
        if self.prompt_logprobs is None:
            return {}
        told = [token_text.prompt_logprobs(entry, self.prompt_logprobs) for entry in first.prompt_logprobs or ()]
        return {"prompt_logprobs": [None, *told]}  # nothing comes before the first token
