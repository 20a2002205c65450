"""The text of single tokens, for log probabilities and tool-call markers."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase

from eyas.engine.detokenizer import UNFINISHED
from eyas.engine.logprobs import TokenLogprobs

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

    def name(self, token: int, as_id: bool) -> str:
        """A token's text, or its id in vLLM's words, which tells apart tokens of equal text."""
        return f"token_id:{token}" if as_id else self._text(token)

    def chat_logprobs(self, entry: TokenLogprobs, as_ids: bool = False) -> dict[str, Any]:
        """One token in the format of chat completions."""
        top = [self._logprob(token, logprob, as_ids) for token, logprob in entry.top]
        return self._logprob(entry.token, entry.logprob, as_ids) | {"top_logprobs": top}

    def completion_logprobs(
        self, entries: Sequence[TokenLogprobs], texts: Sequence[str], offset: int, as_ids: bool = False
    ) -> dict[str, Any]:
        """Tokens in the format of text completions; `offset` is where their text starts in the answer.

        As OpenAI does, the token itself is told even if it is not among the most likely ones.
        """
        offsets = []
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        return {
            "tokens": [self.name(entry.token, as_ids) for entry in entries],
            "token_logprobs": [max(entry.logprob, MIN_LOGPROB) for entry in entries],
            "top_logprobs": [
                {
                    self.name(token, as_ids): max(logprob, MIN_LOGPROB)
                    for token, logprob in ((entry.token, entry.logprob), *reversed(entry.top))
                }
                for entry in entries
            ],
            "text_offset": offsets,
        }

    def prompt_logprobs(self, entry: TokenLogprobs, alternatives: int) -> dict[str, Any]:
        """A token of a prompt and the most likely ones in its place, in vLLM's format: by their ids."""
        ranked = [(token, logprob, rank) for rank, (token, logprob) in enumerate(entry.top[:alternatives], 1)]
        return {
            str(token): {
                "logprob": max(logprob, MIN_LOGPROB),
                "rank": rank,
                "decoded_token": self._text(token),
            }
            for token, logprob, rank in (*ranked, (entry.token, entry.logprob, entry.rank))
        }

    def _logprob(self, token: int, logprob: float, as_id: bool) -> dict[str, Any]:
        text = self._text(token)
        # Part of a character has no text, and its bytes depend on the kind of tokenizer.
        known = list(text.encode()) if UNFINISHED not in text else None
        return {"token": self.name(token, as_id), "logprob": max(logprob, MIN_LOGPROB), "bytes": known}
