"""Sampling options of a request, and their limits.

All options shape the target's distribution p before a token is chosen from it, so greedy and sampled answers obey them,
with and without drafts. They are applied in vLLM's order, first those that may change the most likely token, which
greedy decoding obeys too, then those that cut the tail: allowed tokens, logit bias, repetition, frequency and presence
penalty; then temperature, min-p, top-k, top-p. `engine/runner/slot_sampling.py` applies them, for all rows at once;
`tests/oracle/shaping.py` is its plain counterpart.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite

from eyas.errors import UserError

IMPOSSIBLE = float("-inf")
LARGEST_BIAS, LARGEST_PENALTY = 100.0, 2.0
"""The limits of the OpenAI API."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Options by which the next token is chosen."""

    temperature: float = 0.0
    """0 takes the most likely token."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose total probability reaches this."""
    min_p: float = 0.0
    """Keep tokens with at least this share of the highest probability."""
    repetition_penalty: float = 1.0
    """Divides the positive logits of tokens in prompt or output, multiplies the negative ones."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens in the output."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once for each time it is in the output."""
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    """Added to the logits of these tokens. Kept as sorted pairs, so that this class can be hashed."""
    allowed_tokens: frozenset[int] | None = None
    """The only tokens allowed; None allows all."""

    def __post_init__(self) -> None:
        # Smaller ones overflow float32 logits; infinity makes logits of minus infinity undefined.
        if self.temperature != 0 and not 1e-5 <= self.temperature < float("inf"):
            raise UserError(
                f"temperature {self.temperature} is neither 0 nor a finite number from 1e-05; use 0 for greedy decoding"
            )
        if self.top_k < 0:
            raise UserError(f"top_k {self.top_k} is below 0; use 0 to keep every token")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p {self.top_p} is outside (0, 1]; use 1 to keep every token")
        if not 0 <= self.min_p <= 1:
            raise UserError(f"min_p {self.min_p} is outside [0, 1]; use 0 to keep every token")
        if not (self.repetition_penalty > 0 and isfinite(self.repetition_penalty)):
            raise UserError(
                f"repetition_penalty {self.repetition_penalty} is no finite number above 0; use 1 for no penalty"
            )
        for name in ("presence_penalty", "frequency_penalty"):
            if not abs(getattr(self, name)) <= LARGEST_PENALTY:
                raise UserError(f"{name} {getattr(self, name)} is outside [-2, 2]; use 0 for no penalty")
        pairs = self.logit_bias.items() if isinstance(self.logit_bias, Mapping) else self.logit_bias
        object.__setattr__(self, "logit_bias", tuple(sorted(pairs)))
        for token, bias in self.bias_pairs:
            if not abs(bias) <= LARGEST_BIAS:
                raise UserError(
                    f"logit_bias {bias} of token {token} is outside [-100, 100]; -100 all but forbids a token"
                )
        if self.allowed_tokens is not None and not self.allowed_tokens:
            raise UserError("allowed_tokens names 0 tokens, so none could come; name 1 or more, or leave it out")
        if (lowest := min(self._named_tokens(), default=0)) < 0:
            raise UserError(
                f"logit_bias or allowed_tokens names token {lowest}, below 0; tokens are named by their ids"
            )

    @property
    def bias_pairs(self) -> tuple[tuple[int, float], ...]:
        assert isinstance(self.logit_bias, tuple)
        return self.logit_bias

    @property
    def penalises(self) -> bool:
        """Whether a penalty needs the counts of earlier tokens."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    def require_vocabulary(self, size: int) -> None:
        """Raise if a named token is outside a vocabulary of this size."""
        if (highest := max(self._named_tokens(), default=0)) >= size:
            raise UserError(
                f"logit_bias or allowed_tokens names token {highest}, above the last one {size - 1} of this target; "
                "use ids of its own tokenizer"
            )

    def _named_tokens(self) -> list[int]:
        return [*(token for token, _ in self.bias_pairs), *(self.allowed_tokens or ())]
