"""What vLLM returns beside OpenAI's fields: why an answer stopped, and token ids."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from eyas.engine.output import OutputDelta
from eyas.serve.protocol import GenerationRequest
from eyas.serve.request_builder import EngineRequests

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

    @classmethod
    def of(cls, body: GenerationRequest, engine_requests: EngineRequests) -> "ChoiceExtras":
        """As a body asks for it."""
        return cls(
            eos_ids=engine_requests.eos_ids,
            prompts=tuple(request.prompt for request in engine_requests.requests),
            return_token_ids=body.return_token_ids,
            tokens_as_ids=body.return_tokens_as_token_ids,
        )

    def choice(self, kind: Kind, index: int, deltas: Sequence[OutputDelta], *, first: bool) -> dict[str, Any]:
        """Fields of a choice that got these outputs; `first` if nothing of it was sent before."""
        reason = deltas[-1].stop_reason
        fields: dict[str, Any] = {"stop_reason": None if reason in self.eos_ids else reason}
        if self.return_token_ids:
            fields["token_ids"] = [token for delta in deltas for token in delta.tokens]
            if kind == "text" and first:
                fields["prompt_token_ids"] = list(self.prompts[index])
        return fields

    def response(self, kind: Kind) -> dict[str, Any]:
        """Fields of a chat response, or of its first chunk: there is one prompt."""
        return {"prompt_token_ids": list(self.prompts[0])} if self.return_token_ids and kind == "chat" else {}
