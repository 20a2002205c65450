"""The text of single tokens, for log probabilities and tool-call markers."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase

from eyas.engine.detokenizer import UNFINISHED
from eyas.engine.sampler import TokenLogprobs

MIN_LOGPROB = -9999.0
"""JSON has no minus infinity; OpenAI uses this value for impossible tokens."""


class TokenText:
    """Decodes single tokens, special ones included."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, special: Mapping[int, str]) -> None:
        self._special = special
        self._text = lru_cache(maxsize=2**16)(lambda token: str(tokenizer.decode([token], skip_special_tokens=False)))

    def special(self, token: int) -> str:
        """The text of a special token that marks tool calls, else empty: an answer's text omits special tokens."""
        return self._special.get(token, "")

    def chat_logprobs(self, entry: TokenLogprobs) -> dict[str, Any]:
        """One token in the format of chat completions."""
        top = [self._logprob(token, logprob) for token, logprob in entry.top]
        return self._logprob(entry.token, entry.logprob) | {"top_logprobs": top}

    def completion_logprobs(
        self, entries: Sequence[TokenLogprobs], texts: Sequence[str], offset: int
    ) -> dict[str, Any]:
        """Tokens in the format of text completions; `offset` is where their text starts in the answer."""
        offsets = []
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        return {
            "tokens": [self._text(entry.token) for entry in entries],
            "token_logprobs": [max(entry.logprob, MIN_LOGPROB) for entry in entries],
            "top_logprobs": [
                {self._text(token): max(logprob, MIN_LOGPROB) for token, logprob in reversed(entry.top)}
                for entry in entries
            ],
            "text_offset": offsets,
        }

    def _logprob(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._text(token)
        # Part of a character has no text, and its bytes depend on the kind of tokenizer.
        known = list(text.encode()) if UNFINISHED not in text else None
        return {"token": text, "logprob": max(logprob, MIN_LOGPROB), "bytes": known}
