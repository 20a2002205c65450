"""The text of single tokens: for log probabilities, tool-call markers, and prompts that come back."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase

from eyas.engine.detokenizer import UNFINISHED, TextStream
from eyas.engine.logprobs import TokenLogprobs
from eyas.target.text import TargetText

MIN_LOGPROB = -9999.0
"""JSON has no minus infinity; OpenAI uses this value for impossible tokens."""


class TokenText:
    """Decodes single tokens, special ones included."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, special: Mapping[int, str]) -> None:
        self._special = special
        self._text = lru_cache(maxsize=2**16)(lambda token: str(tokenizer.decode([token], skip_special_tokens=False)))

    def special(self, token: int) -> str:
        """The text of a special token that marks tool calls or reasoning, else empty."""
        return self._special.get(token, "")

    def name(self, token: int, as_id: bool) -> str:
        """A token's text, or its id as vLLM writes it, which tells apart tokens of equal text."""
        return f"token_id:{token}" if as_id else self._text(token)

    def chat_logprobs(self, entry: TokenLogprobs, as_ids: bool = False) -> dict[str, Any]:
        """One token in the format of chat completions."""
        top = [self._logprob(token, logprob, as_ids) for token, logprob in entry.top]
        return self._logprob(entry.token, entry.logprob, as_ids) | {"top_logprobs": top}

    def completion_logprobs(
        self, entries: Sequence[TokenLogprobs], texts: Sequence[str], offset: int, as_ids: bool = False
    ) -> dict[str, Any]:
        """Tokens in the format of text completions; `offset` is where their text starts in the answer.

        As in OpenAI's API, the token itself is listed even if it is not among the most likely ones.
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
            str(token): {"logprob": max(logprob, MIN_LOGPROB), "rank": rank, "decoded_token": self._text(token)}
            for token, logprob, rank in (*ranked, (entry.token, entry.logprob, entry.rank))
        }

    def _logprob(self, token: int, logprob: float, as_id: bool) -> dict[str, Any]:
        text = self._text(token)
        # Part of a character has no text, and its bytes depend on the kind of tokenizer.
        known = list(text.encode()) if UNFINISHED not in text else None
        return {"token": self.name(token, as_id), "logprob": max(logprob, MIN_LOGPROB), "bytes": known}


@dataclass(frozen=True, kw_only=True)
class PromptEcho:
    """A prompt that comes back before its answer, and the part of its text that each token is."""

    tokens: tuple[int, ...]
    texts: tuple[str, ...]

    @property
    def text(self) -> str:
        """The text of the prompt."""
        return "".join(self.texts)

    @classmethod
    def of(cls, tokens: tuple[int, ...], given: str | None, target: TargetText) -> "PromptEcho":
        """The echo of tokens; `given` is the text that the client sent, if it sent one.

        Special tokens are shown, unless the tokenizer added them to the client's text.
        """
        texts = _texts(tokens, target, skip_special_tokens=False)
        if given is not None and "".join(texts) != given:
            texts = _texts(tokens, target, skip_special_tokens=True)
        return cls(tokens=tokens, texts=tuple(texts))

    def logprobs(self, entries: Sequence[TokenLogprobs], token_text: TokenText, as_ids: bool) -> dict[str, Any]:
        """Logprobs of its tokens. Nothing comes before the first, so it has none."""
        others = token_text.completion_logprobs(entries, self.texts[1:], len(self.texts[0]), as_ids)
        name = token_text.name(self.tokens[0], as_ids)
        first = {"tokens": name, "token_logprobs": None, "top_logprobs": None, "text_offset": 0}
        return {key: [value, *others[key]] for key, value in first.items()}


def _texts(tokens: Sequence[int], target: TargetText, *, skip_special_tokens: bool) -> list[str]:
    """The text of each token as it continues those before it."""
    stream = TextStream(lambda some: target.decode(some, skip_special_tokens))
    texts = [stream.push(token) for token in tokens]
    texts[-1] += stream.finish()
    return texts
