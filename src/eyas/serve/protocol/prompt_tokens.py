"""What a body says about the tokens of its prompts, and of texts."""

from collections.abc import Sequence

from eyas.serve.api_error import ApiError
from eyas.serve.protocol.completions import GenerationRequest
from eyas.target.text import TargetText


def truncated(
    prompt: Sequence[int], body: GenerationRequest, max_tokens: int | None, max_model_len: int
) -> Sequence[int]:
    """The last tokens of a prompt, if the body asks for no more; -1: as many as leave room for the answer."""
    most = body.truncate_prompt_tokens
    if most is None:
        return prompt
    if most > max_model_len:
        raise ApiError(
            400,
            f"truncate_prompt_tokens is {most}, above the {max_model_len} tokens of this server; lower it, or use -1",
            field="truncate_prompt_tokens",
        )
    if most == -1:
        most = max(1, max_model_len - (max_tokens or 1))
    return prompt[max(0, len(prompt) - most) :]


def require_spaces(body: GenerationRequest, target: TargetText) -> None:
    """Refuse to leave out spaces that the tokenizer's decoding puts in: fast tokenizers put in none."""
    if not body.spaces_between_special_tokens and not target.tokenizer.is_fast:
        raise ApiError(
            400,
            "spaces_between_special_tokens is false, but the tokenizer of this model puts them in; leave it out",
            field="spaces_between_special_tokens",
            code="unsupported_parameter",
        )
