"""Configuration of suffix drafts, with the names of vLLM's suffix decoding."""

import sys
from dataclasses import dataclass
from math import inf
from reprlib import repr as shortened

from eyas.errors import UserError

MOST_DRAFTS = 48


@dataclass(frozen=True, kw_only=True)
class SuffixConfig:
    """Limits of matching, and of the earlier answers that are kept."""

    max_tree_depth: int = 24
    """Longest match considered; also the most drafts, unless `num_speculative_tokens` is given."""
    max_spec_factor: float = 1.0
    """Most drafts, as a multiple of the match length."""
    min_token_prob: float = 0.1
    """Least share of votes for a draft."""
    num_speculative_tokens: int | None = None
    """Most drafts per request and step."""
    max_cached_requests: int = 10_000
    """Answers kept per caller for later requests of that caller; with 0 only the request's own text is searched."""
    max_cached_tokens: int = 2**16
    """Tokens kept per caller; the oldest answers are dropped first."""
    max_callers: int = 32
    """Callers whose answers are kept; the least recently active are dropped first."""
    max_age_seconds: float = 3600.0

    def __post_init__(self) -> None:
        for name, least, most in (
            ("max_tree_depth", 2, MOST_DRAFTS),
            ("max_cached_requests", 0, None),
            ("max_cached_tokens", 32, 2**24),
            ("max_callers", 1, None),
            ("num_speculative_tokens", 1, MOST_DRAFTS),
        ):
            value = getattr(self, name)
            if value is None and name == "num_speculative_tokens":
                continue
            if not _is_number(value, int) or value < least or (most is not None and value > most):
                bounds = f"of {least} or more" if most is None else f"from {least} to {most}"
                raise UserError(f"suffix drafts: {name} is {shortened(value)}; it must be a whole number {bounds}")
        share, longest = self.min_token_prob, sys.float_info.max
        if not _is_number(share, float, int) or not 0 <= share <= 1:
            raise UserError(f"suffix drafts: min_token_prob is {shortened(share)}; it must be a number from 0 to 1")
        for name in ("max_spec_factor", "max_age_seconds"):
            value = getattr(self, name)
            if not _is_number(value, float, int) or not (0 < value <= longest or value == inf):
                bounds = f"a number above 0, up to {longest:.1e} or infinity"
                raise UserError(f"suffix drafts: {name} is {shortened(value)}; it must be {bounds}")

    @property
    def deepest(self) -> int:
        return self.num_speculative_tokens or self.max_tree_depth


def _is_number(value: object, *kinds: type) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool)
