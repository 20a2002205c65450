"""Single tokens as text, for log probabilities."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase

from eyas.engine.detokenizer import UNFINISHED
from eyas.engine.sampler import TokenLogprobs

MIN_LOGPROB = -9999.0
"""JSON has no minus infinity; OpenAI writes this for what cannot come."""


class TokenText:
    """The text of tokens by themselves, special ones included."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, special: Mapping[int, str]) -> None:
        self._special = special
        self._text = lru_cache(maxsize=2**16)(lambda token: str(tokenizer.decode([token], skip_special_tokens=False)))

    def special(self, token: int) -> str:
        """What a token that sets off tool calls is to be read as; an answer's text leaves special tokens out."""
        return self._special.get(token, "")

    def chat_logprobs(self, entry: TokenLogprobs) -> dict[str, Any]:
        """A token as chats report it."""
        top = [self._logprob(token, logprob) for token, logprob in entry.top]
        return self._logprob(entry.token, entry.logprob) | {"top_logprobs": top}

    def completion_logprobs(
        self, entries: Sequence[TokenLogprobs], texts: Sequence[str], offset: int
    ) -> dict[str, Any]:
        """Tokens as completions report them; offsets are where their text begins in the answer."""
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
        # Part of a character has no text of its own, and which bytes it has only its tokenizer's kind could tell.
        known = list(text.encode()) if UNFINISHED not in text else None
        return {"token": text, "logprob": max(logprob, MIN_LOGPROB), "bytes": known}
