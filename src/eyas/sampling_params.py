"""What a caller of the Python API may ask of an answer, in the words of vLLM's `SamplingParams`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from eyas.errors import UserError

FORMS = ("json_schema", "regex", "choice", "grammar")
"""Fields that say what the answer must look like; one of them at most."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How an answer is generated. The drafter never changes it: speculation is about speed alone.

    Values are checked here as far as they can be without the target; the rest when a request is made of them.
    """

    max_tokens: int | None = 256
    """New tokens at most; None: as many as the context has room for."""
    min_tokens: int = 0
    """Before there are as many, the answer does not end."""
    temperature: float = 0.0
    """0 takes the most likely token."""
    top_p: float = 1.0
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    seed: int = 0
    """Decides all chance of the answer, whatever else is in the batch. Prompts of one call count up from here."""
    stop: str | tuple[str, ...] | list[str] = ()
    """Texts that end the answer; they are not part of it."""
    stop_token_ids: tuple[int, ...] | list[int] = ()
    """Tokens that end it, besides the target's own."""
    bad_words: tuple[str, ...] | list[str] = ()
    """Texts that the answer does not have, by their tokens."""
    include_stop_str_in_output: bool = False
    """Whether the text has the stop string, or the text of the stop token, that ended it."""
    detokenize: bool = True
    """Whether text is made of the tokens; without, all texts are empty, and an answer takes the host less time."""
    skip_special_tokens: bool = True
    """Whether the text leaves special tokens out."""
    ignore_eos: bool = False
    """Go on behind the target's own stop tokens."""
    logprobs: int | None = None
    """Alternatives to report beside each token; 0 reports the chosen one alone, None nothing."""
    prompt_logprobs: int | None = None
    """The same for each token of the prompt but the first, which is computed past the prefix cache."""
    json_schema: Mapping[str, Any] | str | None = None
    """The answer is JSON that this schema allows."""
    regex: str | None = None
    """The answer matches this regular expression."""
    choice: tuple[str, ...] | list[str] | None = None
    """The answer is one of these texts."""
    grammar: str | None = None
    """The answer is derived by this grammar, in Lark's syntax or llama.cpp's GBNF."""
    depth: int | Literal["auto"] | None = None
    """Tokens to draft per verification: a number, 0 for none, auto for as deep as pays; None: as the LLM was told."""
    speculation_method: Literal["auto", "eagle3", "suffix"] = "auto"
    """Who drafts: whatever pays of what the LLM has, the drafter alone, or suffix drafts alone."""

    def __post_init__(self) -> None:
        given = [name for name in FORMS if getattr(self, name) is not None]
        if len(given) > 1:
            raise UserError(f"{given[0]} and {given[1]} both say what the answer looks like; give one")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise UserError(f"max_tokens is {self.max_tokens}; it must be 1 or more, or None for all there is room for")
        if self.depth is not None and self.depth != "auto" and (isinstance(self.depth, str) or self.depth < 0):
            raise UserError(f"depth is {self.depth!r}; give a number from 0, or 'auto' for as deep as pays")
