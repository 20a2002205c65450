"""Sampling parameters of the Python API, named as in vLLM."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from eyas.errors import UserError

FORMS = ("json_schema", "regex", "choice", "grammar")
"""Fields for structured output, of which at most one may be set."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Parameters of a request. Speculation never changes an answer, only its speed.

    Values are checked here as far as possible without the target; the rest when a request is made.
    """

    max_tokens: int | None = 256
    """Limit of new tokens; None uses all room in the context."""
    min_tokens: int = 0
    """The answer does not end before this many new tokens."""
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
    """Seed of the answer, independent of the batch; each further prompt of a call adds 1."""
    stop: str | tuple[str, ...] | list[str] = ()
    """Texts that end the answer."""
    stop_token_ids: tuple[int, ...] | list[int] = ()
    """Tokens that end the answer, besides the target's own stop tokens."""
    bad_words: tuple[str, ...] | list[str] = ()
    """Texts that may not occur in the answer, by their tokens."""
    include_stop_str_in_output: bool = False
    """Keep the stop string, or the text of the stop token, in the text."""
    detokenize: bool = True
    """Make text of the tokens; without it, texts are empty, which saves time on the host."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    ignore_eos: bool = False
    """Ignore the target's own stop tokens."""
    logprobs: int | None = None
    """Number of alternatives to report for each token; 0 reports the chosen one alone, None nothing."""
    prompt_logprobs: int | None = None
    """Alternatives for each prompt token but the first; bypasses the prefix cache."""
    json_schema: Mapping[str, Any] | str | None = None
    """The answer is JSON of this schema."""
    regex: str | None = None
    """The answer matches this regular expression."""
    choice: tuple[str, ...] | list[str] | None = None
    """The answer is one of these texts."""
    grammar: str | None = None
    """The answer follows this grammar, in Lark's syntax or llama.cpp's GBNF."""
    depth: int | Literal["auto"] | None = None
    """Draft tokens per verification; 0 for none, auto for the fastest, None for the LLM's setting."""
    speculation_method: Literal["auto", "eagle3", "suffix"] = "auto"
    """Draft source: auto for the fastest, the drafter alone, or suffix decoding alone."""

    def __post_init__(self) -> None:
        given = [name for name in FORMS if getattr(self, name) is not None]
        if len(given) > 1:
            raise UserError(f"{given[0]} and {given[1]} both say what the answer looks like; give one")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise UserError(f"max_tokens is {self.max_tokens}; it must be 1 or more, or None for all there is room for")
        if self.depth is not None and self.depth != "auto" and (isinstance(self.depth, str) or self.depth < 0):
            raise UserError(f"depth is {self.depth!r}; give a number from 0, or 'auto' for as deep as pays")
